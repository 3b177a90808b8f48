"""One jitted step on a mesh: the only place where model, loss and optimizer meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxdist.models.functional import Functional
from jaxdist.models.loss import Batch, Loss, Sums, as_sums, weighted
from jaxdist.optim.build import Optimizer
from jaxdist.parallel.data import DataParallel
from jaxdist.sharding import Dims, Layout, param_shardings
from jaxdist.train.state import TrainState

STEP_METRICS = ("grad_norm", "learning_rate")


@dataclass(frozen=True)
class Program:
    """A model, a loss and an optimizer as compiled functions on a mesh.

    Attributes:
      dims: logical dims of each parameter, by name.
      batch: shapes and dtypes of a global batch.
      seed: of the initial parameters and of the random layers.
      microbatches: pieces that the batch is split into in time; gradients are summed over them.
      data_parallel: reduces the gradients explicitly; None leaves it to XLA.
    """

    model: Functional
    loss: Loss
    optimizer: Optimizer
    layout: Layout
    dims: Mapping[str, Dims]
    batch: Mapping[str, jax.ShapeDtypeStruct]
    seed: int
    microbatches: int = 1
    data_parallel: DataParallel | None = None

    @cached_property
    def state_shapes(self) -> TrainState:
        """The training state as `jax.ShapeDtypeStruct`s with their shardings."""
        shapes = jax.eval_shape(self._init)
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self._state_shardings(shapes),
        )

    def _state_shardings(self, shapes: TrainState) -> TrainState:
        whole = self.layout.replicated
        params = param_shardings(self.layout, self.model.params, self.dims)
        opt_state = optax.tree.map_params(
            self.optimizer.transform,
            lambda _, sharding: sharding,
            shapes.opt_state,
            params,
            transform_non_params=lambda _: whole,
        )
        buffers = jax.tree.map(lambda _: whole, shapes.buffers)
        return TrainState(step=whole, params=params, opt_state=opt_state, buffers=buffers)

    def _keys(self) -> tuple[jax.Array, jax.Array]:
        """Keys of the initial parameters and of the steps."""
        init, step = jax.random.split(jax.random.key(self.seed))
        return init, step

    def _init(self) -> TrainState:
        params, buffers = self.model.init(self._keys()[0])
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.transform.init(params),
            buffers=buffers,
        )

    def init(self) -> TrainState:
        """A fresh state, created where it will live: no device holds more than its shards."""
        shardings = jax.tree.map(lambda s: s.sharding, self.state_shapes)
        return jax.jit(self._init, out_shardings=shardings)()

    def batch_sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where a batch array lies: its rows split like the dim "batch"."""
        return self.layout.sharding(("batch", *(None,) * (len(shape) - 1)))

    def _sums(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Sums, Any]]:
        """Total loss of a batch, all sums, and the buffers after it; `key` None is evaluation."""
        batch = weighted(batch)
        module = self.model.bind(params, buffers, key)
        module.train() if key is not None else module.eval()
        sums = as_sums(self.loss(module, batch), batch)
        return sums["loss"].total, (sums, self.model.buffers_of(module))

    def _mean(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[Sums, Any]]:
        """Mean loss of a batch, and what `_sums` gives beside it."""
        total, (sums, buffers) = self._sums(params, buffers, batch, key)
        return total / jax.lax.stop_gradient(sums["loss"].weight), (sums, buffers)

    def _gradients(self, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Any, Sums, Any]:
        """Gradients of the mean loss of the batch, sums, buffers."""
        given = (state.params, state.buffers, batch, key)
        if self.data_parallel is None and self.microbatches == 1:
            # The mean is taken before the gradient: dividing after it is one more pass over it.
            grads, (sums, buffers) = jax.grad(self._mean, has_aux=True)(*given)
            return grads, sums, buffers
        if self.data_parallel is None:
            grads, sums, buffers = self._summed(*given)
        else:
            shardings = param_shardings(self.layout, self.model.params, self.dims)
            specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
            grads, sums, buffers = self.data_parallel.gradients(self._summed, specs, *given)
        weight = sums["loss"].weight
        return jax.tree.map(lambda g: g / weight, grads), sums, buffers

    def _summed(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array
    ) -> tuple[Any, Sums, Any]:
        """Gradients of the total loss, summed over the microbatches, sums, last buffers."""
        gradient = jax.grad(self._sums, has_aux=True)
        if self.microbatches == 1:
            grads, (sums, buffers) = gradient(params, buffers, batch, key)
            return grads, sums, buffers
        pieces = jax.tree.map(self._split, dict(batch))
        keys = jax.random.split(key, self.microbatches)

        def body(carry: tuple[Any, Sums, Any], piece: Any) -> tuple[Any, None]:
            total, sums, buffers = carry
            grads, (more, buffers) = gradient(params, buffers, *piece)
            return (*jax.tree.map(jnp.add, (total, sums), (grads, more)), buffers), None

        first = jax.tree.map(lambda x: x[0], (pieces, keys))
        shapes = jax.eval_shape(gradient, params, buffers, *first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[1][0]))
        (grads, sums, buffers), _ = jax.lax.scan(body, (*zeros, buffers), (pieces, keys))
        return grads, sums, buffers

    def _split(self, x: jax.Array) -> jax.Array:
        """`[rows, ...]` to `[microbatches, rows / microbatches, ...]`.

        Microbatch k takes every k-th row, so that each device splits its own rows and none move.
        """
        pieces = x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)
        return self.layout(pieces, None, "batch", *(None,) * (x.ndim - 1))

    def _train(self, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(self._keys()[1], state.step)
        grads, sums, buffers = self._gradients(state, batch, key)
        norm = optax.tree.norm(grads)
        if self.optimizer.clip_norm is not None:
            scale = jnp.minimum(1.0, self.optimizer.clip_norm / (norm + 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = self.optimizer.transform.update(grads, state.opt_state, state.params)
        values = {name: mean.total / mean.weight for name, mean in sums.items()}
        values |= {"grad_norm": norm, "learning_rate": self.optimizer.schedule(state.step)}
        new = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            buffers=buffers,
        )
        return new, jnp.stack([jnp.asarray(values[name], jnp.float32) for name in self.metrics])

    def _evaluate(self, params: Any, buffers: Any, batch: Batch) -> Sums:
        return self._sums(params, buffers, batch, None)[1][0]

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values in the vector that `train` returns; the loss's own come first.

        Raises:
          RunError: the loss does not return what a loss must.
        """
        shapes = jax.eval_shape(self._evaluate, self.model.params, self.model.buffers, self.batch)
        return (*sorted(shapes, key=lambda name: (name != "loss", name)), *STEP_METRICS)

    @cached_property
    def train(self) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
        """(state, batch) to (state, metrics float32 `[len(metrics)]`); the state is donated."""
        shardings = jax.tree.map(lambda s: s.sharding, self.state_shapes)
        return jax.jit(
            self._train, donate_argnums=0, out_shardings=(shardings, self.layout.replicated)
        )

    @cached_property
    def evaluate(self) -> Callable[[Any, Any, Batch], Sums]:
        """(params, buffers, batch) to sums, in evaluation mode (no randomness)."""
        return jax.jit(self._evaluate, out_shardings=self.layout.replicated)
