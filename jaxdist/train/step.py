"""One jitted step on a mesh: the only place where model, loss and optimizer meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxdist.collectives.channels import SeparateChannels
from jaxdist.models.functional import Functional
from jaxdist.models.layers import carried
from jaxdist.models.loss import Batch, Loss, Sums, as_sums, weighted
from jaxdist.optim.build import Optimizer
from jaxdist.optim.loss_scale import LossScaleState
from jaxdist.optim.owners import Owner
from jaxdist.optim.safety import global_norm, global_norm_of_shards, skip_states
from jaxdist.parallel.data import DataParallel
from jaxdist.parallel.microbatch import split_rows
from jaxdist.parallel.pipeline.model.pipeline import Pipeline
from jaxdist.parallel.zero import Zero
from jaxdist.sharding import Dims, Layout, param_shardings
from jaxdist.train.state import TrainState
from jaxdist.train.storage import Storage
from jaxdist.trees import flatten_with_names

STEP_METRICS = ("grad_norm", "learning_rate")
SKIP_METRICS = ("skipped_steps", "skipped_in_a_row")
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""Of jax.lax.optimization_barrier, on CPU."""


@dataclass(frozen=True)
class Program:
    """A model, a loss and an optimizer as compiled functions on a mesh.

    Attributes:
      dims: logical dims of each parameter, by name.
      batch: shapes, dtypes and shardings of a global batch.
      seed: of the initial parameters and of the random layers.
      microbatches: pieces that the batch is split into in time; gradients are summed over them.
      data_parallel: reduces the gradients explicitly; None leaves it to XLA.
      zero: what each device keeps only a shard of; None keeps all.
      pipeline: the stages that the layers lie on; None where each device has all of them.
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
    zero: Zero | None = None
    pipeline: Pipeline | None = None

    @cached_property
    def state_shapes(self) -> TrainState:
        """The training state as it is stored: `jax.ShapeDtypeStruct`s with their shardings."""
        shapes = jax.eval_shape(self.storage.stored, self.own_shapes)
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self._state_shardings(shapes),
        )

    @cached_property
    def own_shapes(self) -> TrainState:
        """The same without shardings, and without the zeros that fill up ZeRO's shards."""
        return jax.eval_shape(self._init)

    def _state_shardings(self, shapes: TrainState) -> TrainState:
        whole = self.layout.replicated
        params = self._shards if self.zero and self.zero.stage == 3 else self._whole
        shards = dict(flatten_with_names(self._shards))

        def placed(_: Any, owner: Owner | None) -> NamedSharding:
            if owner is None:
                return whole
            return NamedSharding(whole.mesh, owner.spec(shards[owner.name].spec))

        opt_state = jax.tree.map(placed, shapes.opt_state, self.storage.owners)
        buffers, loss_scale = jax.tree.map(lambda _: whole, (shapes.buffers, shapes.loss_scale))
        return TrainState(whole, params, opt_state, buffers, loss_scale)

    @cached_property
    def _whole(self) -> Any:
        """Shardings of the parameters that every replica holds."""
        return param_shardings(self.layout, self.model.params, self.dims)

    @cached_property
    def _shards(self) -> Any:
        """The same where each replica holds its shard; whole without ZeRO."""
        return self._whole if self.zero is None else self.zero.shardings(self._whole)

    def _placed(self, grads: Any) -> Any:
        """Gradients that XLA reduces, laid out as ZeRO's stage has them."""
        if self.zero is None or self.data_parallel is not None:
            return grads
        shardings = self._shards if self.zero.stage >= 2 else self._whole
        return jax.lax.with_sharding_constraint(grads, shardings)

    def _norm(self, grads: Any) -> jax.Array:
        """Of gradients laid out as the optimizer takes them."""
        if self.zero is None or self.data_parallel is None:
            return global_norm(grads)
        return global_norm_of_shards(grads, self._shards)

    def _keys(self) -> tuple[jax.Array, jax.Array]:
        """Keys of the initial parameters and of the steps."""
        init, step = jax.random.split(jax.random.key(self.seed))
        return init, step

    def _init(self) -> TrainState:
        params, buffers = self.model.init(self._keys()[0])
        optimizer = self.optimizer
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=optimizer.stored(params),
            opt_state=optimizer.transform.init(params),
            buffers=buffers,
            loss_scale=optimizer.loss_scale.init() if optimizer.loss_scale else None,
        )

    def init(self) -> TrainState:
        """A fresh state, created where it will live: no device holds more than its shards."""

        def init() -> TrainState:
            return self.storage.stored(self._init())

        return jax.jit(init, out_shardings=jax.tree.map(lambda s: s.sharding, self.state_shapes))()

    @cached_property
    def storage(self) -> Storage:
        """Between the state as it is stored and as the model knows it."""
        stack = None if self.pipeline is None else self.pipeline.stack
        return Storage(self.model, self.optimizer, self.zero, stack)

    @property
    def _statistics_over(self) -> tuple[str, ...]:
        """Axes over which a batch norm must average by itself: those left to XLA are one array."""
        explicit = self.data_parallel
        return explicit.axes if explicit is not None and explicit.global_statistics else ()

    def _sums(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Sums, Any]]:
        """Total loss of a batch, all sums, and the buffers after it; `key` None is evaluation."""
        batch = weighted(batch)
        module = self.model.bind(
            params, buffers, key, statistics_over=self._statistics_over if key is not None else ()
        )
        module.train() if key is not None else module.eval()
        sums = as_sums(self.loss(module, batch), batch)
        return sums["loss"].total, (sums, self.model.buffers_of(module))

    def _mean(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array, scale: LossScaleState | None
    ) -> tuple[jax.Array, tuple[Sums, Any]]:
        """Mean loss of a batch, times the loss scale, and what `_sums` gives beside it."""
        total, (sums, buffers) = self._sums(params, buffers, batch, key)
        weight = jax.lax.stop_gradient(sums["loss"].weight)
        scaling = self.optimizer.loss_scale
        if scaling is None or scale is None:
            return total / weight, (sums, buffers)
        return scaling.scale_loss(total / self._common(weight), scale), (sums, buffers)

    def _common(self, weight: jax.Array) -> jax.Array:
        """What a microbatch weighs on an average device, the same on all; not 0.

        ZeRO sums gradients over the devices before they are multiplied by it.
        """
        if self.data_parallel is not None:
            weight = jax.lax.pmean(weight, self.data_parallel.axes)
        # A microbatch of padding alone adds nothing, not 0 / 0.
        return jnp.where(weight == 0, 1, weight)

    def _mean_gradient(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array, scale: LossScaleState | None
    ) -> tuple[Any, Sums, Any]:
        """Gradients of the mean loss of a batch, sums, buffers."""
        # The mean is taken before the gradient: dividing after it is one more pass over it.
        gradient = jax.grad(self._mean, has_aux=True)
        grads, (sums, buffers) = gradient(params, buffers, batch, key, scale)
        grads = self._placed(carried(grads))
        scaling = self.optimizer.loss_scale
        return scaling.unscale(grads, scale) if scaling and scale else grads, sums, buffers

    def _total_gradient(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array, scale: LossScaleState | None
    ) -> tuple[Any, Sums, Any]:
        """Gradients of the total loss of a batch, sums, buffers."""
        if scale is not None:
            # A scale that suits the mean would overflow in the total.
            grads, sums, buffers = self._mean_gradient(params, buffers, batch, key, scale)
            weight = self._common(sums["loss"].weight)
            return jax.tree.map(lambda g: g * weight, grads), sums, buffers
        gradient = jax.grad(self._sums, has_aux=True)
        grads, (sums, buffers) = gradient(params, buffers, batch, key)
        grads = self._placed(carried(grads))
        if self.microbatches == 1:
            return grads, sums, buffers
        # What is added up over microbatches would not bear narrow sums.
        wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        return wide, sums, buffers

    def _gradients(self, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Any, Sums, Any]:
        """Gradients of the mean loss of the batch, sums, buffers."""
        given = (state.params, state.buffers, batch, key)
        summed = partial(self._summed, scale=state.loss_scale)
        if self.pipeline is not None:
            scale = state.loss_scale and state.loss_scale.scale
            summed = partial(self.pipeline.gradients, scale=scale)
        elif self.data_parallel is None and self.microbatches == 1:
            return self._mean_gradient(*given, state.loss_scale)
        if self.data_parallel is not None:
            specs = jax.tree.map(lambda sharding: sharding.spec, self._whole)
            return self.data_parallel.gradients(summed, _weight, specs, *given)
        grads, sums, buffers = summed(*given)
        weight = _weight(sums)
        return jax.tree.map(lambda g: g / weight, grads), sums, buffers

    def _summed(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array, *, scale: Any
    ) -> tuple[Any, Sums, Any]:
        """Gradients of the total loss, summed over the microbatches, sums, last buffers."""
        if self.microbatches == 1:
            return self._total_gradient(params, buffers, batch, key, scale)
        pieces = split_rows(dict(batch), self.microbatches, self.layout)
        keys = jax.random.split(key, self.microbatches)

        def body(carry: tuple[Any, Sums, Any], piece: tuple[Any, Any]) -> tuple[Any, None]:
            total, sums, buffers = carry
            rows, own = piece
            grads, more, buffers = self._total_gradient(params, buffers, rows, own, scale)
            return (*jax.tree.map(jnp.add, (total, sums), (grads, more)), buffers), None

        rows, first = jax.tree.map(lambda x: x[0], (pieces, keys))
        shapes = jax.eval_shape(self._total_gradient, params, buffers, rows, first, scale)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[:2])
        (grads, sums, buffers), _ = jax.lax.scan(body, (*zeros, buffers), (pieces, keys))
        return grads, sums, buffers

    def _train(self, stored: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        state = self.storage.cut(stored)
        key = jax.random.fold_in(self._keys()[1], state.step)
        # A reduction of ours fills up and cuts by itself what it sends.
        held = state if self.data_parallel is None else stored
        grads, sums, buffers = self._gradients(held, batch, key)
        params = state.params
        if self.zero is not None:
            # The update is one shard's work; what it gives goes back to where the state lies.
            shards = (self._shards, self._shards)
            grads, params = jax.lax.with_sharding_constraint((grads, params), shards)
        norm = self._norm(grads)
        values = {name: mean.total / mean.weight for name, mean in sums.items()}
        updates, opt_state = self.optimizer.update(
            grads, state.opt_state, params, grad_norm=norm, value=values["loss"]
        )
        values |= {"grad_norm": norm, "learning_rate": self.optimizer.schedule(state.step)}
        params = optax.apply_updates(params, updates)
        if self.data_parallel is not None and self.zero is not None and self.zero.stage < 3:
            specs = jax.tree.map(lambda sharding: sharding.spec, self._whole)
            params = self.data_parallel.gather(specs, params, state.params)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            buffers=buffers,
            loss_scale=state.loss_scale,
        )
        if self.optimizer.max_skipped is not None:
            new, more = self._after_skips(state, new, norm)
            values |= more
        return self.storage.filled(new), jnp.stack(
            [jnp.asarray(values[name], jnp.float32) for name in self.metrics]
        )

    def _after_skips(
        self, old: TrainState, new: TrainState, norm: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """A skipped step keeps its buffers too, and an overflow lowers the loss scale."""
        before, after = (skip_states(state.opt_state)[0] for state in (old, new))
        moved = before.skipped == after.skipped
        new = replace(
            new,
            buffers=jax.tree.map(partial(jnp.where, moved), new.buffers, old.buffers),
        )
        values = {"skipped_steps": after.skipped, "skipped_in_a_row": after.consecutive}
        scaling = self.optimizer.loss_scale
        if scaling is None:
            return new, values
        scale = scaling.update(old.loss_scale, jnp.isfinite(norm))
        return replace(new, loss_scale=scale), {**values, "loss_scale": old.loss_scale.scale}

    def _evaluate(self, params: Any, buffers: Any, batch: Batch) -> Sums:
        if self.pipeline is not None:
            return self.pipeline.evaluate(params, batch)
        return self._sums(params, buffers, batch, None)[1][0]

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values in the vector that `train` returns; the loss's own come first.

        Raises:
          RunError: the loss does not return what a loss must.
        """
        params = jax.eval_shape(self.optimizer.stored, self.model.params)
        shapes = jax.eval_shape(self._evaluate, params, self.model.buffers, self.batch)
        skips = SKIP_METRICS if self.optimizer.max_skipped is not None else ()
        scale = ("loss_scale",) if self.optimizer.loss_scale is not None else ()
        own = sorted(shapes, key=lambda name: (name != "loss", name))
        return (*own, *STEP_METRICS, *skips, *scale)

    @cached_property
    def train(self) -> jax.stages.Wrapped | SeparateChannels:
        """(state, batch) to (state, metrics float32 `[len(metrics)]`); the state is donated."""
        shardings = jax.tree.map(lambda s: s.sharding, self.state_shapes)
        return self._on_platform(
            jax.jit(
                self._train,
                donate_argnums=0,
                out_shardings=(shardings, self.layout.replicated),
                compiler_options=self._compiler_options,
            )
        )

    @property
    def _compiler_options(self) -> dict[str, str] | None:
        """XLA:CPU drops barriers before it fuses; ours make replicas of new parameters equal."""
        gathers = self.zero is not None and self.zero.stage < 3 and self.data_parallel is not None
        return KEEP_BARRIERS if gathers and self._on_cpu else None

    @property
    def _on_cpu(self) -> bool:
        return self.layout.mesh.devices.flat[0].platform == "cpu"

    @cached_property
    def evaluate(self) -> jax.stages.Wrapped | SeparateChannels:
        """(params as stored, buffers, batch) to sums, in evaluation mode (no randomness)."""

        def evaluate(params: Any, buffers: Any, batch: Batch) -> Sums:
            return self._evaluate(self.storage.cut_params(params), buffers, batch)

        return self._on_platform(jax.jit(evaluate, out_shardings=self.layout.replicated))

    def _on_platform(self, jitted: jax.stages.Wrapped) -> jax.stages.Wrapped | SeparateChannels:
        ours = self.data_parallel is not None or self.pipeline is not None
        return SeparateChannels(jitted) if ours and self._on_cpu else jitted


def _weight(sums: Sums) -> jax.Array:
    return sums["loss"].weight
