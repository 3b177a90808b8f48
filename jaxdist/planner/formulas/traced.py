"""The formulas for plans of any model, with numbers from a trace of the model's step by jax.

Formulas that know the model's layers exist only for decoders (`jaxdist.planner.memory` and
`jaxdist.planner.time`). For other models the trace gives the shapes of parameters, the size of the
optimizer's state, the memory that the forward pass keeps for the backward pass, and the FLOPs.
The trace suffices for plans with the data axis, ZeRO and microbatches, but it does not show the
communication of other axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.config import Document
from jaxdist.cost.flops import jaxpr_flops, product_bytes, scanned_results
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.experiment.config import at_setting
from jaxdist.experiment.flops import on_one_device, step_flops
from jaxdist.models.gpt import GptConfig
from jaxdist.parallel.compute import Unstaged
from jaxdist.planner.formulas.contract import counts_of, invalid
from jaxdist.planner.formulas.experts import PlannedExperts
from jaxdist.planner.memory import PlanMemory, optimizer_bytes, share
from jaxdist.planner.model import PlannedModel, PlannedParameter
from jaxdist.planner.plan import Plan
from jaxdist.planner.products import peak_of
from jaxdist.planner.target import Places, Target
from jaxdist.planner.time import RATES, Seconds, across, gather_seconds, update_bytes
from jaxdist.sharding.dims import matching_names
from jaxdist.trees import flatten_with_names

OTHER_AXES = "the bytes of axes tensor and stage are known only for gpt"
ROWS = (2, 4)
"""The numbers of examples in two traces. The difference of their costs gives the cost of an
example."""


@dataclass(frozen=True, kw_only=True)
class Traced(PlannedModel):
    """The numbers of a model and its training that a trace of the step gives.

    Attributes:
      unit: the unit of data, "tokens" or "examples".
      units_per_example: the number of tokens in an example, or 1 if the unit is "examples".
      buffer_bytes: the bytes of the model's state that is not trained, such as running statistics.
      example_bytes: the bytes of an example of the data.
      kept_bytes: the bytes that an example's forward pass keeps for the backward pass.
      ends_bytes: the part of `kept_bytes` that is kept outside scans, such as logits.
      factor_bytes: the bytes of the factors and results of an example's products that the backward
        pass reads, from which the memory traffic of activations is estimated.
      flops: the FLOPs of an example's matrix products and convolutions, without recomputation.
      step_flops: the FLOPs of an example in the actual step, with recomputation.
      update_flops: the FLOPs of the optimizer's update of all parameters in a step.
      experts: the layers with experts, or None if there are none.
    """

    unit: str
    units_per_example: int
    buffer_bytes: int
    example_bytes: float
    kept_bytes: float
    ends_bytes: float
    factor_bytes: float
    flops: float
    step_flops: float
    update_flops: float = 0.0
    experts: PlannedExperts | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in a step, or of examples if the data has no tokens."""
        return self.batch * self.units_per_example

    @property
    def sent_bytes(self) -> float:
        """The number of bytes that are sent for an element of a gradient or gathered parameter."""
        return min(self.param_bytes, self.width)

    @property
    def cast_bytes(self) -> int:
        """The number of bytes of an element of a parameter's narrower copy, or 0 without a copy."""
        return self.width if self.param_bytes > self.width else 0

    @property
    def step_words(self) -> str:
        """The amount of data in a step, as text."""
        return f"{self.tokens:,} {self.unit}"

    def model_flops(self, *, masked: bool) -> float:
        """Return the FLOPs of a step, without recomputation.

        Args:
          masked: whether products that a mask discards count. The argument has no effect, since a
            trace does not show which products a mask discards.
        """
        return self.batch * self.flops

    @property
    def shared_elements(self) -> int:
        """The number of parameter elements that do not belong to experts."""
        return sum(math.prod(t.shape) * t.count() for t in self.tensors if t.split is None)


