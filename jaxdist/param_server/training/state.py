"""The conversion between the training state of a checkpoint and the shards of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.data.loader import Loader
from jaxdist.optim.build import ImportedOptimizerConfig
from jaxdist.optim.common import OptimizerConfig
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrays import combined
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.contract import vectors
from jaxdist.param_server.live.codes import Codes
from jaxdist.param_server.live.layout import ShardLayout, joined_shards, layouts
from jaxdist.param_server.live.masked import fixed_point_mean, masked_spec
from jaxdist.param_server.live.shard import Merged, ShardState, shapes, split_ranges
from jaxdist.param_server.placement.contract import Placement
from jaxdist.param_server.training.separable import server_transform
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.train.strategy.statistics import averaging, divided, is_statistic, with_statistics
from jaxdist.trees import flatten_with_names
from jaxdist.types import OptState, Params, PyTree, Updates
from jaxdist.wire.contract import Spec


@dataclass(frozen=True)
class Sharded:
    """The distribution of a program's state over servers.

    Servers hold the running statistics of a model in the same arrays as the parameters
    (`jaxdist.train.strategy.statistics`).

    Attributes:
      program: the program of all workers together, which is evaluated and saved.
      seed: the seed of the run.
    """

    cluster: Cluster
    program: Program
    optim: OptimizerConfig
    placement: Placement
    seed: int = 0

    def share(self, loader: Loader, microbatches: int) -> Program:
        """Return the program of a worker, which computes the worker's part of a batch.

        Args:
          loader: the loader of the worker's part of the batch.
          microbatches: the number of microbatches of that part.
        """
        compute = self.program.compute.resized(microbatches)
        return replace(self.program, batch=loader.batch_shapes, compute=compute)

    @cached_property
    def codes(self) -> tuple[Codes, ...]:
        """The encoding of pushes to each server, or () if pushes are uncompressed."""
        codec = self.cluster.codec
        if codec is None:
            return ()
        given = (codec, self.cluster.feedback, vectors(self.program.dims), self.seed)
        return tuple(Codes(layout, *given) for layout in self.layouts)

    @property
    def pushes(self) -> tuple[Spec, ...]:
        """The required shard, dtype and length of a push to each server."""
        if self.cluster.secure:
            return tuple(masked_spec(one.spec) for one in self.layouts)
        return tuple(one.spec for one in self.codes or self.layouts)

    @property
    def merged(self) -> Merged:
        """The function that combines the unmasked changes of a merge."""
        secure = self.cluster.secure
        return partial(fixed_point_mean, clients=secure["clients"]) if secure else combined

    @cached_property
    def layouts(self) -> tuple[ShardLayout, ...]:
        """The layout of each server's shard."""
        return layouts(self.placement, self.held)

    @property
    def held(self) -> PyTree:
        """The shapes of the parameters and statistics that servers hold."""
        return with_statistics(self.program.model.params, self.program.model.buffers)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter and statistic, by name."""
        return {n: tuple(s.shape) for n, s in flatten_with_names(self.held)}

    def transform(self, layout: ShardLayout) -> optax.GradientTransformationExtraArgs:
        """Return a server's optimizer, for the tree of `jaxdist.param_server.live.shard.shapes`."""
        own = {p.range.key: p.range.name for p in layout.pieces if not is_statistic(p.range.name)}
        others = {piece.range.key for piece in layout.pieces} - set(own)
        return averaging(self._rule(layout, own), others)

    def _rule(
        self, layout: ShardLayout, names: Mapping[str, str]
    ) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer of a server's parameters.

        Args:
          names: the name of each range's parameter, by the key of the range.
        """
        model = self.cluster.consistency
        if isinstance(model, Decoupled):
            return optax.with_extra_args_support(model.outer())
        dims = self.program.dims
        if isinstance(self.optim, ImportedOptimizerConfig):
            params = self.program.model.params
            whole = server_transform(self.optim, self.schedule, params, dims)
            return _by_own_names(whole, names, params)
        of_ranges = {key: one for key, one in shapes(layout).items() if key in names}
        own = {key: dims[name] for key, name in names.items()}
        return server_transform(self.optim, self.schedule, of_ranges, own)

    @property
    def schedule(self) -> optax.Schedule:
        """The function from the number of a server's updates to the learning rate.

        A step of all workers has `updates_per_step` updates.
        """
        per_step, schedule = self.cluster.updates_per_step, self.program.optimizer.schedule
        return (
            schedule if per_step == 1 else lambda count: schedule(jnp.floor_divide(count, per_step))
        )

    def rate_of(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        return float(np.asarray(self.program.optimizer.schedule(step)))

    @property
    def keeps_moments(self) -> bool:
        """Whether servers hold the optimizer's state; otherwise each worker has a state."""
        return self.cluster.consistency.payload == "gradient"

    def begun(self, layout: ShardLayout) -> OptState:
        """Return the shapes of a server's optimizer state."""
        return jax.eval_shape(self.transform(layout).init, shapes(layout))

    def parted(self, state: TrainState, clock: int) -> list[ShardState]:
        """Split a training state among servers.

        If `keeps_moments` is false, the optimizers of the servers start with new states.

        Args:
          state: the training state.
          clock: the clock of the state, which becomes the floor of each shard.
        """
        names = flatten_with_names(with_statistics(state.params, state.buffers))
        arrays = {name: np.asarray(leaf) for name, leaf in names}
        saved = {name: np.asarray(leaf) for name, leaf in flatten_with_names(state.opt_state)}
        found: list[ShardState] = []
        for layout in self.layouts:
            flat = layout.flatten(arrays)
            if self.keeps_moments:
                optimizer = self._optimizer_of(layout, saved)
            else:
                begun = self.transform(layout).init(split_ranges(layout, jnp.asarray(flat)))
                optimizer = jax.tree.map(np.asarray, begun)
            version = clock * self.cluster.updates_per_step
            found.append(ShardState(clock, version, flat, optimizer))
        return found

    def _optimizer_of(self, layout: ShardLayout, saved: Mapping[str, np.ndarray]) -> OptState:
        begun = self.begun(layout)
        pieces = {piece.range.key: piece for piece in layout.pieces}
        leaves: list[np.ndarray] = []
        for path, leaf in flatten_with_names(begun):
            key = _key_in(path, pieces)
            if key is None:
                leaves.append(saved[path].reshape(leaf.shape))
                continue
            part = pieces[key].range
            whole = np.atleast_1d(saved[path.replace(key, part.name)])
            # A leaf with the shape of the range has the rows of the range. Any other leaf belongs
            # to the whole parameter.
            rows = whole[part.start : part.stop] if leaf.shape == pieces[key].shape else whole
            leaves.append(np.ascontiguousarray(rows.reshape(leaf.shape)))
        return jax.tree.unflatten(jax.tree.structure(begun), leaves)

    def whole(self, shards: Sequence[ShardState], state: TrainState, step: int) -> TrainState:
        """Assemble the program's state on its devices from the states of all servers.

        Args:
          shards: the state of each server.
          state: the state of the program, for the parts that servers do not have.
          step: the number of steps of the assembled state.
        """
        wanted = self.program.state_shapes
        arrays = joined_shards(self.layouts, [shard.params for shard in shards], self.shapes)
        placed = _placed(with_statistics(wanted.params, wanted.buffers), arrays)
        params, buffers = divided(placed, state.buffers)
        number = jax.device_put(np.int32(step), wanted.step.sharding)
        new = replace(state, step=number, params=params, buffers=buffers)
        if not self.keeps_moments:
            return new
        moments = self._moments(shards)
        return replace(new, opt_state=_placed(wanted.opt_state, moments))

    def _moments(self, shards: Sequence[ShardState]) -> dict[str, np.ndarray]:
        """Return the leaves of the program's optimizer state by path.

        Every server has the counts of steps; the result contains the counts of the first server.
        """
        rows: dict[str, list[tuple[int, np.ndarray]]] = {}
        for layout, shard in zip(self.layouts, shards, strict=True):
            pieces = {piece.range.key: piece for piece in layout.pieces}
            for path, leaf in flatten_with_names(shard.optimizer):
                key = _key_in(path, pieces)
                if key is None:
                    rows.setdefault(path, []).append((0, np.asarray(leaf)))
                    continue
                part = pieces[key].range
                rows.setdefault(path.replace(key, part.name), []).append((part.start, leaf))
        found: dict[str, np.ndarray] = {}
        for path, leaf in flatten_with_names(self.program.own_shapes.opt_state):
            parts = [array for _, array in sorted(rows[path], key=lambda row: row[0])]
            # If the sizes of the parts do not add up to the size of the leaf, the parts are counts,
            # which are equal on all servers.
            if sum(part.size for part in parts) == leaf.size:
                found[path] = np.concatenate([np.ravel(p) for p in parts]).reshape(leaf.shape)
            else:
                found[path] = np.asarray(parts[0]).reshape(leaf.shape)
        return found


