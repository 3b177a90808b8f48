"""Bytes of the exchanges of tokens with experts, from compiled programs, compared with the formula.

Dims: B batch, L sequence, D embed, F hidden width of an expert, E experts, k experts of a token.
"""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp

from benchmarks.core.report import Figure, Report
from jaxdist.hlo import ledger
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.mixture import INTO, OUT, Experts
from jaxdist.models.feed_forward.products import Loop
from jaxdist.models.hints import Hint
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.sharding.experts import EXCHANGES, ExchangeName, most_sent

DEGREES = (2, 4, 8)
ROWS, LENGTH, EMBED, WIDTH, COUNT, TOP_K = 8, 32, 64, 32, 8, 2
FACTOR = 1.25
"""The capacity factor."""
FLOAT_BYTES = 4
GOAL = "<= 1.02"
CASES: tuple[tuple[ExchangeName, float | None], ...] = (
    ("padded", FACTOR),
    ("padded", None),
    ("ring", None),
)


def bench(degrees: tuple[int, ...] = DEGREES) -> Report:
    """Compare the bytes that a device sends for a layer's forward and backward pass."""
    figures = []
    for devices, (exchange, factor) in product(degrees, CASES):
        capacity = ExpertsConfig(count=COUNT, capacity_factor=factor).capacity(LENGTH)
        ours, formula = sent(devices, exchange, capacity), bytes_of(devices, exchange, capacity)
        kept = "dropless" if factor is None else f"capacity factor {factor:g}"
        note = (
            f"float32, forward and backward; {ROWS} sequences of {LENGTH} tokens, {COUNT} experts, "
            f"{TOP_K} of each token, {kept}"
        )
        name = f"{exchange}, {kept}, expert {devices}"
        figures.append(Figure(name, ours, formula, GOAL, "B", note))
    return Report("experts", figures)


def sent(devices: int, exchange: ExchangeName, capacity: int | None) -> float:
    """Return the bytes that a device sends, by the ledger of the compiled gradients."""
    mesh = build_mesh(MeshConfig(expert=devices), jax.devices()[:devices])
    layout = make_layout(ShardingConfig(experts=exchange), mesh)
    tokens = layout.sharding(("batch", None, None))

    def struct(*shape: int, dtype: type = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=tokens)

    kernels = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding(dims))
        for shape, dims in (((COUNT, EMBED, WIDTH), INTO), ((COUNT, WIDTH, EMBED), OUT))
    ]
    given = (
        struct(ROWS, LENGTH, EMBED),
        struct(ROWS, LENGTH, TOP_K, dtype=jnp.int32),
        struct(ROWS, LENGTH, TOP_K),
        *kernels,
    )
    compiled = gradient(layout, capacity).lower(*given).compile()
    return ledger(compiled, mesh).sent_bytes("expert")


def gradient(hint: Hint, capacity: int | None) -> jax.stages.Wrapped:
    """Return a jitted gradient of the results' sum of squares by tokens, weights and kernels."""

    def total(
        x_BLD: jax.Array, weights_BLk: jax.Array, up: jax.Array, down: jax.Array, ids: jax.Array
    ) -> jax.Array:
        compute = Experts("gelu", Loop())
        pairs = (INTO, up), (OUT, down)
        y_BLD = hint.over_experts(compute, x_BLD, ids, weights_BLk, *pairs, capacity=capacity)
        return jnp.square(y_BLD)[..., 0].sum(1).mean()

    def of(x: jax.Array, ids: jax.Array, weights: jax.Array, *kernels: jax.Array) -> tuple:
        return jax.grad(total, (0, 1, 2, 3))(x, weights, *kernels, ids)

    return jax.jit(of)


def bytes_of(devices: int, exchange: ExchangeName, capacity: int | None) -> float:
    """Return the formula's bytes: activations and weights of tokens both ways, and their experts.

    A token travels to its experts and back in both passes, D numbers each time. Its k weights
    travel once in each pass, and the k numbers of its experts in the forward pass.
    """
    tokens, rows = ROWS * LENGTH // devices, ROWS // devices
    most = most_sent(tokens, rows, capacity, COUNT // devices)
    one_way = EXCHANGES[exchange].tokens_sent(tokens, most, devices, TOP_K) / 2
    return one_way * FLOAT_BYTES * (4 * EMBED + 3 * TOP_K)
