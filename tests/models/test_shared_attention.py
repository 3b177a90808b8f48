"""Attention over a sequence that devices share equals attention on one device, with gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxdist.cost.context import ContextNeeds, SequenceSplit, best_split, positions_of, splits_of
from jaxdist.models.attention.contract import Qkv
from jaxdist.models.attention.masks import Near, NearMask
from jaxdist.models.attention.plain import Plain
from jaxdist.models.attention.shared import attend_shared
from jaxdist.models.attention.splash import Splash
from jaxdist.models.attention.visits import Pieces
from jaxdist.models.hints import no_hint

AXES = ("context",)


def largest_difference(
    size, swapped, rotates, order, length, *, window=None, causal=True, documents=True, **more
):
    """The largest difference of results and gradients between `size` devices and one."""
    split = SequenceSplit(AXES, size, swapped, rotates, order)
    mesh = jax.make_mesh((size,), AXES, axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    keys = jax.random.split(jax.random.key(0), 5)
    heads = (4, 2, 2) if swapped <= 2 else (8, 4, 4)
    q, k, v = (
        jax.random.normal(key, (2, length, n, 4)) for key, n in zip(keys, heads, strict=False)
    )
    cotangent = jax.random.normal(keys[3], q.shape)
    segments = jnp.sort(jax.random.randint(keys[4], (2, length), 0, 4), 1) if documents else None
    given = {"window": window, "causal": causal}
    plain = partial(Plain(), hint=no_hint, **given)
    order_L = positions_of(order, length, split.groups)
    spec = PartitionSpec(None, "context")
    shared = jax.shard_map(
        partial(attend_shared, split, plain, **{"most": 4, **more}, **given),
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip

    def on_many(q, k, v):
        arrays = [q, k, v] if segments is None else [q, k, v, segments]
        return shared(*(x[:, order_L] for x in arrays))[:, np.argsort(order_L)]

    def with_grads(attend):
        def found(q, k, v):
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(cotangent)

        return jax.jit(found)(q, k, v)

    pairs = zip(with_grads(lambda *x: plain(Qkv(*x, segments))), with_grads(on_many), strict=True)
    return max(float(jnp.abs(one - many).max()) for one, many in pairs)


SPLASH = {"pieces": Splash(interpret=True).pieces}
FULL = [
    (4, 2, False, "zigzag", 32, {}),
    (2, 1, False, "striped", 256, SPLASH),
    (4, 2, False, "contiguous", 256, {**SPLASH, "window": 100, "documents": False}),
    (2, 1, False, "contiguous", 256, {**SPLASH, "causal": False}),
    (4, 1, True, "contiguous", 32, {"causal": False, "window": 3}),
    (4, 1, False, "zigzag", 32, {"documents": False}),
    (8, 2, True, "striped", 64, {}),
    (2, 1, True, "contiguous", 2 * 67, {"most": 64}),  # a prime number, in padded blocks
]
"""With the quick rows: each order on more than two devices, swapped heads, no causality."""
SLOW = [
    (4, 1, False, "striped", 40, {}),
    (4, 1, False, "contiguous", 32, {"causal": False}),
    (4, 1, True, "contiguous", 32, {"window": 9, "documents": False}),
    (4, 4, False, "contiguous", 32, {}),
    (8, 1, True, "zigzag", 64, {}),
    (8, 4, True, "contiguous", 64, {}),
    (4, 2, True, "zigzag", 32, {}),
]


@pytest.mark.parametrize(
    ("size", "swapped", "rotates", "order", "length", "more"),
    [
        (2, 1, True, "zigzag", 16, {}),
        (3, 1, True, "contiguous", 24, {"window": 5}),
        (2, 1, True, "striped", 14, {}),
        (2, 2, False, "contiguous", 16, {}),
        (2, 1, False, "zigzag", 512, SPLASH),
        *(pytest.param(*one, marks=pytest.mark.full) for one in FULL),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
@pytest.mark.every(3)
def test_shared_attention_equals_one_device(size, swapped, rotates, order, length, more):
    assert largest_difference(size, swapped, rotates, order, length, **more) < 1e-5


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("rule", [Near(None, 0), Near(5, 0), Near(5, 5)])
def test_a_block_of_the_mask_is_summed_up_correctly(order, rule):
    """One element stands for a block whose elements are equal."""
    mask = NearMask(rule, positions_of(order, 16, 2))
    whole = rule(mask.q_sequence[:, None], np.arange(16)[None])
    for i, j in np.ndindex(4, 4):
        block = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
        assert (mask[block] == whole[block]).all()
    assert (
        mask == NearMask(rule, positions_of(order, 16, 2)) != NearMask(rule, mask.q_sequence[::-1])
    )


def test_a_mask_of_long_sequences_computes_only_blocks_that_are_partly_visible():
    mask, size = NearMask(Near(None, 0), positions_of("zigzag", 2**17, 8)), 1024
    rows = range(0, 2**17, size)
    shapes = [mask[slice(i, i + size), slice(j, j + size)].shape for i in rows for j in rows]
    assert shapes.count((size, size)) == 2**17 // size
    assert shapes.count((1, 1)) == len(shapes) - 2**17 // size


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("groups", [2, 4])
def test_each_pair_that_is_seen_is_visited_once(order, groups):
    """The visits of all groups, taken together, are the lower triangle of positions."""
    length, size = 8 * groups, 2
    place = positions_of(order, length, groups).reshape(groups, -1)
    pieces = Pieces.of(order, groups, length // groups, size, None, causal=True)
    counts = np.zeros((length, length), int)
    for group in range(groups):
        for t in pieces.hops():
            keys = place[(group - t) % groups]
            for visit in pieces.visits(t, jnp.int32(group)):
                if visit.live is not None and not bool(visit.live):
                    continue
                for i, j, distance in zip(*(np.asarray(x) for x in visit[:3]), strict=True):
                    ours = place[group][i * size : (i + 1) * size]
                    theirs = keys[j * size : (j + 1) * size]
                    assert ours[0] - theirs[0] == distance
                    counts[np.ix_(ours, theirs)] += 1
    below = np.tril(np.ones((length, length), bool))
    assert (counts[below] == 1).all()
    # Beside what is seen, only blocks on the diagonal are computed.
    assert counts[~below].sum() <= groups * groups * length * size


def test_work_is_skipped_where_the_window_ends():
    pieces = Pieces.of("contiguous", 4, 8, 2, 3, causal=True)
    assert pieces.hops() == [0, 1]
    both_ways = Pieces.of("contiguous", 4, 8, 2, 3, causal=False)
    assert both_ways.hops() == [0, 1, 3]


def needs(**changes):
    return ContextNeeds(**{"heads": 32, "kv_heads": 8, "head_dim": 128, "length": 4096, **changes})


@pytest.mark.parametrize(
    ("size", "changes", "way"),
    [
        (2, {"kv_heads": 2, "heads": 32}, "ring"),
        (8, {}, "ulysses"),
        (8, {"kv_heads": 32}, "ulysses"),
        (4, {"kv_heads": 1}, "ring"),
        (8, {"window": 16}, "ring"),
        (16, {}, "ring_ulysses"),
        (16, {"gathers": True}, "gather_ulysses"),
        (4, {"kv_heads": 1, "gathers": True, "fused": True}, "gather"),
        (2, {"fused": True}, "ulysses"),
    ],
)
def test_auto_takes_the_fewest_bytes(size, changes, way):
    splits = splits_of("auto", AXES, size)
    found, why = best_split(splits, needs(**changes)) or pytest.fail("none fits")
    assert found.way == way
    assert f"{way} " in why


def test_ulysses_sends_less_than_a_ring_beyond_one_plus_the_ratio_of_heads():
    """The forward pass, where a device has 32 heads and 8 kv_heads: from 6 devices on."""
    for size in (2, 4, 8):
        ring, ulysses = (splits_of(way, AXES, size)[0] for way in ("ring", "ulysses"))
        ours = needs()
        less = ours.bytes_received(ulysses)[0] < ours.bytes_received(ring)[0]
        assert less == (size > 1 + 32 / 8)