def _by_own_names(
    inner: optax.GradientTransformationExtraArgs, names: Mapping[str, str], params: Params
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that sees the model's tree, with None for the absent parameters.

    The update of an imported transformation may depend on the names of parameters. Each parameter
    is whole on one server.

    Args:
      names: the name of each range's parameter, by the key of the range.
    """
    structure = jax.tree.structure(params)
    order = [name for name, _ in flatten_with_names(params)]

    def nested(tree: PyTree) -> PyTree:
        own = {names[key]: leaf for key, leaf in tree.items()}
        return jax.tree.unflatten(structure, [own.get(name) for name in order])

    def init(params: Params) -> OptState:
        return inner.init(nested(params))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        found, state = inner.update(nested(updates), state, nested(params), **extra)
        named = dict(flatten_with_names(found))
        return {key: named[name] for key, name in names.items()}, state

    return optax.GradientTransformationExtraArgs(init, update)


def _key_in(path: str, keys: Mapping[str, object]) -> str | None:
    """Return the key of the range that a leaf belongs to, or None for a leaf without a range.

    The key of a range is the longest key that the leaf's path contains.
    """
    # A key can be the end of another key, as `w[0:2]` is of `layer/w[0:2]`, so that several keys
    # may match.
    found = [key for key in keys if f"/{key}/" in f"/{path}/"]
    return max(found, key=len, default=None)


def _placed(shapes: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Return a tree of arrays on their devices, from host arrays by path."""
    leaves = [
        jax.device_put(np.asarray(arrays[name], leaf.dtype).reshape(leaf.shape), leaf.sharding)
        for name, leaf in flatten_with_names(shapes)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
