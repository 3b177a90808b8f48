"""The error about a suspect training state, after which a run may restart from a checkpoint."""

from __future__ import annotations

from jaxdist.errors import RunError


class SuspectStateError(RunError):
    """The error for a training state that is wrong, perhaps because of a faulty device.

    Attributes:
      what: the description of the anomaly.
      advice: the instruction for the user.
      max_restores: the number of times that a run may restart from its newest checkpoint because of
        such an error.
    """

    def __init__(self, what: str, advice: str, *, max_restores: int = 0) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.advice = advice
        self.max_restores = max_restores

    def check_restores(self, restores: int) -> None:
        """Check that a run that has restarted `restores` times may restart again.

        Raises:
          SuspectStateError: the run may not restart again; the message gives the reason and the
            advice.
        """
        if restores < self.max_restores:
            return
        if not restores:
            raise self
        times = "once" if restores == 1 else f"{restores} times"
        advice = f"the run was already restored {times}; {self.advice}"
        raise SuspectStateError(self.what, advice) from self
