"""The jitted training step on a mesh, in which model, loss and optimizer are combined.

A step depends on its parts only by their contracts: the computation of gradients (`Compute`), the
exchange of gradients (`Exchange`), the forms of stored state (`View`), and the exchange between
steps (`Outer`). `jaxdist.train.assemble` chooses the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxdist.models.feed_forward.measure import scalars
from jaxdist.models.functional import Functional
from jaxdist.models.loss import Batch, Sums, training_sums
from jaxdist.models.remat import HOST_MEMORY
from jaxdist.optim.build import Optimizer
from jaxdist.optim.loss_scale import scale_for
from jaxdist.optim.owners import Owner, of_params
from jaxdist.optim.safety import skip_states, skipped_once
from jaxdist.parallel.compiler import Options
from jaxdist.parallel.compute import WholeBatch
from jaxdist.parallel.contract import Compute, Exchange, StepInputs
from jaxdist.parallel.jitted import Compiled, Jitted
from jaxdist.sharding import Dims, Layout
from jaxdist.train.home import Home, View
from jaxdist.train.offload import streamed
from jaxdist.train.state import Outer, TrainState
from jaxdist.trees import flatten_with_names, join_leaves
from jaxdist.types import Buffers, Grads, OptState, Params, PyTree, Scalar

STEP_METRICS = ("grad_norm", "learning_rate")
SKIP_METRICS = ("skipped_steps", "skipped_in_a_row")


class StepGradients(NamedTuple):
    """The result of `Program.gradients`, which is an argument of `Program.update`.

    Attributes:
      grads: the gradients of the mean loss, a tree like the parameters. With ZeRO the gradients are
        shards, which are padded with zeros if a tensor does not divide evenly.
      sums: all values that the loss measures, with their weights.
      buffers: the model's buffers after the batch.
      exchange: the state of the exchange of gradients for the next step.
    """

    grads: Grads
    sums: Sums
    buffers: Buffers
    exchange: PyTree


@dataclass(frozen=True)
class Program:
    """A model, a loss and an optimizer as compiled functions on a mesh.

    Attributes:
      dims: the logical dims of each parameter, by name.
      batch: the shape, dtype and sharding of each field of a global batch.
      seed: the seed of the initial parameters and of the random layers.
      compute: the computation of gradients from a batch.
      exchange: the exchange of gradients between devices, after which each device has the gradients
        of the parameters (or shards) that it updates.
      views: the forms of the state on the devices that differ from the model's form.
      outer: the exchange between steps, or None without such an exchange.
      options: the options for the compiler, for all programs except `init`.
    """

    model: Functional
    optimizer: Optimizer
    layout: Layout
    dims: Mapping[str, Dims]
    batch: Mapping[str, jax.ShapeDtypeStruct]
    seed: int
    compute: Compute
    exchange: Exchange
    views: tuple[View, ...] = ()
    outer: Outer | None = None
    options: Options = field(default_factory=dict)

    @cached_property
    def home(self) -> Home:
        """The conversions of a state between its stored form, the model's form and other forms."""
        outer = () if self.outer is None else self.own_shapes.outer
        return Home(self.views, self.model, self.optimizer.transform, outer)

    @cached_property
    def state_shapes(self) -> TrainState:
        """The shapes, dtypes and shardings of the training state in its stored form."""
        shapes = jax.eval_shape(self.home.stored, self.own_shapes)
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self._state_shardings(shapes),
        )

    @cached_property
    def own_shapes(self) -> TrainState:
        """The shapes of the training state in the model's form, without shardings or padding."""
        return jax.eval_shape(self._begun, self.model.params, self.model.buffers)

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state or parameters are in the host's memory."""
        return bool(self.exchange.zero.offloaded or self.exchange.zero.resting)

    def _state_shardings(self, shapes: TrainState) -> TrainState:
        replicated = self.layout.replicated
        placements = self.exchange.placements
        shares = dict(flatten_with_names(placements.shares))
        offloaded = self.exchange.zero.offloaded

        def placed(_: Any, owner: Owner | None) -> NamedSharding:
            if owner is None:
                return replicated
            spec = owner.spec(shares[owner.name].spec)
            kind = HOST_MEMORY if owner.name in offloaded else None
            return NamedSharding(replicated.mesh, spec, memory_kind=kind)

        return TrainState(
            step=replicated,
            params=self._resting_shardings,
            opt_state=jax.tree.map(placed, shapes.opt_state, self.home.owners),
            buffers=jax.tree.map(lambda _: replicated, shapes.buffers),
            loss_scale=jax.tree.map(lambda _: replicated, shapes.loss_scale),
            exchange=self.exchange.state_shardings(shapes.exchange),
            outer=jax.tree.map(placed, shapes.outer, self.home.owners_of_outer),
        )

    @property
    def _resting_shardings(self) -> PyTree:
        """The shardings of the stored parameters, each in the memory that holds the parameter."""
        whole, resting = self.exchange.placements.params, self.exchange.zero.resting
        if not resting:
            return whole

        def placed(sharding: NamedSharding, owner: Owner) -> NamedSharding:
            return sharding.with_memory_kind(HOST_MEMORY) if owner.name in resting else sharding

        return jax.tree.map(placed, whole, of_params(self.model.params))

    def _keys(self) -> tuple[jax.Array, ...]:
        """Return the random keys of the initial parameters and of the steps."""
        return tuple(jax.random.split(jax.random.key(self.seed)))

    def _begun(self, params: Params, buffers: Buffers) -> TrainState:
        optimizer, trained = self.optimizer, self.model.divided(params)[0]
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=optimizer.stored(params),
            opt_state=optimizer.transform.init(trained),
            buffers=buffers,
            loss_scale=optimizer.loss_scale.init() if optimizer.loss_scale else None,
            exchange=self.exchange.init(trained),
            outer=() if self.outer is None else self.outer.begin(trained),
        )

    def init(self) -> TrainState:
        """Create an initial state, of which each device creates only its shards."""

        def init() -> TrainState:
            return self.home.stored(self._begun(*self.model.init(self.init_key)))

        return jax.jit(init, out_shardings=self._stored_shardings)()

    def _gradients(self, stored: TrainState, state: TrainState, batch: Batch) -> StepGradients:
        """Compute the gradients of a batch.

        Args:
          stored: the state in its stored form.
          state: the same state in the form with which steps compute.
        """
        # The key depends only on seed and step, so that a resumed run draws the same dropout masks.
        key = jax.random.fold_in(self._keys()[1], state.step)
        scale = scale_for(state.params, state.loss_scale)
        held = StepInputs(state.params, stored.params, state.buffers, scale, batch, key)
        found, exchange = self.exchange.gradients(self.compute, held, state.exchange)
        return StepGradients(*found, exchange)

    def _update(
        self, stored: TrainState, state: TrainState, found: StepGradients
    ) -> tuple[TrainState, jax.Array]:
        """Update a state, and return its stored form and the step's metrics.

        Args:
          stored: the state in its stored form.
          state: the same state in the form with which steps compute.
          found: the gradients.
        """
        # Each device updates its share of the parameters, which is then sent to the devices that
        # store it.
        trained, frozen = self.model.divided(state.params)
        grads, params = self.exchange.shares(found.grads, trained)
        norm = self.exchange.norm(grads)
        values = scalars(found.sums)
        owned = of_params(params)
        rest = norm, values["loss"], found.sums["loss"].weight

        def update(params: Params, opt_state: OptState) -> tuple[Any, ...]:
            given = (grads, owned), (params, owned), (opt_state, self.home.owners)
            return self.exchange.apply(self._moved, given, rest)

        away: OptState = None
        with jax.named_scope("optimizer"):
            if self.offloads:
                given = stored.opt_state, params, self.home, self.exchange, norm
                moved, opt_state, away = streamed(update, *given)
            else:
                moved, opt_state = update(params, state.opt_state)
        if self.optimizer.skips_empty:
            # If the batch has no weight, plans that divide by the weight after the exchange would
            # report NaN, so all plans report 0.
            norm_shown = jnp.where(found.sums["loss"].weight != 0, norm, 0.0)
        else:
            norm_shown = norm
        values |= {"grad_norm": norm_shown, "learning_rate": self.optimizer.schedule(state.step)}
        params = self.exchange.publish(moved, trained)
        new = replace(
            state,
            step=state.step + 1,
            params=join_leaves(params, frozen),
            opt_state=opt_state,
            buffers=self.model.settled(found.buffers, found.sums),
            exchange=found.exchange,
        )
        if self.optimizer.max_skipped is not None:
            new, more = self._after_skips(state, new, norm, found.sums["loss"].weight)
            values |= more
        kept = self.home.from_step(new)
        if self.offloads:
            kept = replace(kept, opt_state=away)
        # The metrics are a single vector, so that all of them are copied to the host at once.
        return kept, jnp.stack([jnp.asarray(values[name], jnp.float32) for name in self.metrics])

    def _moved(
        self,
        grads: Grads,
        params: Params,
        opt_state: OptState,
        norm: Scalar,
        loss: Scalar,
        weight: Scalar,
    ) -> tuple[Any, Any]:
        def move() -> tuple[Any, Any]:
            update = self.optimizer.update
            updates, state = update(grads, opt_state, params, grad_norm=norm, value=loss)
            return optax.apply_updates(params, updates), state

        if not self.optimizer.skips_empty:
            return move()
        # The condition encloses the whole update, so that a step that is not skipped does not pay
        # for another pass over the state.
        return jax.lax.cond(weight != 0, move, lambda: (params, skipped_once(opt_state)))

    def _train(self, stored: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        state = self.home.to_step(stored)
        return self._update(stored, state, self._gradients(stored, state, batch))

    def _after_skips(
        self, old: TrainState, new: TrainState, norm: jax.Array, weight: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the state and the last metrics of a step that the optimizer may have skipped.

        After a skipped step, the buffers and the state of the exchange are taken from the old
        state. The loss scale shrinks after an overflow.

        Args:
          norm: the norm of the gradients.
          weight: the weight of the batch.
        """
        before, after = (skip_states(state.opt_state)[0] for state in (old, new))
        moved = before.skipped == after.skipped
        buffers, exchange = jax.tree.map(
            partial(jnp.where, moved), (new.buffers, new.exchange), (old.buffers, old.exchange)
        )
        new = replace(new, buffers=buffers, exchange=exchange)
        values = {"skipped_steps": after.skipped, "skipped_in_a_row": after.consecutive}
        scaling = self.optimizer.loss_scale
        if scaling is None:
            return new, values
        scale = scaling.update(old.loss_scale, jnp.isfinite(norm))
        # A batch without weight does not show whether the loss scale is too large, so the scale
        # stays.
        scale = jax.tree.map(partial(jnp.where, weight != 0), scale, old.loss_scale)
        return replace(new, loss_scale=scale), {**values, "loss_scale": old.loss_scale.scale}

    @cached_property
    def measured(self) -> Sums:
        """The shapes of the values that the loss measures in training.

        Raises:
          RunError: the loss does not return sums or scalars.
        """
        params = jax.eval_shape(self.optimizer.stored, self.model.params)
        sums = jax.eval_shape(self.compute.sums, params, self.model.buffers, self.batch)
        return training_sums(sums)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names of the values in the vector that `train` returns; the loss comes first.

        Raises:
          RunError: the loss does not return sums or scalars.
        """
        shapes = jax.eval_shape(scalars, self.measured)
        skips = SKIP_METRICS if self.optimizer.max_skipped is not None else ()
        scale = ("loss_scale",) if self.optimizer.loss_scale is not None else ()
        own = sorted(shapes, key=lambda name: (name != "loss", name))
        return (*own, *STEP_METRICS, *skips, *scale)

    @cached_property
    def train(self) -> Compiled:
        """A compiled function from (state, batch) to (state, float32 `[len(metrics)]`).

        The function donates the state, and contains `gradients` and `update` in a single program.
        """
        return self._jitted.updating(self._train, (self._stored_shardings, self.layout.replicated))

    def train_with(self, field: str) -> Compiled:
        """Return a function like `train` that also returns the gradient of a field of the batch.

        The gradient comes last among the results of the returned function. This is the gradient of
        the mean loss, with the shape and sharding of the field.
        """
        compute = self.compute
        assert isinstance(compute, WholeBatch), "a batch in one piece, on one stage"

        def train(stored: TrainState, batch: Batch) -> tuple[TrainState, jax.Array, jax.Array]:
            state = self.home.to_step(stored)
            found = self._gradients(stored, state, batch)
            key = jax.random.fold_in(self._keys()[1], stored.step)
            held = StepInputs(state.params, stored.params, state.buffers, None, batch, key)
            # The gradient of the parameters and the gradient of the field have a common part. XLA
            # computes this part only once if XLA places all communication.
            of_field = compute.objective.field_gradients(held, field)
            return *self._update(stored, state, found), of_field

        shardings = self._stored_shardings, self.layout.replicated, self.batch[field].sharding
        return self._jitted.updating(train, shardings)

    @property
    def init_key(self) -> jax.Array:
        """The random key of the initial parameters."""
        return self._keys()[0]

    @cached_property
    def gradients(self) -> Compiled:
        """A compiled function from (state, batch) to `StepGradients`, for a loop of the user."""

        def gradients(stored: TrainState, batch: Batch) -> StepGradients:
            found = self._gradients(stored, self.home.to_step(stored), batch)
            return found._replace(grads=self.home.from_step.grads(found.grads))

        shapes = jax.eval_shape(gradients, self.state_shapes, self.batch)
        replicated = self.layout.replicated
        sums, buffers = jax.tree.map(lambda _: replicated, (shapes.sums, shapes.buffers))
        carried = self.exchange.state_shardings(shapes.exchange)
        lie = StepGradients(self.exchange.placements.shares, sums, buffers, carried)
        return self._jitted(gradients, out_shardings=lie)

    @cached_property
    def update(self) -> Compiled:
        """A compiled function from (state, `StepGradients`) to (state, metrics).

        The function donates the state.
        """

        def update(stored: TrainState, found: StepGradients) -> tuple[TrainState, jax.Array]:
            own = found._replace(grads=self.home.to_step.grads(found.grads))
            return self._update(stored, self.home.to_step(stored), own)

        return self._jitted.updating(update, (self._stored_shardings, self.layout.replicated))

    @cached_property
    def between(self) -> Compiled:
        """A compiled function that applies the exchange of `outer` to a state.

        The function donates the state.
        """
        outer = self.outer
        assert outer is not None

        def between(stored: TrainState) -> TrainState:
            state, carried = self.home.to_step(stored), self.home.to_step.outer(stored.outer)
            # As in a step, each device computes its share of the new parameters, which is then sent
            # to the devices that store them.
            trained, frozen = self.model.divided(state.params)
            _, shares = self.exchange.shares(trained, trained)
            given = (shares, of_params(shares)), (carried, self.home.owners_of_outer)
            moved, carried = self.exchange.apply(outer.exchange, given, ())
            params = self.exchange.publish(moved, trained)
            new = self.home.from_step(replace(state, params=join_leaves(params, frozen)))
            carried = self.home.from_step.outer(carried)
            return replace(new, opt_state=stored.opt_state, outer=carried)

        return self._jitted.updating(between, self._stored_shardings)

    @cached_property
    def evaluate(self) -> Compiled:
        """A compiled function from (stored parameters, buffers, batch) to the sums of the loss."""

        def evaluate(params: Params, buffers: Buffers, batch: Batch) -> Sums:
            own = self.home.to_step.params(params)
            return self.exchange.sums(self.compute, own, buffers, batch)

        return self._jitted(evaluate, out_shardings=self.layout.replicated)

    def evaluated(self, state: TrainState) -> Params:
        """Return the parameters to evaluate and to generate with, in stored form.

        The result is the parameters of the state, unless the optimizer or the exchange between
        steps keeps other parameters for this purpose (an average, slow weights).
        """
        if self.optimizer.eval_params is None and self.outer is None:
            return state.params
        return self._evaluated(state)

    @cached_property
    def _evaluated(self) -> Compiled:
        def evaluated(stored: TrainState) -> Params:
            state = self.home.to_step(stored)
            params, frozen = self.model.divided(state.params)
            chosen = self.optimizer.eval_params
            if chosen is not None:
                params = chosen(state.opt_state, params)
            if self.outer is not None:
                carried = self.home.to_step.outer(stored.outer)
                params = self.outer.evaluated(params, carried, state.step)
            return self.home.from_step(replace(state, params=join_leaves(params, frozen))).params

        return self._jitted(evaluated, out_shardings=self._stored_shardings.params)

    @property
    def _stored_shardings(self) -> TrainState:
        return jax.tree.map(lambda s: s.sharding, self.state_shapes)

    @property
    def _jitted(self) -> Jitted:
        platform = self.layout.mesh.devices.flat[0].platform
        return Jitted(self.compute, self.exchange, self.options, platform)
