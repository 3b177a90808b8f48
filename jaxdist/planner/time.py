"""How long a plan's step takes, by formula: compute at the rates of chips, collectives over links.

Matrix products run at a share of the peak, elements pass through memory, and both add up, as XLA
fuses few of one into the other. Collectives of ZeRO are waited for (so XLA:TPU schedules them),
those of axis tensor travel beside the products of the MLP (`collective_matmul`), whose pieces are
summed through memory, and are waited for around attention. A pipeline is its ticks, each as long
as the busiest stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.cost.kernels import SPLASH, computed_share, splash_block, splash_share
from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.pipeline_schedules.schedule import TaskKind
from jaxdist.planner.memory import rows_of, share
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import Plan
from jaxdist.planner.products import block_seconds, mean_share, peak_of
from jaxdist.planner.target import Dims, Places, Target, ring_hops
from jaxdist.sharding.collective_matmul import MOST_READ


@dataclass(frozen=True)
class Rates:
    """Shares and counts that the formulas stand on, read from compiled programs.

    Attributes:
      product: share of the peak that matrix products reach on devices that
        `jaxdist.cost.products` has no table of.
      attention: the same of attention's kernels.
      passes: times that the activations of a block pass through memory, forwards.
      elements: bytes of activations that pass through the vector unit while the matrix units do one
        FLOP at their peak: what bounds elements where memory is fast.
      update: bytes that pass through memory for each parameter's update, beside its state.
    """

    product: float = 0.94
    attention: float = 0.60
    passes: float = 2.5
    elements: float = 1 / 300
    update: float = 8.0


RATES = Rates()
HIDDEN_IN_TICKS = 1 / 8
"""Of the products in a pipeline's ticks, what hides a ring: read from compiled steps of 70B."""


WHOLE_SUMS = {"v5e": 2, "v6e": 2, "tpu7x": math.inf}
"""Number of torus dims from which libtpu 0.0.52 sums whole gradients and then cuts them, without a
reduce-scatter. It is three for families that are not named; tpu7x always has a reduce-scatter."""
WAITED_GATHERS = {"v5e": 0.2, "tpu7x": 0.5}
"""Share of the time of ZeRO 3's gathers that a step waits for where there is no axis tensor, fitted
to compiled steps. The rest runs beside computation, on tpu7x on the SparseCores."""


@dataclass(frozen=True)
class Seconds:
    """Where a step's time goes, on the mean device.

    Attributes:
      products: matrix products of the model, each once.
      attention: its kernels.
      recomputed: what the backward pass computes again.
      elements: activations through memory.
      update: the optimizer's state through memory, with casts and sums of gradients.
      data: waits for collectives over the data axis inside the fast network.
      slow: the same across the slow network.
      tensor: waits for collectives over axis tensor.
      bubble: waits for other stages, messages between stages with it.
    """

    products: float
    attention: float
    recomputed: float
    elements: float
    update: float
    data: float
    slow: float
    tensor: float
    bubble: float

    @property
    def total(self) -> float:
        """All of it."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By name, as tables show it."""
        return {
            "matrix products": self.products,
            "attention": self.attention,
            "recomputing": self.recomputed,
            "elements": self.elements,
            "update": self.update,
            "waits, data": self.data,
            "waits, slow network": self.slow,
            "waits, tensor": self.tensor,
            "bubble": self.bubble,
        }


def gather(target: Target, dims: Dims, size: int, total_bytes: float) -> float:
    """Seconds to gather `total_bytes` over whole dims; a reduce-scatter takes as long."""
    if size == 1:
        return 0.0
    link = target.device.fast
    wire = total_bytes * (size - 1) / size / (target.ports(dims) * target.link_rate(dims))
    return wire + target.hops(dims) * link.latency_seconds


def across(target: Target, total_bytes: float) -> float:
    """Seconds to all-reduce what each chip holds with its peers in the other slices.

    A chip sends 2 (S - 1) / S of it through its share of its host's network.
    """
    count = target.slices
    if count == 1:
        return 0.0
    link = target.device.slow
    return (
        2 * (count - 1) / count * total_bytes / link.bytes_per_second
        + 2 * math.log2(max(count, 2)) * link.latency_seconds
    )


