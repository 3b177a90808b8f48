"""The conversions of a training state between its four forms.

The model's form is the form on a single device. The devices' form is stored between steps, and may
be padded or reordered. Each `View` converts leaves between these two forms. The view decides with
which of the two forms steps compute, and which of the two forms checkpoints hold. Each way to store
state in a form other than the model's is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

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


@dataclass(frozen=True)
class View:
    """A form of leaves on the devices that differs from the model's form.

    Attributes:
      store: the conversion from the model's form to the devices' form.
      use: the conversion from the devices' form to the model's form.
      in_steps: whether steps compute with leaves in the devices' form.
      in_files: whether checkpoints have leaves in the devices' form.
      params: whether the view converts the parameters.
      opt_state: whether the view converts the optimizer's state.
    """

    store: Change
    use: Change
    in_steps: bool
    in_files: bool
    params: bool
    opt_state: bool


def filled_shards(zero: ZeroSplit) -> View:
    """Return the view that pads uneven shards of ZeRO with zeros.

    The zeros are hidden from model and optimizer. Checkpoints contain the zeros, since orbax writes
    the arrays of the devices; but the shape that a checkpoint records for a tensor does not include
    the zeros. ZeRO splits, and the view pads, the parameters only at stage 3.
    """
    given = {"in_steps": False, "in_files": True, "params": zero.stage == 3, "opt_state": True}
    return View(zero.fill_one, zero.cut_one, **given)


def stage_order(stack: StageStack, stacked: frozenset[str]) -> View:
    """Return the view that reorders stacked layers to the order of pipeline stages.

    Args:
      stack: the order of the layers on the stages.
      stacked: the names of the parameters whose first dim counts layers.
    """

    def moved(move: Callable[[jax.Array], jax.Array], leaf: Leaf, owner: Owner) -> PyTree:
        place = owner.place_of(0) if owner.name in stacked else None
        return leaf if place is None else jnp.moveaxis(move(jnp.moveaxis(leaf, place, 0)), 0, place)

    store, use = partial(moved, stack.store), partial(moved, stack.restore)
    return View(store, use, in_steps=True, in_files=False, params=True, opt_state=True)


def host_memory(names: frozenset[str], *, params: bool, in_files: bool = True) -> View:
    """Return the view that keeps parameters, or their optimizer's state, in the host's memory.

    A step copies parameters to the device where the step uses them (`jaxdist.models.host.resting`).

    Args:
      names: the names of the parameters.
      params: whether the parameters are in the host's memory. Otherwise their optimizer's state is.
      in_files: whether checkpoints read and write the host's memory directly. If they do not, the
        complete state is copied to the device first.
    """

    def moved(space: Any, leaf: Leaf, owner: Owner) -> PyTree:
        return jax.device_put(leaf, space) if owner.name in names else leaf

    there, back = (partial(moved, s) for s in (jax.memory.Space.Host, jax.memory.Space.Device))
    return View(there, back, params, in_files, params=params, opt_state=not params)


@dataclass(frozen=True, eq=False)
class Conversion:
    """A conversion of a state from one form to another, and of each part of a state by itself.

    Attributes:
      home: the conversions of which this is one; it knows the owners of leaves.
      changes: the views that differ between the two forms, each with its method `store` or `use`,
        in the order in which they convert a leaf.
      with_outer: whether a call converts the state of the outer exchange too, which no train step
        reads.
    """

    home: Home
    changes: tuple[tuple[View, Change], ...]
    with_outer: bool = True

    def __call__(self, state: TrainState) -> TrainState:
        """Convert a state."""
        opt_state, params = self.opt_state(state.opt_state), self.params(state.params)
        outer = self.outer(state.outer) if self.with_outer else state.outer
        return replace(state, params=params, opt_state=opt_state, outer=outer)

    def params(self, params: Params) -> PyTree:
        """Convert only the parameters."""
        changes = [change for view, change in self.changes if view.params]
        return _changed(changes, params, of_params(params))

    def opt_state(self, opt_state: PyTree) -> PyTree:
        """Convert only the optimizer's state."""
        return self._like_moments(opt_state, self.home.owners)

    def outer(self, carried: PyTree) -> PyTree:
        """Convert only the state of the outer exchange."""
        return self._like_moments(carried, self.home.owners_of_outer)

    def grads(self, grads: Grads) -> PyTree:
        """Convert sharded gradients."""
        return _changed([change for _, change in self.changes], grads, of_params(grads))

    def _like_moments(self, tree: PyTree, owners: PyTree) -> PyTree:
        return _changed([change for view, change in self.changes if view.opt_state], tree, owners)


def _changed(changes: Sequence[Change], tree: PyTree, owners: PyTree) -> PyTree:
    """Convert the leaves that have an owner; the other leaves of the tree are unchanged."""
    if not changes:
        # A worker of parameter servers has no optimizer's state, so `owners` has another structure.
        return tree

    def changed(leaf: Leaf, owner: Owner | None) -> PyTree:
        return leaf if owner is None else reduce(lambda x, change: change(x, owner), changes, leaf)

    return jax.tree.map(changed, tree, owners)


@dataclass(frozen=True)
class Home:
    """The conversions of a state between its forms.

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

    @property
    def stored(self) -> Conversion:
        """The conversion from the model's form to the form that devices store between steps."""
        return Conversion(self, _storing(self.views))

    @property
    def used(self) -> Conversion:
        """The conversion from the form that devices store between steps to the model's form."""
        return Conversion(self, _using(self.views))

    @property
    def to_step(self) -> Conversion:
        """The conversion from the devices' form to the form with which steps compute."""
        return Conversion(self, _using(self._not_in_steps), with_outer=False)

    @property
    def from_step(self) -> Conversion:
        """The conversion from the form with which steps compute to the devices' form."""
        return Conversion(self, _storing(self._not_in_steps), with_outer=False)

    @property
    def to_files(self) -> Conversion:
        """The conversion from the devices' form to the form that checkpoints contain."""
        return Conversion(self, _using(self._not_in_files))

    @property
    def from_files(self) -> Conversion:
        """The conversion from the form that checkpoints contain to the devices' form."""
        return Conversion(self, _storing(self._not_in_files))

    @property
    def _not_in_steps(self) -> list[View]:
        return [view for view in self.views if not view.in_steps]

    @property
    def _not_in_files(self) -> list[View]:
        return [view for view in self.views if not view.in_files]

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


def _storing(views: Sequence[View]) -> tuple[tuple[View, Change], ...]:
    return tuple((view, view.store) for view in views)


def _using(views: Sequence[View]) -> tuple[tuple[View, Change], ...]:
    # These conversions invert the views, in the reverse of the order in which `_storing` applies
    # them.
    return tuple((view, view.use) for view in reversed(views))
