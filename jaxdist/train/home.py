"""How a training state is stored, which is not always as the model knows it.

A state has four forms: as the model knows it, as devices hold it, as steps compute with it, and as
checkpoints have it. Each `View` says how a leaf changes between the first two, and which of them
steps and checkpoints have. A new way to store state (offload, say) is one more view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxdist.models.functional import Functional
from jaxdist.optim.owners import Owner, of_params, owners
from jaxdist.parallel.pipeline.model.stack import StageStack
from jaxdist.parallel.zero import Zero
from jaxdist.train.state import TrainState
from jaxdist.types import Grads, Leaf, Params, PyTree

Change = Callable[[Any, Owner], Any]
"""Of a parameter, or of what an optimizer keeps for one."""


class View(Protocol):
    """One way in which devices hold leaves otherwise than the model knows them.

    Attributes:
      in_steps: whether steps compute with leaves as devices hold them.
      in_files: whether checkpoints have leaves as devices hold them.
      params: whether parameters are changed too, or only what the optimizer keeps for them.
    """

    @property
    def in_steps(self) -> bool: ...
    @property
    def in_files(self) -> bool: ...
    @property
    def params(self) -> bool: ...

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        """From the model's form to the devices'."""
        ...

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        """The inverse of `store`."""
        ...


@dataclass(frozen=True)
class FilledShards:
    """Zeros fill up ZeRO's shards of what does not divide; neither model nor optimizer sees them.

    Checkpoints have them, as orbax writes what devices hold; they are not part of a tensor's shape.
    """

    zero: Zero
    in_steps: bool = field(default=False, init=False)
    in_files: bool = field(default=True, init=False)

    @property
    def params(self) -> bool:
        """Below stage 3 parameters are whole."""
        return self.zero.stage == 3

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self.zero.fill_one(leaf, owner)

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self.zero.cut_one(leaf, owner)


@dataclass(frozen=True)
class StageOrder:
    """A pipeline's stages hold stacked layers in another order than the model's.

    Attributes:
      stacked: names of the parameters whose first dim counts layers.
    """

    stack: StageStack
    stacked: frozenset[str]
    in_steps: bool = field(default=True, init=False)
    in_files: bool = field(default=False, init=False)
    params: bool = field(default=True, init=False)

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(self.stack.store, leaf, owner)

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(self.stack.restore, leaf, owner)

    def _moved(self, move: Callable[[jax.Array], jax.Array], leaf: Leaf, owner: Owner) -> PyTree:
        place = owner.place_of(0) if owner.name in self.stacked else None
        return leaf if place is None else jnp.moveaxis(move(jnp.moveaxis(leaf, place, 0)), 0, place)


def views_of(model: Functional, zero: Zero | None, stack: StageStack | None) -> tuple[View, ...]:
    """The views of a plan, in the order in which a state is stored.

    Args:
      zero: fills up the shards of what does not divide, if anything.
      stack: where a pipeline stores layers in another order than the model's; else None.
    """
    views: list[View] = []
    if stack is not None:
        views.append(StageOrder(stack, model.stacked))
    if zero is not None and zero.padded:
        views.append(FilledShards(zero))
    return tuple(views)


@dataclass(frozen=True)
class Home:
    """A state between its forms.

    Attributes:
      transform: the optimizer, of whose state some leaves belong to parameters.
      outer: shapes of what `jaxdist.train.state.Outer` carries, of which some do too. Steps leave
        it as it is stored.
    """

    views: tuple[View, ...]
    model: Functional
    transform: optax.GradientTransformation
    outer: PyTree = ()

    def stored(self, state: TrainState) -> TrainState:
        """The model's state as devices hold it."""
        return self._store_all(self.views, state)

    def used(self, state: TrainState) -> TrainState:
        """The inverse of `stored`."""
        return self._use_all(self.views, state)

    def stored_outer(self, carried: PyTree) -> PyTree:
        """`stored` of what a state's outer exchange carries alone."""
        return self._store_outer(self.views, carried)

    def used_params(self, params: Params) -> PyTree:
        """`used` of a state's parameters alone."""
        return self._params(self.views, params)

    def to_step(self, state: TrainState) -> TrainState:
        """From devices to what model and optimizer compute with."""
        return self._use(self._not_in_steps, state)

    def from_step(self, state: TrainState) -> TrainState:
        """The inverse of `to_step`."""
        return self._store(self._not_in_steps, state)

    def outer_to_step(self, carried: PyTree) -> PyTree:
        """From what devices hold to what an outer exchange computes with."""
        return self._use_outer(self._not_in_steps, carried)

    def outer_from_step(self, carried: PyTree) -> PyTree:
        """The inverse of `outer_to_step`."""
        return self._store_outer(self._not_in_steps, carried)

    def params_to_step(self, params: Params) -> PyTree:
        """`to_step` of a state's parameters alone."""
        return self._params(self._not_in_steps, params)

    def grads_to_step(self, grads: Grads) -> PyTree:
        """Gradients in shards, as devices hold them, as the optimizer takes them."""
        for view in reversed(self._not_in_steps):
            grads = self._each(view.use, grads)
        return grads

    def grads_from_step(self, grads: Grads) -> PyTree:
        """The inverse of `grads_to_step`."""
        for view in self._not_in_steps:
            grads = self._each(view.store, grads)
        return grads

    def to_files(self, state: TrainState) -> TrainState:
        """From devices to what checkpoints have."""
        return self._use_all(self._not_in_files, state)

    def from_files(self, state: TrainState) -> TrainState:
        """The inverse of `to_files`."""
        return self._store_all(self._not_in_files, state)

    @property
    def _not_in_steps(self) -> tuple[View, ...]:
        return tuple(view for view in self.views if not view.in_steps)

    @property
    def _not_in_files(self) -> tuple[View, ...]:
        return tuple(view for view in self.views if not view.in_files)

    @cached_property
    def owners(self) -> PyTree:
        """For each leaf of the optimizer's state the parameter that it belongs to, or None."""
        params, stacked = self.model.params, self.model.stacked
        return owners(jax.eval_shape(self.transform.init, params), params, stacked)

    @cached_property
    def owners_of_outer(self) -> PyTree:
        """The same for each leaf of what the outer exchange carries."""
        return owners(self.outer, self.model.params, self.model.stacked)

    def _store_all(self, views: Sequence[View], state: TrainState) -> TrainState:
        return replace(self._store(views, state), outer=self._store_outer(views, state.outer))

    def _use_all(self, views: Sequence[View], state: TrainState) -> TrainState:
        return replace(self._use(views, state), outer=self._use_outer(views, state.outer))

    def _store_outer(self, views: Sequence[View], carried: PyTree) -> PyTree:
        for view in views:
            carried = _owned(view.store, carried, self.owners_of_outer)
        return carried

    def _use_outer(self, views: Sequence[View], carried: PyTree) -> PyTree:
        for view in reversed(views):
            carried = _owned(view.use, carried, self.owners_of_outer)
        return carried

    def _store(self, views: Sequence[View], state: TrainState) -> TrainState:
        for view in views:
            state = self._changed(view.store, state, params=view.params)
        return state

    def _use(self, views: Sequence[View], state: TrainState) -> TrainState:
        for view in reversed(views):
            state = self._changed(view.use, state, params=view.params)
        return state

    def _params(self, views: Sequence[View], params: Params) -> PyTree:
        for view in reversed(views):
            params = self._each(view.use, params) if view.params else params
        return params

    def _each(self, change: Change, params: Params) -> PyTree:
        return jax.tree.map(change, params, of_params(self.model.params))

    def _changed(self, change: Change, state: TrainState, *, params: bool) -> TrainState:
        """What the optimizer has for each parameter, and the parameters if they change too."""
        opt_state = _owned(change, state.opt_state, self.owners)
        held = self._each(change, state.params) if params else state.params
        return replace(state, params=held, opt_state=opt_state)


def _owned(change: Change, tree: PyTree, owners: PyTree) -> PyTree:
    """The tree with those of its leaves changed that belong to a parameter."""

    def changed(leaf: Leaf, owner: Owner | None) -> PyTree:
        return leaf if owner is None else change(leaf, owner)

    return jax.tree.map(changed, tree, owners)
