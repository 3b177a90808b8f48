"""What happens to a state between steps, beside the optimizer: the outer contract.

Local updates (DiLoCo, elastic averaging) and parameter servers let replicas go their own way for
some steps and then exchange parameters; such a way is one more implementation of `Outer`.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxdist.train.state import TrainState


class Outer(Protocol):
    """An exchange of parameters that does not happen at every step.

    What it carries (outer momentum, say) is `TrainState.outer`: saved and restored with the rest.
    """

    def begin(self, state: TrainState) -> Any:
        """What it carries before the first step; `state` has none yet."""
        ...

    def shardings(self, carried: Any) -> Any:
        """Where the leaves of what it carries lie; `carried` may be shapes."""
        ...

    def due(self, step: int) -> bool:
        """Whether to exchange after `step`; the same on every process."""
        ...

    def exchange(self, step: int, state: TrainState) -> TrainState:
        """The state that training goes on with after `step`."""
        ...
