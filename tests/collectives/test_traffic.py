"""Steps and bytes of the traced program equal the formula, for any number of devices."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from sharded import FLAT, LEVELS, label

from jaxdist import collectives
from jaxdist.collectives import CollectiveError, Hierarchical, Ring, Tree, Xla
from jaxdist.collectives.contract import KINDS, NOTHING

SIZES = (2, 3, 4, 5, 6, 7, 8, 16, 64)
# In quick tests the least, an odd and an even number of devices; 7 leaves most over a power of two.
MARKS = dict.fromkeys((7, 16), pytest.mark.full) | dict.fromkeys((3, 4, 6, 64), pytest.mark.slow)
TRACED = [pytest.param(size, marks=MARKS.get(size, ())) for size in SIZES]
CHUNKS = 6


@dataclass
class Sends:
    """What a traced program sends."""

    by_device: Counter = field(default_factory=Counter)
    messages: int = 0
    longest: tuple[int, int] = (0, 0)

    def follow(self, jaxpr, depths):
        """Depth of the results, in messages and bytes along the longest chain."""
        found = dict(zip(jaxpr.invars, depths, strict=True))
        for eqn in jaxpr.eqns:
            depths_in = [depth(found, v) for v in eqn.invars]
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if inner is not None:
                depths_out = self.follow(getattr(inner, "jaxpr", inner), depths_in)
            else:
                deepest = max(depths_in, default=(0, 0))
                if eqn.primitive.name == "ppermute":
                    deepest = self.record(eqn, deepest)
                depths_out = [deepest] * len(eqn.outvars)
            found.update(zip(eqn.outvars, depths_out, strict=True))
        return [depth(found, v) for v in jaxpr.outvars]

    def record(self, eqn, deepest):
        sent = eqn.invars[0].aval.size * eqn.invars[0].aval.dtype.itemsize
        self.messages += 1
        self.by_device.update({sender: sent for sender, _ in eqn.params["perm"]})
        deepest = (deepest[0] + 1, deepest[1] + sent)
        self.longest = max(self.longest, deepest)
        return deepest


def depth(found, variable):
    literal = hasattr(variable, "val")
    return (0, 0) if literal else found.get(variable, (0, 0))


def traced(kind, algorithm, sizes, elements):
    """The sends of one call on `sizes`; `elements` of float32 is the whole tensor."""
    axes = tuple(f"axis{i}" for i in range(len(sizes)))
    mesh = AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))
    axis = axes if len(axes) > 1 else axes[0]
    spec = PartitionSpec(axes)
    local = elements // math.prod(sizes) if kind == "all_gather" else elements
    arguments = {"root": 1} if kind in ("broadcast", "reduce") else {}

    def call(x):
        return getattr(collectives, kind)(x, axis, algorithm=algorithm, **arguments)

    whole = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shape = jax.ShapeDtypeStruct((local * math.prod(sizes),), jnp.float32)
    jaxpr = jax.make_jaxpr(whole)(shape)
    sends = Sends()
    sends.follow(jaxpr.jaxpr, [(0, 0)])
    return sends


def check(kind, algorithm, sizes):
    elements = 2 * CHUNKS * math.prod(sizes)
    sends = traced(kind, algorithm, sizes, elements)
    size = sizes if len(sizes) > 1 else sizes[0]
    formula = algorithm.traffic(kind, 4 * elements, size)
    assert sends.longest[0] == formula.steps, kind
    assert sends.messages == formula.messages, kind
    assert max(sends.by_device.values()) == pytest.approx(formula.sent_bytes, rel=1e-12), kind
    return sends, formula


@pytest.mark.parametrize("size", TRACED)
@pytest.mark.parametrize("algorithm", FLAT[1:], ids=label)
def test_program_equals_formula(algorithm, size):
    for kind in KINDS:
        sends, formula = check(kind, algorithm, (size,))
        assert sends.longest[1] <= formula.serial_bytes * (1 + 1e-12), kind
        if formula.steps == formula.messages:
            assert sends.longest[1] == pytest.approx(formula.serial_bytes, rel=1e-12), kind


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 4), marks=pytest.mark.full),
        (3, 2),
        pytest.param((8, 8), marks=pytest.mark.slow),
        (2, 3, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", LEVELS, ids=label)
def test_levels_equal_the_sum_of_their_formulas(algorithm, sizes):
    if Xla() in (algorithm.inside, algorithm.across):
        return
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        check(kind, algorithm, sizes)


@pytest.mark.parametrize("size", SIZES)
def test_formulas_as_they_are_printed(size):
    depth = math.ceil(math.log2(size))
    least = 2 * (size - 1) / size * 960
    ring = Ring().traffic("all_reduce", 960, size)
    assert (ring.steps, ring.sent_bytes) == (2 * (size - 1), pytest.approx(least))
    two = Ring(directions=2).traffic("all_reduce", 960, size)
    assert (two.steps, two.sent_bytes) == (2 * math.ceil((size - 1) / 2), pytest.approx(least))
    halving = FLAT[-1].traffic("all_reduce", 960, size)
    steps = 1 if size == 2 else 2 * depth - 2 * (size in (3, 5, 6))
    assert (halving.steps, halving.sent_bytes) == (steps, pytest.approx(least))
    tree, double = (a.traffic("all_reduce", 960, size) for a in FLAT[5:7])
    assert (tree.steps, tree.sent_bytes) == (2 * depth, depth * 960)
    assert double.steps == 2 * depth
    assert double.serial_bytes == tree.serial_bytes / 2
    assert double.sent_bytes <= (depth + 2) / 2 * 960
    assert Xla().traffic("all_reduce", 960, size).sent_bytes == pytest.approx(least)


def test_the_slow_network_carries_the_part_of_one_device():
    phases = Hierarchical().phases("all_reduce", 1024, (2, 8))
    assert [level for level, _ in phases] == ["inside", "across", "inside"]
    assert [traffic.sent_bytes for _, traffic in phases] == [896, 128, 896]


def test_one_device_sends_nothing():
    for algorithm in FLAT:
        assert algorithm.traffic("all_reduce", 1024, 1) == NOTHING
        assert algorithm.traffic("all_reduce", 1024, (1, 1)) == NOTHING
    assert traced("all_reduce", Ring(), (1,), 12).messages == 0


def test_padding_is_less_than_a_block():
    sends = traced("all_reduce", Ring(), (7,), 50)
    assert sends.by_device[0] == 2 * 6 * math.ceil(50 / 7) * 4
    assert traced("all_reduce", Tree(), (7,), 50).longest == (6, 6 * 50 * 4)


def test_hierarchical_needs_the_size_of_each_axis():
    with pytest.raises(CollectiveError, match=r"slowest first, not 16: .*\(2, 4\)"):
        Hierarchical().traffic("all_reduce", 1024, 16)
