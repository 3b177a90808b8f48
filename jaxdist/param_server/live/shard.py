"""The arrays of a server: the parameters of its shard, and the optimizer's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.param_server.consistency.arrays import combined, delay_compensated
from jaxdist.param_server.consistency.arrival import DelayCompensation, OnArrival
from jaxdist.param_server.consistency.contract import Arrival, Consistency, Merge
from jaxdist.param_server.live.layout import ShardLayout
from jaxdist.types import OptState, PyTree

Tree = dict[str, jax.Array]
"""The arrays of ranges, by the key of the range."""
Merged = Callable[[Merge, Callable[[Arrival], np.ndarray]], np.ndarray]
"""A function that combines the changes of a merge."""


@dataclass(frozen=True)
class ShardState:
    """The state of a server, on the host.

    Attributes:
      floor: a clock; the state contains all changes of all workers from earlier clocks.
      version: the number of updates of the parameters so far.
      params: the parameters as a flat array `[layout.length]`.
      optimizer: the state of the server's optimizer.
    """

    floor: int
    version: int
    params: np.ndarray
    optimizer: OptState


def split_ranges(layout: ShardLayout, flat: jax.Array) -> Tree:
    """Return the ranges of a flat array, by key, in the form that an optimizer takes."""
    return {
        piece.range.key: flat[piece.slice].reshape(piece.shape).astype(piece.dtype)
        for piece in layout.pieces
    }


def shapes(layout: ShardLayout) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the arrays that `split_ranges` returns, by the key of the range."""
    return {
        piece.range.key: jax.ShapeDtypeStruct(piece.shape, piece.dtype) for piece in layout.pieces
    }


def updated(
    transform: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: OptState,
    params: PyTree,
    *rate: jax.Array,
) -> tuple[PyTree, OptState]:
    """Return updated parameters and the optimizer's next state.

    Args:
      rate: the factor by which the whole update is multiplied, including its weight decay.
    """
    # A server knows neither the norm of all gradients nor the loss, so zeros replace them. An
    # optimizer that reads either value was refused at the start.
    nothing = {"grad_norm": jnp.float32(0), "value": jnp.float32(0)}
    updates, state = transform.update(grads, state, params, **nothing)
    if rate:
        updates = jax.tree.map(lambda x: x * rate[0].astype(x.dtype), updates)
    return optax.apply_updates(params, updates), state


class ShardArrays(ABC):
    """The parameters of one server, and the application of changes to them.

    Parameters are never modified in place, since readers keep references to older versions.

    Args:
      flat: the initial parameters.

    Attributes:
      params: the newest version of the parameters, `[layout.length]`, on the host.
      staleness: the number of applied changes for each staleness, in updates.
      square: the squared norm of the last applied change.
      moved: the last applied change, or None before the first change.
      merged: the function that computes a merge's change. Its arguments are the merge, and a
        function that returns the payload of an arrival.
    """

    def __init__(self, layout: ShardLayout, model: Consistency, flat: np.ndarray) -> None:
        self.layout, self.model, self.params = layout, model, flat
        self._read: dict[tuple[int, int], np.ndarray] = {}
        self._squares: np.ndarray | None = None
        self.staleness: Counter[int] = Counter()
        self.merged: Merged = combined
        self.square = 0.0
        self.moved: np.ndarray | None = None

    @property
    def compensation(self) -> DelayCompensation | None:
        return self.model.delay_compensation if isinstance(self.model, OnArrival) else None

    def read(self, client: int, version: int) -> np.ndarray:
        """Return the parameters for a worker that will compute from this version.

        With delay compensation, the shard also keeps these parameters until a change that the
        worker computed from a newer version is applied.

        Args:
          client: the client number of the worker.
          version: the current version, from which the worker will compute.
        """
        if self.compensation is not None:
            self._read[client, version] = self.params
        return self.params

    def forget(self, client: int) -> None:
        """Forget the versions that a removed worker had read."""
        for key in [key for key in self._read if key[0] == client]:
            del self._read[key]

    def apply(self, merge: Merge, change_of: Callable[[Arrival], np.ndarray]) -> None:
        """Apply a merge, and set `square` to the squared norm of its change."""
        for part in merge.parts:
            self.staleness[part.staleness] += 1
        if not merge.parts:
            return
        self.move(self.merged(merge, partial(self._compensated, change_of)), merge.rate)

    def move(self, change: np.ndarray, rate: float) -> None:
        """Apply a merged change with a factor of the learning rate; set `square` and `moved`."""
        self.moved = change
        # numpy's BLAS is used, since XLA's sum of squares takes ten times as long as the update.
        wide = change.astype(np.float32, copy=False)
        self.square = float(np.dot(wide, wide))
        if self.model.payload == "elastic":
            self._replace(self.params + change)
        else:
            # An outer change points downhill and the optimizer subtracts a gradient, so the change
            # is negated.
            self._replace(self._stepped(-change if self.model.payload == "outer" else change, rate))

    def _replace(self, params: np.ndarray | jax.Array) -> None:
        self.params = np.asarray(params)

    @abstractmethod
    def _stepped(self, gradient: np.ndarray, rate: float) -> np.ndarray | jax.Array:
        """Return the parameters after an update of the optimizer, whose state also changes."""

    def _compensated(self, change_of: Callable[[Arrival], np.ndarray], one: Arrival) -> np.ndarray:
        config, gradient = self.compensation, change_of(one)
        then = self._read.get((one.client, one.version))
        if config is None or then is None:
            return gradient
        if self._squares is None:
            self._squares = np.zeros_like(gradient)
        found, self._squares = delay_compensated(config, gradient, self.params, then, self._squares)
        for key in [k for k in self._read if k[0] == one.client and k[1] < one.version]:
            del self._read[key]
        return found


