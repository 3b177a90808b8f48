"""How a training state is stored, which is not always as the model knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from jaxdist.models.functional import Functional
from jaxdist.optim.build import Optimizer
from jaxdist.parallel.pipeline.stack import StageStack
from jaxdist.parallel.zero import Zero, names_of
from jaxdist.train.state import TrainState
from jaxdist.trees import flatten_with_names

Change = Callable[[Any, str], Any]
"""Of a leaf that belongs to the parameter of this name."""


@dataclass(frozen=True)
class Storage:
    """Between a state as the model knows it, as checkpoints have it, and as devices hold it.

    Checkpoints have tensors as devices do, but stacked layers in the model's order.

    Attributes:
      zero: fills up the shards of what does not divide.
      stack: where a pipeline stores layers in another order than the model's.
    """

    model: Functional
    optimizer: Optimizer
    zero: Zero | None
    stack: StageStack | None

    def stored(self, state: TrainState) -> TrainState:
        """The model's state as devices hold it."""
        return self.filled(self.in_stage_order(state))

    def used(self, state: TrainState) -> TrainState:
        """The inverse of `stored`."""
        return self.in_model_order(self.cut(state))

    def used_params(self, params: Any) -> Any:
        """`used` of a state's parameters alone."""
        cut = self.cut_params(params)
        return cut if self.stack is None else self._each(self._ordered(self.stack.restore), cut)

    def in_stage_order(self, state: TrainState) -> TrainState:
        """Stacked layers in the pipeline's order instead of the model's."""
        return state if self.stack is None else self._all(self._ordered(self.stack.store), state)

    def in_model_order(self, state: TrainState) -> TrainState:
        """The inverse of `in_stage_order`."""
        return state if self.stack is None else self._all(self._ordered(self.stack.restore), state)

    def filled(self, state: TrainState) -> TrainState:
        """With the zeros that fill up ZeRO's shards."""
        return self._resized(self.zero.fill_one, state) if self.zero else state

    def cut(self, state: TrainState) -> TrainState:
        """The inverse of `filled`: what model and optimizer compute with."""
        return self._resized(self.zero.cut_one, state) if self.zero else state

    def cut_params(self, params: Any) -> Any:
        """`cut` of a state's parameters alone."""
        return self.zero.cut(params) if self.zero and self.zero.stage == 3 else params

    def _resized(self, resize: Change, state: TrainState) -> TrainState:
        assert self.zero is not None
        if not self.zero.padded:
            return state
        return self._all(resize, state, whole_params=self.zero.stage < 3)

    def _ordered(self, move: Callable[[jax.Array], jax.Array]) -> Change:
        named = flatten_with_names(self.model.params)
        layers = {name: leaf.shape[:1] for name, leaf in named if name in self.model.stacked}
        # An optimizer of the user's own may keep something else for a parameter than one like it.
        return lambda leaf, name: move(leaf) if leaf.shape[:1] == layers.get(name) else leaf

    @property
    def _names(self) -> Any:
        return names_of(self.model.params)

    def _each(self, change: Change, params: Any) -> Any:
        return jax.tree.map(change, params, self._names)

    def _all(self, change: Change, state: TrainState, *, whole_params: bool = False) -> TrainState:
        """Parameters, unless they are as they should be, and what the optimizer has for each."""
        transform = self.optimizer.transform
        opt_state = optax.tree.map_params(transform, change, state.opt_state, self._names)
        params = state.params if whole_params else self._each(change, state.params)
        return replace(state, params=params, opt_state=opt_state)
