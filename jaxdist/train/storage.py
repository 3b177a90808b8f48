"""How a training state is stored, which is not always as the model knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.errors import ConfigError
from jaxdist.models.functional import Functional
from jaxdist.optim.build import Optimizer
from jaxdist.optim.owners import Owner, of_params, owners
from jaxdist.parallel.pipeline.model.stack import StageStack
from jaxdist.parallel.zero import Zero
from jaxdist.train.state import TrainState
from jaxdist.trees import flatten_with_names

Change = Callable[[Any, Owner], Any]
"""Of a parameter, or of what an optimizer keeps for one."""


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
        layers = {name: leaf.shape[0] for name, leaf in named if name in self.model.stacked}

        def change(leaf: jax.Array, owner: Owner) -> jax.Array:
            place = owner.place_of(0 if owner.name in layers else None)
            if place is not None:
                return jnp.moveaxis(move(jnp.moveaxis(leaf, place, 0)), 0, place)
            if owner.name in layers and layers[owner.name] in leaf.shape:
                raise ConfigError(
                    f"optim: what the optimizer keeps for {owner.name}, of shape {leaf.shape}, may "
                    f"or may not count its {layers[owner.name]} layers, which this schedule stores "
                    "in another order; take a schedule with one chunk a stage, or another number "
                    "of layers"
                )
            return leaf

        return change

    @cached_property
    def owners(self) -> Any:
        """For each leaf of the optimizer's state the parameter that it belongs to, or None."""
        params = self.model.params
        return owners(jax.eval_shape(self.optimizer.transform.init, params), params)

    def _each(self, change: Change, params: Any) -> Any:
        return jax.tree.map(change, params, of_params(self.model.params))

    def _all(self, change: Change, state: TrainState, *, whole_params: bool = False) -> TrainState:
        """Parameters, unless they are as they should be, and what the optimizer has for each."""

        def changed(leaf: Any, owner: Owner | None) -> Any:
            return leaf if owner is None else change(leaf, owner)

        opt_state = jax.tree.map(changed, state.opt_state, self.owners)
        params = state.params if whole_params else self._each(change, state.params)
        return replace(state, params=params, opt_state=opt_state)
