"""Attention over a sequence that devices share: bytes and FLOPs of compiled programs, by formula.

Nothing is run. Each program computes the gradients of causal attention on 2, 4 and 8 devices.

Dims: B batch, L sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from benchmarks.core.report import Figure, Report, apart
from jaxdist.cost.context import (
    ContextNeeds,
    Order,
    SequenceSplit,
    Way,
    splits_of,
)
from jaxdist.hlo import Ledger, ledger
from jaxdist.models.attention.plain import Plain
from jaxdist.models.attention.shared import attend_shared
from jaxdist.models.hints import no_hint

NEEDS = ContextNeeds(heads=16, kv_heads=8, head_dim=8, length=2048, itemsize=4)
BLOCKS = 16
"""The number of blocks of a device's piece; with more blocks, fewer masked pairs are computed."""
LAYERS = 2
DEGREES = (2, 4, 8)
WAYS: tuple[Way, ...] = ("gather", "ring", "ulysses", "ring_ulysses")
BYTES_GOAL, BALANCE_GOAL = "<= 1.02", "<= 1.02"


def attention_share(order: Order, groups: int) -> float:
    """Return the causal work of the busiest group, divided by the mean work of a group.

    If the work is balanced, the result is 1.
    """
    return 2 - 1 / groups if order == "contiguous" else 1.0


def bench(degrees: tuple[int, ...] = DEGREES, needs: ContextNeeds = NEEDS) -> Report:
    """Compare bytes and the balance of FLOPs with the formulas, for each way and order."""
    figures: list[Figure] = []
    for size in degrees:
        for way in WAYS:
            splits = splits_of(way, ("context",), size)
            figures += [of_bytes(split, compiled(split, needs), needs) for split in splits[:1]]
        ring = splits_of("ring", ("context",), size)[0]
        figures += [
            of_balance(split, compiled(split, needs))
            for split in (replace(ring, order=o) for o in ("contiguous", "zigzag", "striped"))
        ]
    return Report("context", figures)


def compiled(split: SequenceSplit, needs: ContextNeeds) -> Ledger:
    """Return the ledger of a program that computes attention and its gradients."""
    devices = jax.devices()[: split.size]
    mesh = jax.make_mesh((split.size,), split.axes, axis_types=(AxisType.Auto,), devices=devices)
    heads = (needs.heads, needs.kv_heads, needs.kv_heads)
    dtype = jnp.float32 if needs.itemsize == 4 else jnp.bfloat16
    shapes = [
        jax.ShapeDtypeStruct((needs.rows, needs.length, n, needs.head_dim), dtype) for n in heads
    ]
    step = jax.jit(partial(_gradients, mesh, split, needs)).lower(*shapes).compile()
    return ledger(step, mesh)


def _gradients(
    mesh: Mesh, split: SequenceSplit, needs: ContextNeeds, *given: jax.Array
) -> tuple[jax.Array, ...]:
    spec = PartitionSpec(None, split.axes)
    kernel = partial(Plain(), window=needs.window, causal=True, hint=no_hint)
    most = max(1, needs.length // split.groups // BLOCKS)
    local = partial(attend_shared, split, kernel, window=needs.window, causal=True, most=most)
    attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    # In a loop over layers, XLA cannot reuse values that the forward pass received in the backward
    # pass.
    def layer(carry: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
        q_BLHd, k_BLKd, v_BLKd = carry
        return (attend(q_BLHd, k_BLKd, v_BLKd), 2 * k_BLKd, 2 * v_BLKd), None

    def total(*given: jax.Array) -> jax.Array:
        (out_BLHd, *_), _ = jax.lax.scan(layer, given, length=LAYERS)
        return jnp.square(out_BLHd.astype(jnp.float32)).sum()

    return jax.grad(total, argnums=(0, 1, 2))(*given)


def received(program: Ledger) -> float:
    """Return the bytes that a device receives in a layer, of activations and their gradients."""
    moved = (c for c in program.collectives if c.kind != "all-reduce")
    return sum(c.sent_bytes * c.times_high for c in moved) / LAYERS


def of_bytes(split: SequenceSplit, program: Ledger, needs: ContextNeeds) -> Figure:
    """Compare the bytes of a program with the formula."""
    ours, formula = received(program), sum(needs.bytes_received(split))
    note = f"{apart(ours, formula):.3f} apart; forward and backward, of a device in a layer"
    name = f"bytes of {split.describe()}, {split.size} devices"
    return Figure(name, ours, formula, BYTES_GOAL, "B", note)


def of_balance(split: SequenceSplit, program: Ledger) -> Figure:
    """Compare the FLOPs of the busiest device over the mean with the formula."""
    # In a contiguous order, the last device takes each branch and the first device none. The number
    # of branches rises evenly between these two devices.
    mean = (program.flops_low + program.flops_high) / 2
    share = attention_share(split.order, split.groups)
    goal = BALANCE_GOAL if share == 1 else ""
    note = "FLOPs of the busiest device over the mean, beside the formula for small blocks"
    name = f"balance of {split.order} ring, {split.size} devices"
    return Figure(name, program.flops_high / mean, share, goal, "", note)
