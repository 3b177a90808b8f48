"""The time of a plan's step by formula, from the rates of the chips and their links.

Matrix products run at a fraction of the peak, and elementwise operations at the bandwidth of
memory. The times of products and of elementwise operations add up, since XLA fuses few elementwise
operations with products. The device waits for ZeRO's collectives, as XLA:TPU schedules them. The
collectives of axis tensor overlap with the products of the MLP (`collective_matmul`), and the
partial sums of these products pass through memory. Around attention, the device waits for the
collectives. A pipeline takes the time of its ticks. A tick takes the time of its busiest stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.cost.kernels import LANES, SPLASH, computed_share, splash_block, splash_share
from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.pipeline_schedules.schedule import TaskKind
from jaxdist.planner.formulas.context import context_seconds, piecewise
from jaxdist.planner.memory import optimizer_bytes, rows_of, share
from jaxdist.planner.model import Decoder, PlannedModel
from jaxdist.planner.plan import Plan
from jaxdist.planner.products import block_seconds, mean_share, peak_of
from jaxdist.planner.target import Dims, Places, Target, ring_hops
from jaxdist.sharding.collective_matmul import MOST_READ


@dataclass(frozen=True)
class _Rates:
    """The constants of the formulas, read from compiled programs.

    Attributes:
      product: the fraction of the peak that matrix products reach on devices without a table in
        `jaxdist.cost.products`.
      attention: the fraction of the peak that attention's kernels reach on devices without a table.
      passes: the number of times that the activations of a block pass through memory in the forward
        pass.
      elements: the bytes of activations that the vector unit processes in the time of a FLOP at the
        peak. This rate limits elementwise operations if memory is faster.
      update: the bytes per parameter element that pass through memory in the optimizer's update, in
        addition to parameters and the optimizer's state.
    """

    product: float = 0.94
    attention: float = 0.60
    passes: float = 2.5
    elements: float = 1 / 300
    update: float = 8.0


RATES = _Rates()
HIDDEN_IN_TICKS = 1 / 8
"""The fraction of the time of matrix products in a pipeline's ticks that overlaps with the messages
of a collective matmul. The fraction is from compiled steps of a model with 70B parameters."""


WHOLE_SUMS = {"v5e": 2, "v6e": 2, "tpu7x": math.inf}
"""The least number of torus dims over which libtpu 0.0.52 reduces gradients with an all-reduce and
a slice instead of a reduce-scatter. The number is 3 for families that are not listed. On tpu7x
libtpu always uses a reduce-scatter."""
WAITED_GATHERS = {"v5e": 0.2, "tpu7x": 0.5}
"""The fraction of the time of ZeRO 3's gathers for which a step without axis tensor waits. The
fraction is fitted to compiled steps, and is 1 for families that are not listed. The remaining time
overlaps with computation. On tpu7x the SparseCores gather."""


@dataclass(frozen=True)
class Seconds:
    """The parts of a step's time in seconds, averaged over devices.

    Attributes:
      products: the model's matrix products in both passes, without recomputation.
      attention: the kernels of attention.
      recomputed: the recomputation in the backward pass.
      elements: the elementwise operations, from the memory traffic of activations.
      update: the optimizer's update, from the memory traffic of its state, of casts and of sums of
        gradients. Newton-Schulz and the exchange of its matrices are included.
      data: the waits for collectives over axis data inside the fast network.
      slow: the waits for collectives over axis data across the slow network.
      tensor: the waits for collectives over axis tensor.
      bubble: the waits for other pipeline stages and for the messages between stages.
      context: the waits for exchanges between devices that share sequences.
      expert: the waits for exchanges of tokens between devices with different experts.
      host: the copies of the optimizer's state from the host's memory and back.
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
    context: float = 0.0
    expert: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of a step, which are the sum of all parts."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of a step, by its name in the tables."""
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
            **({"waits, context": self.context} if self.context else {}),
            **({"waits, experts": self.expert} if self.expert else {}),
            **({"copies, host": self.host} if self.host else {}),
        }