@dataclass(frozen=True)
class TracedFormulas:
    """The formulas for plans of a traced model: data parallelism with ZeRO and microbatches.

    A model with experts may also have axis expert.

    Attributes:
      model: the numbers from the trace.
    """

    model: Traced

    @property
    def has_inner(self) -> bool:
        return self.model.experts is not None

    def plans(self, target: Target, places: Places) -> Iterator[Plan]:
        stage, data, tensor = places.sizes
        base = Plan(
            data=data,
            tensor=tensor,
            stage=stage,
            slices=target.slices,
            remat=None,
            expert=places.inner,
        )
        for count, zero in itertools.product(counts_of(self.model.batch, base), range(4)):
            for scope in ("all", "ici") if zero and target.slices > 1 else ("all",):
                yield dataclasses.replace(base, zero=zero, scope=scope, microbatches=count)

    def refusal(self, plan: Plan) -> str | None:
        if plan.tensor > 1 or plan.stage > 1:
            return OTHER_AXES
        if self.model.batch % (plan.replicas * plan.microbatches):
            return "the batch does not divide over the data axis and microbatches"
        experts = self.model.experts
        if experts is not None and experts.count % plan.expert:
            return "experts do not divide over axis expert"
        if experts is not None and plan.shares_embed and experts.embed % plan.expert:
            return "the width does not divide over axis expert"
        if plan.slices * plan.data == 1 and plan.zero:
            return "with a single replica there is no state to split"
        return invalid(plan.zero, plan.scope, False, False, plan.slices > 1, False)

    def memory(self, plan: Plan) -> PlanMemory:
        model, count, mine = self.model, plan.microbatches, share(self.model, plan)
        split = plan.zero == 3 or plan.shares_embed
        stored, ends = (mine.shard, mine.ends_shard) if split else (mine.whole, mine.ends)
        # Gradients have the dtype of the computation. Three kinds have the dtype of the parameters:
        # gradients that a scan over layers stacks, sums over microbatches, and all gradients of
        # ZeRO 0 with a single microbatch.
        alone = model.param_bytes if plan.zero == 0 and count == 1 else model.sent_bytes
        gradients = ends * alone + (stored - ends) * model.param_bytes
        summed = (mine.shard if plan.zero else stored) * model.param_bytes * (count > 1)
        # A device keeps the activations of only one microbatch, but the data of all microbatches.
        rows = model.batch // (plan.replicas * count)
        # Values that are kept outside scans, such as logits, are freed before the blocks' backward
        # passes.
        experts, spare = model.experts, 0.0
        if experts is not None and not experts.recomputes:
            spare = experts.spare_bytes(rows, plan.expert, model.width)
        block = max(0.0, self._block_bytes(plan, rows) - rows * model.ends_bytes)
        return PlanMemory(
            parameters=stored * model.param_bytes + model.buffer_bytes,
            optimizer=optimizer_bytes(model, plan),
            gradients=gradients + summed,
            activations=rows * model.kept_bytes + spare,
            working=rows * count * model.example_bytes + stored * model.cast_bytes + block,
        )

    def _block_bytes(self, plan: Plan, rows: int) -> float:
        """Return the temporary bytes of a block's backward pass, for `rows` examples.

        These are the parameters that the device gathers, and the activations of experts.
        """
        model, experts = self.model, self.model.experts
        gathers = plan.zero == 3 or plan.shares_embed
        gathered = share(model, plan).layer * model.sent_bytes if gathers else 0.0
        if experts is None:
            return gathered
        return gathered + experts.block_elements(rows, plan.expert) * model.width

    def seconds(self, plan: Plan, places: Places, target: Target) -> Seconds:
        model, rows, count = self.model, self.model.batch // plan.replicas, plan.microbatches
        experts, exchanged, spare = model.experts, 0.0, 0.0
        if experts is not None:
            own = rows // count
            each = experts.seconds(plan, places, target, own, model.width)
            exchanged = count * experts.layers * each
            spare = count * experts.spare_bytes(own, plan.expert, model.width)
        peak = RATES.product * peak_of(target, narrow=model.narrow)
        memory_rate = target.device.memory_bytes_per_second
        element_rate = min(memory_rate, peak_of(target, narrow=True) * RATES.elements)
        data, slow = self._waits(plan, places, target)
        mine, split = share(model, plan), plan.zero == 3 or plan.shares_embed
        return Seconds(
            products=rows * model.flops / peak,
            attention=0.0,
            recomputed=rows * max(0.0, model.step_flops - model.flops) / peak,
            elements=3 * (RATES.passes * rows * model.factor_bytes + spare) / element_rate,
            update=update_bytes(model, plan, mine.shard if split else mine.whole) / memory_rate
            + model.update_flops / (plan.state_parts if plan.zero else 1) / peak,
            data=data,
            slow=slow,
            tensor=0.0,
            bubble=0.0,
            expert=exchanged,
        )

    def _waits(self, plan: Plan, places: Places, target: Target) -> tuple[float, float]:
        """Return the seconds that a step waits for the fast network and for the slow network.

        Without ZeRO, XLA reduces the summed gradients of all microbatches once. With ZeRO, the
        gradients of each microbatch are reduce-scattered. ZeRO 1 and 2 gather parameters once per
        step, and ZeRO 3 gathers them in both passes of each microbatch. If axis expert
        splits the parameters outside experts, these are gathered in both passes too.
        """
        model, count = self.model, plan.microbatches
        dims, shared = places.dims[1], model.shared_elements
        size = shared + (model.parameters - shared) // plan.expert

        def once(elements: int, number_bytes: float) -> float:
            return gather_seconds(target, dims, plan.data, elements * number_bytes)

        sent = model.sent_bytes if plan.zero or count == 1 else model.param_bytes
        crossing = across(target, size * sent / plan.data)
        if plan.shares_embed and plan.expert > 1:
            among = dims + places.inner_dims
            gathers = gather_seconds(target, among, plan.data * plan.expert, shared * sent)
            both = 2 if plan.scope == "all" else 1
            waits = 3 * (gathers + once(size - shared, sent))
            return count * waits, both * count * crossing
        # Parameters that do not belong to experts have gradients on all devices, which are summed
        # over the axes data and expert.
        part = shared * sent / (plan.data if plan.zero else 1)
        among = 2 * gather_seconds(target, places.inner_dims, plan.expert, part)
        if plan.zero == 0:
            return 2 * once(size, sent) + among, crossing
        if plan.zero < 3:
            waits = count * (once(size, sent) + among) + once(size, model.param_bytes)
            return waits, count * crossing
        both = 2 if plan.scope == "all" else 1
        return count * (3 * once(size, sent) + among), both * count * crossing