class ServerShard(ShardArrays):
    """The arrays of one server of a run, whose optimizer is compiled.

    Args:
      transform: the optimizer for a tree of `shapes(layout)`. The update of a tensor must depend on
        this tensor alone.
      flat: the initial parameters.
      state: the state of the optimizer, or None for a fresh state.
    """

    def __init__(
        self,
        layout: ShardLayout,
        model: Consistency,
        transform: optax.GradientTransformationExtraArgs,
        flat: np.ndarray,
        state: OptState = None,
    ) -> None:
        super().__init__(layout, model, flat)
        self._transform = transform
        self._replace(flat)
        self.optimizer: OptState = self._begun() if state is None else jax.device_put(state)
        # The parameters are not donated: `params` is a view of them, and readers may still use this
        # view.
        self._update = jax.jit(self._updated, donate_argnums=1)

    def _replace(self, params: np.ndarray | jax.Array) -> None:
        self._flat = jnp.asarray(params)
        self.params = np.asarray(self._flat)

    def _stepped(self, gradient: np.ndarray, rate: float) -> jax.Array:
        # A factor of 1 is left out, since with it the update rounds differently than on a mesh.
        given = () if rate == 1 else (jnp.float32(rate),)
        flat, self.optimizer = self._update(self._flat, self.optimizer, gradient, *given)
        return flat

    def _begun(self) -> OptState:
        def begun(flat: jax.Array) -> OptState:
            return self._transform.init(split_ranges(self.layout, flat))

        return jax.jit(begun)(self._flat)

    def _updated(
        self, flat: jax.Array, state: OptState, change: jax.Array, *rate: jax.Array
    ) -> tuple[jax.Array, OptState]:
        params, grads = split_ranges(self.layout, flat), split_ranges(self.layout, change)
        moved, state = updated(self._transform, grads, state, params, *rate)
        # Without the barrier, XLA fuses the concatenation below with the update, and then tests for
        # each element to which range it belongs. This takes ten times as long.
        moved = jax.lax.optimization_barrier(moved)
        return jnp.concatenate([jnp.ravel(moved[key]).astype(flat.dtype) for key in params]), state

    @property
    def arrays(self) -> PyTree:
        """The parameters and the optimizer's state.

        The next update overwrites the memory of the state.
        """
        return self.params, self.optimizer

    def restore(self, raw: Sequence[np.ndarray]) -> None:
        """Replace `arrays` by the arrays of another server, given the raw bytes of each leaf."""
        leaves = [
            one.view(leaf.dtype).reshape(leaf.shape)
            for one, leaf in zip(raw, jax.tree.leaves(self.arrays), strict=True)
        ]
        params, optimizer = jax.tree.unflatten(jax.tree.structure(self.arrays), leaves)
        self._replace(params)
        self.optimizer = jax.device_put(optimizer)

    def kept(self) -> OptState:
        """Return a copy of the optimizer's state, on the host."""
        # np.asarray alone would be a view of memory that the next update overwrites.
        return jax.tree.map(lambda leaf: np.array(leaf, copy=True), self.optimizer)
