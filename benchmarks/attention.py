"""Blockwise attention compared with plain attention: time, and memory up to long sequences.

Dims: B batch, L sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.core.harness import REPEATS, interleave
from benchmarks.core.report import Figure, Report
from jaxdist.hlo import program_memory
from jaxdist.models.attention.blockwise import Blockwise
from jaxdist.models.attention.contract import Kernel, Qkv
from jaxdist.models.attention.plain import Plain
from jaxdist.models.hints import no_hint

LENGTH, LONG = 1024, 32768
ROWS, HEADS, KV_HEADS, FEATURES = 4, 8, 2, 64
TIME_GOAL, MEMORY_GOAL = "<= 1.1", "<= 1.05"
WARMUP = 1

Shapes = tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def bench(repeats: int = REPEATS, length: int = LENGTH, long: int = LONG) -> Report:
    """Compare attention's gradients on a device: time at 1,024 positions, memory to 32,768."""
    shapes = shapes_of(ROWS, length)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    given = [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, shapes, strict=True)]
    blockwise, plain = (gradient(kernel) for kernel in (Blockwise(), Plain()))
    times = interleave(
        lambda: jax.block_until_ready(blockwise(*given)),
        lambda: jax.block_until_ready(plain(*given)),
        warmup=WARMUP,
        repeats=repeats,
    )
    note = (
        f"gradients of causal attention; {ROWS} rows, {HEADS} heads, {KV_HEADS} kv_heads, head "
        f"size {FEATURES}, float32"
    )
    return Report(
        "attention",
        [
            Figure.compare(f"blockwise over plain, {length}", *times, TIME_GOAL, note),
            *(linear(at) for at in (long // 2, long)),
            beside_plain(long // 2),
        ],
    )


def shapes_of(rows: int, length: int) -> Shapes:
    """Return the shapes of queries, keys and values."""
    heads = (HEADS, KV_HEADS, KV_HEADS)
    queries, keys, values = (
        jax.ShapeDtypeStruct((rows, length, count, FEATURES), jnp.float32) for count in heads
    )
    return queries, keys, values


def gradient(kernel: Kernel) -> jax.stages.Wrapped:
    """Return a jitted gradient of the sum of squared results by query, key and value."""

    def total(*qkv: jax.Array) -> jax.Array:
        out_BLHd = kernel(Qkv(*qkv), window=None, causal=True, hint=no_hint)
        return jnp.square(out_BLHd).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))


def temp_bytes(kernel: Kernel, length: int) -> int:
    """Return the temporary bytes of the compiled gradients of one row, which are not run."""
    return program_memory(gradient(kernel).lower(*shapes_of(1, length)).compile()).temp_bytes


def linear(length: int) -> Figure:
    """Compare the memory at a length with twice the memory at half of that length."""
    ours, half = (temp_bytes(Blockwise(), at) for at in (length, length // 2))
    note = f"temporary bytes of one row's gradients over twice those at {length // 2} positions"
    return Figure(f"blockwise memory, {length}", ours, 2 * half, MEMORY_GOAL, "B", note)


def beside_plain(length: int) -> Figure:
    """Compare the memory of the two kernels at a length."""
    ours, plain = (temp_bytes(kernel, length) for kernel in (Blockwise(), Plain()))
    note = "temporary bytes of one row's gradients; plain's grow with the square of the sequence"
    return Figure(f"blockwise memory over plain's, {length}", ours, plain, "", "B", note)