def seconds(
    model: Decoder,
    plan: Plan,
    places: Places,
    target: Target,
    ticks: Ticks | None = None,
    rates: Rates = RATES,
) -> Seconds:
    """The time of a step.

    Args:
      places: the dims of the torus that the mesh's axes lie on.
      ticks: of the plan's pipeline.
    """
    device, width = target.device, model.width
    peak = peak_of(target, narrow=model.narrow)
    memory_rate = device.memory_bytes_per_second
    tokens = rows_of(model, plan) * model.window  # of a microbatch on a replica
    count, layers = plan.microbatches, model.layers // plan.stage
    split = tokens / plan.tensor  # the work of each device of a replica

    product = block_seconds(model, plan, target, split, rates.product)
    pairs = split * model.attention_flops / peak
    forward = pairs * _attention_passes(model, target, rates, ("fwd",))
    backward = pairs * _attention_passes(model, target, rates, ("dq", "dkv"))
    again = _recomputed_share(model, plan) * product
    if "attention" not in plan.kept:
        again += forward
    element_rate = min(memory_rate, peak * rates.elements)
    element = rates.passes * split * _width(model) * width / element_rate
    element += _ring_sums_bytes(model, plan, tokens) / 3 / memory_rate
    logits = [(model.embed, model.vocab // plan.tensor)]
    head_share = mean_share(target, logits, rates.product, scoped=model.scoped)
    head = 3 * split * model.head_flops / (peak * head_share)
    waits_tensor = _tensor_waits(model, plan, places, target, tokens)
    per_layer_data = _layer_waits(model, plan, places, target)
    ahead = product + forward + element + waits_tensor / 3
    if plan.schedule is not None and not plan.stash:
        again += ahead  # its stage runs a forward task once more for the backward task
    back = 2 * product + backward + again + 2 * element + waits_tensor * 2 / 3 + per_layer_data
    bubble = 0.0
    if ticks is not None:
        tick = _ticks_seconds(ticks, layers / plan.chunks, ahead, back, plan)
        message = split * model.embed * width
        busy = count * (layers * (ahead + back) + head / plan.stage)
        hops = ring_hops(target, places.dims[0]) if plan.chunks > 1 else 1
        bubble = (
            tick + count * head - busy + _messages(ticks, target, places.dims[0], hops * message)
        )
        head /= plan.stage
    once_data, slow = _step_waits(model, plan, places, target)
    return Seconds(
        products=count * (layers * 3 * product + head),
        attention=count * layers * (forward + backward),
        recomputed=count * layers * again,
        elements=count * layers * 3 * element,
        update=_update_bytes(model, plan, rates) / memory_rate,
        data=count * layers * per_layer_data + once_data,
        slow=slow,
        tensor=count * layers * waits_tensor,
        bubble=bubble,
    )


def _update_bytes(model: Decoder, plan: Plan, rates: Rates) -> float:
    """Read and written for the new parameters, once a step, and for the sum of gradients."""
    count, mine = plan.microbatches, share(model, plan)
    found = (mine.shard if plan.zero else mine.whole) * (
        2 * model.state_bytes + 2 * model.param_bytes + rates.update
    )
    # Each microbatch adds its gradients to their sum, and casts what is stored in another dtype.
    summed = mine.shard if plan.zero >= 2 else mine.whole
    if count > 1:
        found += 3 * count * summed * model.param_bytes
    if plan.zero < 3 and model.param_bytes > model.width:
        found += 2 * count * mine.whole * (model.param_bytes + model.width)
    return found


def _attention_passes(
    model: Decoder, target: Target, rates: Rates, kernels: Sequence[str]
) -> float:
    """Return the seconds of some of attention's kernels, over those of its two forward products
    at the peak with nothing masked."""
    family, window = target.device.name, None if model.span is None else model.span - 1
    spent = 0.0
    for name in kernels:
        block = splash_block(name, family, model.window, window=window, narrow=model.narrow)
        share_of_peak = rates.attention
        if target.is_tpu:
            share_of_peak = splash_share(name, family, block, model.head_dim)
        computed = computed_share(model.window, block, window)
        spent += computed * SPLASH[name].products / 2 / share_of_peak
    return spent


def _width(model: Decoder) -> int:
    """Numbers of one token that a block writes and reads."""
    inside = model.heads + 2 * model.kv_heads
    return 6 * model.embed + 2 * inside * model.head_dim + 4 * model.mlp


def _recomputed_share(model: Decoder, plan: Plan) -> float:
    """Of a block's matrix products, those that the backward pass does again."""
    kept = plan.kept
    d, f, e = model.embed, model.mlp, model.head_dim
    again = 0.0
    for name, flops in (
        ("query", 2.0 * d * model.heads * e),
        ("key", 2.0 * d * model.kv_heads * e),
        ("value", 2.0 * d * model.kv_heads * e),
        ("attention_out", 2.0 * d * model.heads * e),
        ("mlp_gate", 2.0 * d * f),
        ("mlp_up", 2.0 * d * f),
    ):
        if name not in kept:
            again += flops
    return again / model.layer_flops


def _tensor_waits(model: Decoder, plan: Plan, places: Places, target: Target, tokens: int) -> float:
    """Of one block in all passes: gathers before attention and reductions after it."""
    if plan.tensor == 1:
        return 0.0
    again = "attention_out" not in plan.kept
    once = gather(target, places.dims[2], plan.tensor, tokens * model.embed * model.width)
    # Forwards in and out, the same of gradients, and the input once more for those of weights.
    return (7 if again else 5) * once + _ring_waits(model, plan, places, target, tokens)


def _ring_sums_bytes(model: Decoder, plan: Plan, tokens: int) -> float:
    """Return the bytes that sums of collective matmuls read and write in all passes of one block.

    Each piece of the MLP's result is added to what comes round the ring, and so is each piece of
    the gradient of its input. The gradient of a kernel is a sum of products of `MOST_READ` pieces.
    """
    size = plan.tensor
    if size == 1:
        return 0.0
    pieces = 2 * 3 * tokens * (size - 1) / size * model.embed
    parts = math.ceil(size / MOST_READ)
    kernels = (parts + 1) * 3 * model.embed * model.mlp / size if parts > 1 else 0.0
    return (pieces + kernels) * model.width


def _ring_waits(model: Decoder, plan: Plan, places: Places, target: Target, tokens: int) -> float:
    """Of one block: what of the MLP's messages does not hide behind its products.

    Pieces go round both ways while pieces are multiplied, by gate and up together (two products)
    or by down (one). On a line the last chip's message to the first passes all the others.
    """
    size = plan.tensor
    link, peak = target.device.fast, target.device.flops_per_second["bfloat16"]
    dims = places.dims[2]
    piece = tokens / size
    message = piece * model.embed * model.width * ring_hops(target, dims)
    wire = message / target.link_rate(dims) + link.latency_seconds
    product = 2.0 * piece * model.embed * (model.mlp / size) / peak
    if plan.schedule is not None:
        product *= HIDDEN_IN_TICKS
    in_, out = (max(0.0, wire - 2 * count * product) for count in (2, 1))
    again = in_ if not {"mlp_gate", "mlp_up"} <= set(plan.kept) else 0.0
    # Backwards each ring turns again, its gradients with it.
    return size // 2 * (in_ + out + again + max(0.0, 2 * wire - 8 * product) + in_)


def _layer_waits(model: Decoder, plan: Plan, places: Places, target: Target) -> float:
    """Of one block and microbatch, inside the fast network: what ZeRO gathers and scatters."""
    layer = share(model, plan).layer * model.width
    if plan.zero < 2:
        # XLA sums the gradients of each microbatch; an explicit reduction their sum, once.
        explicit = plan.bfloat16_reduction or plan.schedule is not None
        return 0.0 if explicit else 2 * gather(target, places.dims[1], plan.data, layer)
    once = gather(target, places.dims[1], plan.data, layer)
    family, spread = target.device.name, len(target.far(places.dims[1]))
    sums = once * (2 if spread >= WHOLE_SUMS.get(family, 3) else 1)
    waited = WAITED_GATHERS.get(family, 1.0) if plan.tensor == 1 else 1.0
    return sums + (2 * once * waited if plan.zero == 3 else 0.0)


def _step_waits(model: Decoder, plan: Plan, places: Places, target: Target) -> tuple[float, float]:
    """Once a step: inside the fast network, and across the slow one."""
    mine = share(model, plan)
    sum_bytes = 2 if plan.bfloat16_reduction else model.param_bytes
    dims = places.dims[1]
    fast = 0.0
    if plan.zero < 2 and (plan.bfloat16_reduction or plan.schedule is not None):
        fast += 2 * gather(target, dims, plan.data, mine.whole * sum_bytes)
    if plan.zero in (1, 2):
        fast += gather(target, dims, plan.data, mine.whole * model.param_bytes)
    # What crosses is split inside the slice first.
    part = mine.whole / plan.data
    slow = across(target, part * sum_bytes)
    if plan.zero == 3 and plan.scope == "all":
        slow += 0.5 * across(target, 2 * part * model.width) * plan.microbatches
    return fast, slow


def _ticks_seconds(ticks: Ticks, layers: float, ahead: float, back: float, plan: Plan) -> float:
    """Of all ticks, each as long as its busiest stage.

    Args:
      layers: of a chunk.
      ahead, back: seconds of one layer's passes.
    """
    twice = ahead if not plan.stash else 0.0  # halves of a backward task each begin with a forward
    kinds = {
        TaskKind.FORWARD: layers * ahead,
        TaskKind.FULL: layers * back,
        TaskKind.INPUT: layers * (back + twice) / 2,
        TaskKind.WEIGHT: layers * (back + twice) / 2,
    }
    return ticks.seconds(kinds)


def _messages(ticks: Ticks, target: Target, dims: Dims, size_bytes: float) -> float:
    """Seconds of what stages, which lie on these dims, send each other in all ticks."""
    each = size_bytes / target.link_rate(dims) + target.device.fast.latency_seconds
    return ticks.ticks * (len(ticks.outputs) + len(ticks.cotangents)) * each