def traced_of(config: ExperimentConfig, document: Document) -> Traced:
    """Return the numbers of a config's step, which is traced for a single device and not run.

    Raises:
      ConfigError: the config cannot be built.
    """
    device = jax.devices()[0]
    alone = build(on_one_device(config), document, devices=[device])
    program = alone.program
    state = program.own_shapes
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    low, high = (_of_rows(alone, rows) for rows in ROWS)
    with at_setting(document, "parallel"):
        names, zero = list(program.dims), config.parallel.zero
        resting = matching_names(zero.offload_parameters, names, "zero", "offload_parameters")
    examples, flops = config.train.batch_size, step_flops(config, device)

    def added(name: str) -> float:
        return max(0.0, high[name] - low[name]) / (ROWS[1] - ROWS[0])

    # XLA keeps the factors and results of products, and recomputes the values between them. The
    # model's remat may keep less (`left`), so the smaller number counts. XLA recomputes nothing
    # across the border of a scan: values that cross the border are kept unchanged.
    ends, scanned = min(added("left"), added("products outside scans")), added("scanned")
    return Traced(
        unit=alone.unit,
        batch=examples,
        units_per_example=alone.units_per_example,
        tensors=tuple(
            _tensor(name, leaf.shape, program.dims[name], resting=name in resting)
            for name, leaf in flatten_with_names(state.params)
        ),
        param_bytes=_bytes(state.params) / count,
        state_bytes=_bytes(state.opt_state) / count,
        buffer_bytes=_bytes(state.buffers),
        example_bytes=_bytes(program.batch) / examples,
        kept_bytes=ends + scanned,
        ends_bytes=ends,
        factor_bytes=min(added("left") + scanned, added("products")),
        flops=flops.model / examples,
        update_flops=flops.update,
        step_flops=added("flops"),
        narrow=bool(high["narrow"]),
        steps=config.train.steps,
        experts=_experts(config, alone.units_per_example),
        offload=config.parallel.zero.offload,
        resting=config.parallel.zero.offload_parameters,
    )


def _experts(config: ExperimentConfig, length: int) -> PlannedExperts | None:
    model = config.model
    if not isinstance(model, GptConfig) or model.experts is None:
        return None
    return PlannedExperts.of(model, model.experts, length)


def _tensor(
    name: str, shape: tuple[int, ...], dims: tuple[str | None, ...], *, resting: bool
) -> PlannedParameter:
    """Return a parameter in the form that plans use.

    The shape of the result has no dim of layers, because ZeRO never splits this dim. Axis expert
    splits the dim of experts if there is one.
    """
    stacked = dims[:1] == ("layers",)
    own, inner = (shape[1:], dims[1:]) if stacked else (shape, dims)
    split = inner.index("experts") if "experts" in inner else None
    # Devices with different experts share the dim embed of all other parameters.
    embed = inner.index("embed") if "embed" in inner and split is None else None
    layers = shape[0] if stacked else 0
    return PlannedParameter(name, own, split, layers, resting=resting, embed=embed)


def _of_rows(alone: Experiment, rows: int) -> Mapping[str, float]:
    """Return the traced numbers of a forward and backward pass over `rows` examples.

    "scanned" has the bytes that scans leave for the backward pass, and "left" has the other bytes
    that the forward pass leaves for the backward pass. "products" has the bytes of the factors and
    results of products, and "products outside scans" has the part of these bytes outside scans.
    "narrow" is true if any array that the forward pass leaves has two-byte floats. "flops" has the
    FLOPs of both passes.

    Args:
      alone: the experiment, built for a single device.
      rows: the number of examples.
    """
    program = alone.program
    compute = program.compute
    assert isinstance(compute, Unstaged), "a single device has no pipeline stages"
    state = program.own_shapes
    batch = {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in program.batch.items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))

    def total(params: Any, buffers: Any, batch: Any, key: Any) -> jax.Array:
        return compute.objective.sums(params, buffers, batch, key)[0]

    def backward(params: Any, *others: Any) -> Any:
        return jax.vjp(lambda own: total(own, *others), params)[1]

    given = (state.params, state.buffers, batch, key)
    forward, traced = jax.make_jaxpr(total)(*given), jax.make_jaxpr(backward)(*given)
    left = list(zip(traced.out_avals, scanned_results(traced), strict=True))
    return {
        "left": _bytes([leaf for leaf, scanned in left if not scanned]),
        "scanned": _bytes([leaf for leaf, scanned in left if scanned]),
        "products": product_bytes(forward),
        "products outside scans": product_bytes(forward, scans=False),
        "narrow": any(leaf.dtype in ("bfloat16", "float16") for leaf, _ in left),
        "flops": jaxpr_flops(jax.make_jaxpr(jax.grad(total))(*given)),
    }


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
