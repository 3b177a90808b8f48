"""The conversions of a training state between its four forms.

The model's form is the form on a single device. The devices' form is stored between steps, and may
be padded or reordered. Each `View` converts leaves between these two forms. The view decides with
which of the two forms steps compute, and which of the two forms checkpoints hold. Every method to
store state in another form is a view, such as `jaxdist.train.offload.HostMemory`.
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
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.train.state import TrainState
from jaxdist.types import Grads, Leaf, Params, PyTree

Change = Callable[[Any, Owner], Any]
"""A function from (a leaf, its owner) to the converted leaf.

The owner of a parameter is the parameter itself. The owner of a leaf of the optimizer's state is
the parameter to which the leaf belongs."""


class View(Protocol):
    """A form of leaves on the devices that differs from the model's form.

    Attributes:
      in_steps: whether steps compute with leaves in the devices' form.
      in_files: whether checkpoints have leaves in the devices' form.
      params: whether the view converts the parameters.
      opt_state: whether the view converts the optimizer's state.
    """

    @property
    def in_steps(self) -> bool: ...
    @property
    def in_files(self) -> bool: ...
    @property
    def params(self) -> bool: ...
    @property
    def opt_state(self) -> bool: ...

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        """Convert a leaf from the model's form to the devices' form."""
        ...

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        """Convert a leaf from the devices' form to the model's form."""
        ...


@dataclass(frozen=True)
class FilledShards:
    """A view that pads uneven shards of ZeRO with zeros, which are hidden from model and optimizer.

    Checkpoints contain the zeros, since orbax writes the arrays of the devices; but the shape that
    a checkpoint records for a tensor does not include the zeros.
    """

    zero: ZeroSplit
    in_steps: bool = field(default=False, init=False)
    in_files: bool = field(default=True, init=False)
    opt_state: bool = field(default=True, init=False)

    @property
    def params(self) -> bool:
        """Whether ZeRO splits the parameters, which happens only at stage 3."""
        return self.zero.stage == 3

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self.zero.fill_one(leaf, owner)

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self.zero.cut_one(leaf, owner)


@dataclass(frozen=True)
class StageOrder:
    """A view that reorders stacked layers from the model's order to the order of pipeline stages.

    Attributes:
      stack: the order of the layers on the stages.
      stacked: the names of the parameters whose first dim counts layers.
    """

    stack: StageStack
    stacked: frozenset[str]
    in_steps: bool = field(default=True, init=False)
    in_files: bool = field(default=False, init=False)
    params: bool = field(default=True, init=False)
    opt_state: bool = field(default=True, init=False)

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(self.stack.store, leaf, owner)

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(self.stack.restore, leaf, owner)

    def _moved(self, move: Callable[[jax.Array], jax.Array], leaf: Leaf, owner: Owner) -> PyTree:
        place = owner.place_of(0) if owner.name in self.stacked else None
        return leaf if place is None else jnp.moveaxis(move(jnp.moveaxis(leaf, place, 0)), 0, place)


@dataclass(frozen=True)
class Home:
    """The conversions of a state between its forms.

    `to_step` and `from_step` do not convert the state of the outer exchange, which only
    `outer_to_step` and `outer_from_step` convert.

    Attributes:
      views: the views of the plan, in the order in which `stored` applies them.
      transform: the optimizer. Leaves of its state that belong to a parameter are converted.
      outer: the shapes of the state of `jaxdist.train.state.Outer`. Leaves that belong to a
        parameter are converted too.
    """

    views: tuple[View, ...]
    model: Functional
    transform: optax.GradientTransformation
    outer: PyTree = ()

    def stored(self, state: TrainState) -> TrainState:
        """Convert a state from the model's form to the form that devices store between steps."""
        return self._store_all(self.views, state)

    def used(self, state: TrainState) -> TrainState:
        """Convert a state from the form that devices store between steps to the model's form."""
        return self._use_all(self.views, state)

    def stored_outer(self, carried: PyTree) -> PyTree:
        """Convert only the state of the outer exchange, as `stored` does."""
        return self._store_outer(self.views, carried)

    def used_params(self, params: Params) -> PyTree:
        """Convert only the parameters, as `used` does."""
        return self._params(self.views, params)

    def to_step(self, state: TrainState) -> TrainState:
        """Convert a state from the devices' form to the form with which steps compute."""
        return self._use(self._not_in_steps, state)

    def from_step(self, state: TrainState) -> TrainState:
        """Convert a state from the form with which steps compute to the devices' form."""
        return self._store(self._not_in_steps, state)

    def opt_to_step(self, opt_state: PyTree) -> PyTree:
        """Convert only the optimizer's state, as `to_step` does."""
        return self._use_owned(self._not_in_steps, opt_state, self.owners)

    def opt_from_step(self, opt_state: PyTree) -> PyTree:
        """Convert only the optimizer's state, as `from_step` does."""
        return self._store_owned(self._not_in_steps, opt_state, self.owners)

    def outer_to_step(self, carried: PyTree) -> PyTree:
        """Convert only the outer exchange's state, to the form with which steps compute."""
        return self._use_outer(self._not_in_steps, carried)

    def outer_from_step(self, carried: PyTree) -> PyTree:
        """Convert only the outer exchange's state, from the form with which steps compute."""
        return self._store_outer(self._not_in_steps, carried)

    def params_to_step(self, params: Params) -> PyTree:
        """Convert only the parameters, as `to_step` does."""
        return self._params(self._not_in_steps, params)

    def grads_to_step(self, grads: Grads) -> PyTree:
        """Convert sharded gradients from the devices' form to the form with which steps compute."""
        for view in reversed(self._not_in_steps):
            grads = self._each(view.use, grads)
        return grads

    def grads_from_step(self, grads: Grads) -> PyTree:
        """Convert sharded gradients from the form with which steps compute to the devices' form."""
        for view in self._not_in_steps:
            grads = self._each(view.store, grads)
        return grads

    def to_files(self, state: TrainState) -> TrainState:
        """Convert a state from the devices' form to the form that checkpoints contain."""
        return self._use_all(self._not_in_files, state)

    def from_files(self, state: TrainState) -> TrainState:
        """Convert a state from the form that checkpoints contain to the devices' form."""
        return self._store_all(self._not_in_files, state)

    @property
    def _not_in_steps(self) -> tuple[View, ...]:
        return tuple(view for view in self.views if not view.in_steps)

    @property
    def _not_in_files(self) -> tuple[View, ...]:
        return tuple(view for view in self.views if not view.in_files)

    @cached_property
    def owners(self) -> PyTree:
        """The parameter to which each leaf of the optimizer's state belongs, or None."""
        params, stacked = self.model.params, self.model.stacked
        state = jax.eval_shape(self.transform.init, self.model.trained)
        return owners(state, params, stacked)

    @cached_property
    def owners_of_outer(self) -> PyTree:
        """The parameter of each leaf of the outer exchange's state, or None for other leaves."""
        return owners(self.outer, self.model.params, self.model.stacked)

    def _store_all(self, views: Sequence[View], state: TrainState) -> TrainState:
        return replace(self._store(views, state), outer=self._store_outer(views, state.outer))

    def _use_all(self, views: Sequence[View], state: TrainState) -> TrainState:
        return replace(self._use(views, state), outer=self._use_outer(views, state.outer))

    def _store_outer(self, views: Sequence[View], carried: PyTree) -> PyTree:
        return self._store_owned(views, carried, self.owners_of_outer)

    def _use_outer(self, views: Sequence[View], carried: PyTree) -> PyTree:
        return self._use_owned(views, carried, self.owners_of_outer)

    def _store_owned(self, views: Sequence[View], tree: PyTree, owners: PyTree) -> PyTree:
        for view in views:
            tree = _owned(view.store, tree, owners) if view.opt_state else tree
        return tree

    def _use_owned(self, views: Sequence[View], tree: PyTree, owners: PyTree) -> PyTree:
        for view in reversed(views):
            tree = _owned(view.use, tree, owners) if view.opt_state else tree
        return tree

    def _store(self, views: Sequence[View], state: TrainState) -> TrainState:
        for view in views:
            state = self._changed(view, view.store, state)
        return state

    # `_use` inverts the views, in the reverse of the order in which `_store` applies them.
    def _use(self, views: Sequence[View], state: TrainState) -> TrainState:
        for view in reversed(views):
            state = self._changed(view, view.use, state)
        return state

    def _params(self, views: Sequence[View], params: Params) -> PyTree:
        for view in reversed(views):
            params = self._each(view.use, params) if view.params else params
        return params

    def _each(self, change: Change, params: Params) -> PyTree:
        return jax.tree.map(change, params, of_params(params))

    def _changed(self, view: View, change: Change, state: TrainState) -> TrainState:
        """Convert the optimizer's leaves that belong to a parameter, and the parameters."""
        opt_state, held = state.opt_state, state.params
        if view.opt_state:
            opt_state = _owned(change, opt_state, self.owners)
        if view.params:
            held = self._each(change, held)
        return replace(state, params=held, opt_state=opt_state)


def _owned(change: Change, tree: PyTree, owners: PyTree) -> PyTree:
    """Convert the leaves that have an owner; the other leaves of the tree are unchanged."""

    def changed(leaf: Leaf, owner: Owner | None) -> PyTree:
        return leaf if owner is None else change(leaf, owner)

    return jax.tree.map(changed, tree, owners)