def gather_seconds(target: Target, dims: Dims, size: int, total_bytes: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter over whole dims of the torus.

    Args:
      target: the chips.
      dims: the dims of the torus that the group occupies from end to end.
      size: the number of devices in the group. For 1 device the result is 0.
      total_bytes: the bytes of the gathered array, or of the array before the reduce-scatter.
    """
    if size == 1:
        return 0.0
    link = target.device.fast
    wire = total_bytes * (size - 1) / size / (target.ports(dims) * target.link_rate(dims))
    return wire + target.hops(dims) * link.latency_seconds


def across(target: Target, total_bytes: float, count: int | None = None) -> float:
    """Return the seconds of an all-reduce across S slices, of `total_bytes` on each device.

    A device sends 2 (S - 1) / S times the bytes, through its share of the host's network. For a
    single slice the result is 0.

    Args:
      target: the chips.
      total_bytes: the bytes on each device.
      count: the number S of slices, or None for `target.slices`. A host with GPUs counts as a
        slice.
    """
    count = target.slices if count is None else count
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
) -> Seconds:
    """Return the time of a decoder's step, by part.

    Args:
      model: the decoder for which the plan is made.
      plan: a valid plan.
      places: the layout of the plan's mesh on the torus.
      target: the chips.
      ticks: the ticks of the plan's pipeline, or None without a pipeline.
    """
    device, width = target.device, model.width
    peak = peak_of(target, narrow=model.narrow)
    memory_rate = device.memory_bytes_per_second
    rows = rows_of(model, plan)
    # `tokens` is the number of tokens of a microbatch of a replica, divided over axis context.
    tokens = rows * model.window // plan.context
    count, layers = plan.microbatches, model.layers // plan.stage
    # A device's share of the products for all of these tokens costs as much as all products for
    # `split` tokens.
    split = tokens / plan.tensor

    product = block_seconds(model, plan, target, split, RATES.product)
    pairs = split * model.attention_flops / peak
    ahead_passes, back_passes = piecewise(model, plan, target, rows) or (
        _attention_passes(model, target, ("fwd",)),
        _attention_passes(model, target, ("dq", "dkv")),
    )
    forward, backward = pairs * ahead_passes, pairs * back_passes
    again = _recomputed_share(model, plan) * product
    if "attention" not in plan.kept:
        again += forward
    element_rate = min(memory_rate, peak * RATES.elements)
    element = RATES.passes * split * _width(model) * width / element_rate
    # Only a third of the bytes is added, since `element` is later multiplied by the number of
    # passes, 3.
    element += _ring_sums_bytes(model, plan, tokens) / 3 / memory_rate
    logits = [(model.embed, model.vocab // plan.tensor)]
    head_share = mean_share(target, logits, RATES.product, scoped=model.scoped)
    head = 3 * split * model.head_flops / (peak * head_share)
    waits_tensor = _tensor_waits(model, plan, places, target, tokens)
    per_layer_data = _layer_waits(model, plan, places, target)
    ahead = product + forward + element + waits_tensor / 3
    if plan.schedule is not None and not plan.stash:
        # Without a stash, a backward task begins with the forward pass of its chunk.
        again += ahead
    waits_context = context_seconds(model, plan, places, target, rows)
    back = 2 * product + backward + again + 2 * element + waits_tensor * 2 / 3 + per_layer_data
    bubble = 0.0
    if ticks is not None:
        ahead, back = ahead + waits_context / 3, back + waits_context * 2 / 3
        tick = _ticks_seconds(ticks, layers / plan.chunks, ahead, back, plan)
        message = split * model.embed * width
        busy = count * (layers * (ahead + back) + head / plan.stage)
        hops = ring_hops(target, places.dims[0]) if plan.chunks > 1 else 1
        # `tick` and `busy` both contain the time of the layers' products, so these times cancel in
        # the difference. The bubble is the time by which the ticks take longer than the mean work
        # of a stage.
        bubble = (
            tick + count * head - busy + _messages(ticks, target, places.dims[0], hops * message)
        )
        head /= plan.stage
    once_data, slow = _step_waits(model, plan, places, target)
    mine = share(model, plan)
    summed = mine.trained_shard if plan.zero >= 2 else mine.trained
    return Seconds(
        products=count * (layers * 3 * product + head),
        attention=count * layers * (forward + backward),
        recomputed=count * layers * again,
        elements=count * layers * 3 * element,
        update=(update_bytes(model, plan, summed) + _cast_bytes(model, plan)) / memory_rate
        + _orthogonalized_seconds(model, plan, places, target),
        data=count * layers * per_layer_data + once_data,
        slow=slow,
        tensor=count * layers * waits_tensor,
        bubble=bubble,
        context=count * layers * waits_context,
    )


def update_bytes(model: PlannedModel, plan: Plan, summed: int) -> float:
    """Return the bytes that a device reads and writes in a step for the optimizer's update.

    Args:
      model: the model for which the plan is made.
      plan: the plan that divides the update.
      summed: the number of elements of the gradients that are summed over microbatches.
    """
    mine, count = share(model, plan), plan.microbatches
    updated = mine.trained_shard if plan.zero or plan.shares_embed else mine.trained
    # Each microbatch reads its gradients and their sum, and writes the sum.
    sums = 3 * count * summed * model.param_bytes if count > 1 else 0
    each = 2 * model.param_bytes + RATES.update
    return updated * each + 2 * optimizer_bytes(model, plan) + sums


def _cast_bytes(model: Decoder, plan: Plan) -> float:
    """Return the bytes that a device reads and writes in a step to cast parameters.

    Each microbatch casts the parameters if their stored dtype is wider than the dtype of the
    computation. With ZeRO 3 the result is 0.
    """
    if plan.zero == 3 or model.param_bytes <= model.width:
        return 0.0
    size = model.param_bytes + model.width
    return 2 * plan.microbatches * share(model, plan).whole * size


def _orthogonalized_seconds(model: Decoder, plan: Plan, places: Places, target: Target) -> float:
    """Return the seconds of Newton-Schulz and of the exchange of its matrices.

    The result is 0 for other optimizers than Muon. Devices share the work if the optimizer's state
    is split. The matrices are exchanged over axis tensor. They are also exchanged over the devices
    that split the state, with one exception: under ZeRO 1 without a pipeline, if the number of
    layers is a multiple of the number of these devices, each device has whole layers.
    """
    if not model.newton_schulz:
        return 0.0
    parts = plan.state_parts if plan.zero else 1
    sharing = plan.stage * plan.tensor * parts
    peak = RATES.product * peak_of(target, narrow=True)
    mine, layers = share(model, plan), model.layers // plan.stage
    shard = (mine.matrices_shard if plan.zero else mine.matrices) * 4.0
    by_layer = plan.zero == 1 and plan.stage == 1 and layers % parts == 0
    sent = 0.0
    if parts > 1 and not by_layer:
        sent += 2 * gather_seconds(target, places.dims[1], parts, shard)
    if plan.tensor > 1:
        sent += 2 * gather_seconds(target, places.dims[2], plan.tensor, shard)
    return model.update_flops / sharing / peak + sent


def _attention_passes(model: Decoder, target: Target, kernels: Sequence[str]) -> float:
    """Return the time of the named kernels of attention, in units of an ideal forward pass.

    The ideal forward pass computes the two products of attention at the peak, including products
    that the mask discards.
    """
    family, window = target.device.name, None if model.span is None else model.span - 1
    spent = 0.0
    for name in kernels:
        # Plain attention, which serves lengths that splash refuses, computes all scores.
        block = model.window
        if model.window % LANES == 0:
            block = splash_block(name, family, model.window, window=window, narrow=model.narrow)
        share_of_peak = RATES.attention
        if target.is_tpu:
            share_of_peak = splash_share(name, family, block, model.head_dim)
        computed = computed_share(model.window, block, window)
        spent += computed * SPLASH[name]["products"] / 2 / share_of_peak
    return spent


def _width(model: Decoder) -> int:
    """Return the number of activation elements per token that a block reads and writes."""
    inside = model.heads + 2 * model.kv_heads
    return 6 * model.embed + 2 * inside * model.head_dim + 4 * model.mlp


def _recomputed_share(model: Decoder, plan: Plan) -> float:
    """Return the fraction of a block's matrix products that the backward pass recomputes."""
    # The product for attention's output has as many FLOPs as the product for the query, and the
    # result of attention itself comes from no product with weights.
    sizes = model.activations | {"attention": 0, "attention_out": model.activations["query"]}
    again = sum(size for name, size in sizes.items() if name not in plan.kept)
    return 2.0 * model.embed * again / model.layer_flops


def _tensor_waits(model: Decoder, plan: Plan, places: Places, target: Target, tokens: int) -> float:
    """Return the seconds that a block waits for axis tensor in all passes of a microbatch.

    Args:
      model: the decoder for which the plan is made.
      plan: the plan whose time is computed.
      places: the layout of the plan's mesh on the torus.
      target: the chips.
      tokens: the number of tokens in a microbatch of a replica.
    """
    if plan.tensor == 1:
        return 0.0
    again = "attention_out" not in plan.kept
    once = gather_seconds(target, places.dims[2], plan.tensor, tokens * model.embed * model.width)
    # There are a gather and a reduce-scatter in each pass, and a gather of the input for the
    # gradients of weights. The recomputation of attention's output has another gather and another
    # reduce-scatter.
    attention = (7 if again else 5) * once
    if plan.collective_matmul:
        return attention + _ring_waits(model, plan, places, target, tokens)
    # Without collective matmuls, the MLP has the same collectives. If gate and up are recomputed,
    # they need another gather.
    return attention + (5 if {"mlp_gate", "mlp_up"} <= set(plan.kept) else 6) * once


def _ring_sums_bytes(model: Decoder, plan: Plan, tokens: int) -> float:
    """Return the bytes that a block's collective matmuls read and write for their partial sums.

    The result is for the forward and the backward pass together. Each chunk of the MLP's result is
    added to the partial sum that arrives on the ring, and so is each chunk of the gradient of the
    MLP's input. The gradient of a kernel is the sum of several products, each of which contracts
    `MOST_READ` chunks.
    """
    size = plan.tensor
    if not plan.collective_matmul:
        return 0.0
    pieces = 2 * 3 * tokens * (size - 1) / size * model.embed
    parts = math.ceil(size / MOST_READ)
    kernels = (parts + 1) * 3 * model.embed * model.mlp / size if parts > 1 else 0.0
    return (pieces + kernels) * model.width


def _ring_waits(model: Decoder, plan: Plan, places: Places, target: Target, tokens: int) -> float:
    """Return the seconds that a block's MLP waits for messages of its collective matmuls.

    Chunks travel in both directions of a ring while other chunks are multiplied. Gate and up
    multiply together, in two products, and down multiplies in one product. The device waits for the
    time by which a message takes longer than the products. If the chips form a line and not a ring,
    the message from the last chip to the first passes all other chips.
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
    # The terms are the forward rings, the recomputed ring of gate and up, and the two rings of the
    # backward pass.
    return size // 2 * (in_ + out + again + max(0.0, 2 * wire - 8 * product) + in_)


def _layer_waits(model: Decoder, plan: Plan, places: Places, target: Target) -> float:
    """Return the seconds that a block waits, in one microbatch, for collectives over axis data."""
    layer = share(model, plan).layer * model.width
    if plan.zero < 2:
        # XLA reduces the gradients of each microbatch. An explicit reduction sends only the
        # sum of these gradients, after the last microbatch.
        explicit = plan.bfloat16_reduction or plan.schedule is not None
        return 0.0 if explicit else 2 * gather_seconds(target, places.dims[1], plan.data, layer)
    dims = places.dims[1] + (places.inner_dims if plan.context > 1 else ())
    once = gather_seconds(target, dims, plan.data * plan.context, layer)
    family, spread = target.device.name, len(target.far(dims))
    sums = once * (2 if spread >= WHOLE_SUMS.get(family, 3) else 1)
    waited = WAITED_GATHERS.get(family, 1.0) if plan.tensor == 1 else 1.0
    return sums + (2 * once * waited if plan.zero == 3 else 0.0)


def _step_waits(model: Decoder, plan: Plan, places: Places, target: Target) -> tuple[float, float]:
    """Return the seconds of a step's other waits for the fast and for the slow network.

    The other waits are all waits that are not part of `_layer_waits`.
    """
    mine = share(model, plan)
    sum_bytes = 2 if plan.bfloat16_reduction else model.param_bytes
    dims = places.dims[1]
    fast, crossing = 0.0, plan.slices
    if plan.wide and not plan.shares_embed:
        # Devices that share a sequence have gradients of different tokens, so they take part in the
        # sum too.
        crossing *= plan.context
    elif plan.zero < 2 and (plan.bfloat16_reduction or plan.schedule is not None):
        among = dims + (places.inner_dims if plan.context > 1 else ())
        parts = plan.data * plan.context
        fast += 2 * gather_seconds(target, among, parts, mine.whole * sum_bytes)
    if plan.zero in (1, 2):
        fast += gather_seconds(target, dims, plan.data, mine.whole * model.param_bytes)
    # Gradients are first reduced inside the slice, so that each device sends only its shard across
    # the slow network.
    part = mine.whole / (plan.data * (plan.context if plan.shares_embed else 1))
    slow = across(target, part * sum_bytes, crossing)
    if plan.zero == 3 and plan.scope == "all":
        # Parameters are gathered in both passes, and a gather sends half as much as an all-reduce.
        gathers = across(target, 2 * part * model.width, crossing)
        slow += 0.5 * gathers * plan.microbatches
    return fast, slow


def _ticks_seconds(ticks: Ticks, layers: float, ahead: float, back: float, plan: Plan) -> float:
    """Return the seconds of all ticks of a step.

    A tick takes the time of its longest task.

    Args:
      ticks: the ticks of the plan's pipeline.
      layers: the number of layers of a chunk.
      ahead, back: the seconds of a layer's forward and backward pass.
      plan: the plan, with a pipeline.
    """
    # `back` contains one recomputed forward pass, but without a stash each half of a backward task
    # recomputes the forward pass.
    twice = ahead if not plan.stash else 0.0
    kinds = {
        TaskKind.FORWARD: layers * ahead,
        TaskKind.FULL: layers * back,
        TaskKind.INPUT: layers * (back + twice) / 2,
        TaskKind.WEIGHT: layers * (back + twice) / 2,
    }
    return ticks.seconds(kinds)


def _messages(ticks: Ticks, target: Target, dims: Dims, size_bytes: float) -> float:
    """Return the seconds of the messages between stages in all ticks.

    Args:
      ticks: the ticks of the plan's pipeline.
      target: the chips.
      dims: the dims of the torus that axis stage occupies.
      size_bytes: the bytes of a message, multiplied by its number of hops.
    """
    each = size_bytes / target.link_rate(dims) + target.device.fast.latency_seconds
    return ticks.ticks * (len(ticks.outputs) + len(ticks.cotangents)) * each
