"""The time of codecs compared with a copy of memory and with a sort, and the bytes of compiled
reductions compared with a float32 ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.collectives.program import compile_local, make_mesh, split
from benchmarks.core.harness import REPEATS, interleave
from benchmarks.core.report import Figure, Report
from jaxdist.compression import (
    Adaptive,
    Cast,
    Codec,
    CompressionState,
    LowRank,
    Quantize,
    RandomK,
    Sign,
    TopK,
    compressed_all_reduce,
    first_round,
    init_state,
)
from jaxdist.hlo import ledger

SIZE = 2**24
"""The number of elements of the timed arrays: 64 MiB, more than caches hold."""
SIDE = 1024
"""The side of the square matrix that is reduced."""
DEVICES = 8
FRACTION = 0.01
TIMED = {"sign": Sign(), "int8": Quantize(), "int4": Quantize(bits=4), "bfloat16": Cast()}
GOALS = {"sign": "<= 3.33", "int8": "<= 3.33"}
"""The goals for the ratio of times, which demand 0.3 of the copy's speed, by codec."""
SENT: dict[str, tuple[Codec, str]] = {
    "bfloat16": (Cast(), "<= 0.501"),
    "float8": (Cast(dtype="float8_e4m3"), ""),
    "int8": (Quantize(), "<= 0.27"),
    "int4": (Quantize(bits=4), "<= 0.14"),
    "adaptive, 3 bits": (Adaptive(bits=3), ""),
    "sign": (Sign(), "<= 0.035"),
    "random 1%": (RandomK(fraction=FRACTION), ""),
    "rank 4": (LowRank(rank=4), ""),
}
"""Codecs, and the goals for their bytes, divided by the bytes of a float32 ring."""


def bench(repeats: int = REPEATS, size: int = SIZE, side: int = SIDE) -> Report:
    """Time codecs on one device, and count the bytes of reductions over 8 devices."""
    x = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
    figures = [beside_copy(name, codec, x, repeats) for name, codec in TIMED.items()]
    figures.append(beside_sort(x, repeats))
    if len(jax.devices()) >= DEVICES:
        figures += [sent(name, *found, side) for name, found in SENT.items()]
        figures.append(received(side))
    return Report("compression", figures)


def beside_copy(name: str, codec: Codec, x: jax.Array, repeats: int) -> Figure:
    """Compare the time to encode and decode an array with the time to copy it."""
    encode = jax.jit(lambda x: codec.encode(x, (), first_round())[0])
    decode = jax.jit(lambda message: codec.decode(message, x, first_round()))
    copy = jax.jit(jnp.copy)
    times = interleave(
        _waiting(lambda: decode(encode(x))), _waiting(lambda: copy(x)), repeats=repeats
    )
    note = f"two programs, {x.size:,} float32; the reference is a jitted copy into new memory"
    return Figure.compare(
        f"{name}: encode and decode over a copy", *times, GOALS.get(name, ""), note
    )


def beside_sort(x: jax.Array, repeats: int) -> Figure:
    """Compare the time to choose one element in a hundred by a sampled threshold with a sort."""
    codec = TopK(fraction=FRACTION)
    count = codec.count(x.size)
    sampled = jax.jit(lambda x: codec.select(x, first_round()))
    exact = jax.jit(lambda x: lax.top_k(jnp.abs(x), count))
    times = interleave(
        _waiting(lambda: sampled(x)), _waiting(lambda: exact(x)), warmup=1, repeats=repeats
    )
    note = f"{count:,} of {x.size:,} float32, with their positions"
    return Figure.compare("top-k by a sample over lax.top_k", *times, "<= 0.2", note)


def _waiting(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: jax.block_until_ready(call())


def sent_bytes(codec: Codec, side: int) -> float:
    """Return the bytes that a device sends in the compiled all-reduce of a square matrix."""
    mesh = make_mesh(jax.devices()[:DEVICES], (DEVICES,), ("data",))
    like = jax.ShapeDtypeStruct((side, side), jnp.float32)
    state = jax.eval_shape(lambda: init_state(like, DEVICES, codec=codec))
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split(mesh)),
        (jax.ShapeDtypeStruct((DEVICES, side, side), jnp.float32), state),
    )

    def reduce(own: tuple[jax.Array, CompressionState]) -> tuple[jax.Array, CompressionState]:
        found = compressed_all_reduce(own[0][0], own[1], "data", codec=codec)
        return found.grads[None], found.state

    return ledger(compile_local(reduce, mesh, given), mesh).sent_bytes()


def sent(name: str, codec: Codec, goal: str, side: int) -> Figure:
    """Compare the bytes that a device sends with the bytes of a float32 ring."""
    ring = 2 * (DEVICES - 1) / DEVICES * 4 * side * side
    note = f"of a device, {DEVICES} devices, {side} x {side} float32; the reference is a ring"
    return Figure(f"{name}: wire bytes", sent_bytes(codec, side), ring, goal, "bytes", note)


def received(side: int) -> Figure:
    """Compare the bytes that top-k receives with 8 bytes for each sent element of other devices."""
    formula = 8 * math.floor(FRACTION * side * side) * (DEVICES - 1)
    ours = sent_bytes(TopK(fraction=FRACTION), side)
    note = "in an all-gather a device receives as much as it sends; 8 rho d (N - 1)"
    return Figure("top 1%: received bytes", ours, formula, "<= 1.02", "bytes", note)
