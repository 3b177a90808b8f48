"""How long a plan's step takes, by formula: compute at the rates of chips, collectives over links.

Matrix products run at a share of the peak, elements pass through memory, and both add up, as XLA
fuses few of one into the other. Collectives of ZeRO are waited for (so XLA:TPU schedules them),
those of axis tensor travel beside the products of the MLP (`collective_matmul`) and are waited for
around attention. A pipeline is its ticks, each as long as the busiest stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.parallel.pipeline.schedules.schedule import TaskKind
from jaxdist.planner.memory import rows_of, share
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import KEPT, Plan
from jaxdist.planner.target import Dims, Places, Target


@dataclass(frozen=True)
class Rates:
    """Shares and counts that the formulas stand on, read from compiled programs.

    Attributes:
      product: share of the peak that large matrix products reach.
      attention_forward, attention_backward: the same of attention's kernels.
      passes: times that the activations of a block pass through memory, forwards.
      update: bytes that pass through memory for each parameter's update, beside its state.
    """

    product: float = 0.90
    attention_forward: float = 0.60
    attention_backward: float = 0.80
    passes: float = 2.0
    update: float = 8.0


RATES = Rates()


@dataclass(frozen=True)
class Seconds:
    """Where a step's time goes, on the mean device.

    Attributes:
      products: matrix products of the model, each once.
      attention: its kernels.
      recomputed: what the backward pass computes again.
      elements: activations through memory.
      update: the optimizer's state through memory.
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
    wire = total_bytes * (size - 1) / size / (target.ports(dims) * link.bytes_per_second)
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
    device, mine, width = target.device, share(model, plan), model.width
    peak = device.flops_per_second["bfloat16"] if model.narrow else _wide_peak(target)
    memory_rate = device.memory_bytes_per_second
    tokens = rows_of(model, plan) * model.window  # of a microbatch on a replica
    count, layers = plan.microbatches, model.layers // plan.stage
    split = tokens / plan.tensor  # the work of each device of a replica

    product = split * model.layer_flops / (peak * rates.product)
    forward = split * model.attention_flops * 0.5 / (peak * rates.attention_forward)
    backward = 2.5 * split * model.attention_flops * 0.5 / (peak * rates.attention_backward)
    again = _recomputed_share(model, plan) * product + forward
    element = rates.passes * split * _width(model) * width / memory_rate
    head = 3 * split * model.head_flops / (peak * rates.product) / plan.stage
    waits_tensor = _tensor_waits(model, plan, places, target, tokens)
    per_layer_data = _layer_waits(model, plan, places, target)
    layer = 3 * product + forward + backward + again + 3 * element + waits_tensor + per_layer_data
    whole = count * (layers * layer + head)
    bubble = 0.0
    if ticks is not None:
        bubble = _bubble(ticks, whole / count, plan, model, places, target, tokens)
    once_data, slow = _step_waits(model, plan, places, target)
    state = (mine.shard if plan.zero else mine.whole) * (
        2 * model.state_bytes + 2 * model.param_bytes + rates.update
    )
    return Seconds(
        products=count * (layers * 3 * product + head),
        attention=count * layers * (forward + backward),
        recomputed=count * layers * again,
        elements=count * layers * 3 * element,
        update=state / memory_rate,
        data=count * layers * per_layer_data + once_data,
        slow=slow,
        tensor=count * layers * waits_tensor,
        bubble=bubble,
    )


def _wide_peak(target: Target) -> float:
    found = target.device.flops_per_second
    return found.get("float32", found["bfloat16"] / 6)


def _width(model: Decoder) -> int:
    """Numbers of one token that a block writes and reads."""
    inside = model.heads + 2 * model.kv_heads
    return 6 * model.embed + 2 * inside * model.head_dim + 4 * model.mlp


def _recomputed_share(model: Decoder, plan: Plan) -> float:
    """Of a block's matrix products, those that the backward pass does again."""
    kept = KEPT[plan.remat]
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
    passes = 3 if plan.remat in ("full", "save_attention", "save_qkv") else 2
    once = gather(target, places.dims[2], plan.tensor, tokens * model.embed * model.width)
    return passes * 2 * once


def _layer_waits(model: Decoder, plan: Plan, places: Places, target: Target) -> float:
    """Of one block and microbatch, inside the fast network: what ZeRO gathers and scatters."""
    if plan.zero < 2:
        return 0.0
    layer = share(model, plan).layer * model.width
    once = gather(target, places.dims[1], plan.data, layer)
    sums = once * (1 if plan.bfloat16_reduction else 2)
    gathers = 2 * once if plan.zero == 3 else 0.0
    return gathers + sums


def _step_waits(model: Decoder, plan: Plan, places: Places, target: Target) -> tuple[float, float]:
    """Once a step: inside the fast network, and across the slow one."""
    mine = share(model, plan)
    sum_bytes = 2 if plan.bfloat16_reduction else model.param_bytes
    dims = places.dims[1]
    fast = 0.0
    if plan.zero < 2:
        fast += 2 * gather(target, dims, plan.data, mine.whole * sum_bytes)
    if plan.zero in (1, 2):
        fast += gather(target, dims, plan.data, mine.whole * model.param_bytes)
    # What crosses is split inside the slice first.
    part = mine.whole / plan.data
    slow = across(target, part * sum_bytes)
    if plan.zero == 3 and plan.scope == "all":
        slow += 0.5 * across(target, 2 * part * model.width) * plan.microbatches
    return fast, slow


def _bubble(
    ticks: Ticks,
    work: float,
    plan: Plan,
    model: Decoder,
    places: Places,
    target: Target,
    tokens: int,
) -> float:
    """Seconds in which the mean stage waits for others, and for messages.

    Args:
      work: seconds of one microbatch on a stage.
    """
    unit = work / plan.chunks / 4  # forward, backward twice as long, and the forward pass again
    kinds = {
        TaskKind.FORWARD: unit,
        TaskKind.FULL: 3 * unit,
        TaskKind.INPUT: 2 * unit,
        TaskKind.WEIGHT: 2 * unit,
    }
    message = tokens / plan.tensor * model.embed * model.width
    link = target.device.fast
    each = message / link.bytes_per_second + link.latency_seconds
    channels = len(ticks.outputs) + len(ticks.cotangents)
    del places
    return max(0.0, ticks.seconds(kinds) - plan.microbatches * work) + ticks.ticks * channels * each
