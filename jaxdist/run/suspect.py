"""What makes the state of a run doubtful, so that it may go back to one that is not."""

from __future__ import annotations

from jaxdist.errors import RunError


class SuspectStateError(RunError):
    """The state of a run is wrong, and a device may be why.

    Attributes:
      what: was seen.
      max_restores: how often a run may go back to its newest checkpoint for that.
    """

    def __init__(self, what: str, advice: str, *, max_restores: int = 0) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.advice = advice
        self.max_restores = max_restores

    def check_restores(self, restores: int) -> None:
        """Whether a run may go back that did so this often already.

        Raises:
          SuspectStateError: it may not.
        """
        if restores < self.max_restores:
            return
        if not restores:
            raise self
        times = "once" if restores == 1 else f"{restores} times"
        advice = f"the run went back {times} before; {self.advice}"
        raise SuspectStateError(self.what, advice) from self
