"""Groups of devices in every spelling, and the mesh axes that they are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.hlo import LedgerError, ledger_of_text
from jaxdist.hlo.groups import MeshLayout, evaluate_iota, group_positions, written_groups
from jaxdist.hlo.parse import parse

NAMES = ("data", "stage", "tensor", "expert")
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def layout(shape, order=None):
    axes = dict(zip(NAMES, shape, strict=False))
    return MeshLayout(axes, tuple(range(math.prod(shape))) if order is None else order)


def groups_over(shape, dims, devices):
    """Groups of positions, by numpy alone."""
    array = np.array(devices).reshape(shape)
    rest = [dim for dim in range(len(shape)) if dim not in dims]
    width = math.prod(shape[dim] for dim in dims)
    return tuple(map(tuple, array.transpose(rest + list(dims)).reshape(-1, width).tolist()))


@given(sizes, st.data())
def test_groups_over_axes_are_named(shape, data):
    dims = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(0, len(shape)))]
    order = data.draw(st.permutations(range(math.prod(shape))))
    position_of = np.argsort(order)
    groups = groups_over(shape, dims, position_of)
    expected = tuple(NAMES[dim] for dim in sorted(dims) if shape[dim] > 1)
    assert layout(shape, tuple(order)).group_axes(groups) == expected


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1, 2), (3, 4, 5, 6, 7)),
        ((0, 1, 2, 3),),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 5), (1, 4), (2, 7), (3, 6)),
        ((0, 1, 4, 5), (2, 3, 6, 7)),
    ],
    ids=["uneven", "not all", "half an axis", "diagonal", "a half of each"],
)
def test_groups_that_are_no_axes(groups):
    assert layout((2, 4)).group_axes(groups) is None


def test_axes_that_a_permute_moves_along():
    grid = layout((2, 4))
    assert grid.pair_axes(((0, 1), (1, 0))) == ("stage",)
    assert grid.pair_axes(((0, 4), (4, 0), (1, 1))) == ("data",)
    assert grid.pair_axes(((0, 5),)) == ("data", "stage")
    assert grid.pair_axes(((0, 0), (1, 1))) == grid.pair_axes(()) == ()


@given(sizes, st.data())
def test_iotas_are_transposed_ranges(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    count = math.prod(shape)
    words = [",".join(map(str, numbers)) for numbers in ([count], shape, order)]
    expected = np.arange(count).reshape(shape).transpose(order).ravel()
    assert (evaluate_iota(f"[{words[0]}]<=[{words[1]}]T({words[2]})") == expected).all()


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups={}, dimensions={0}", ((0, 1, 2, 3),)),
        ("dimensions={0}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("channel_id=1, source_target_pairs={{0,1},{1,0}}, metadata={}", ((0, 1), (1, 0))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", ((0, 3), (1, 2))),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_spellings(text, groups):
    assert written_groups(", " + text, 4) == groups


def test_an_unknown_spelling_is_refused():
    with pytest.raises(
        LedgerError, match=r"replica_groups=ring\(8\).*groups have an unknown syntax"
    ):
        written_groups(", replica_groups=ring(8), dimensions={0}", 8)
    with pytest.raises(LedgerError, match=r"\[2,4\]<=8"):
        evaluate_iota("[2,4]<=8")


REPLICATED = """HloModule replicated, replica_count=2, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} {operation}
}}
"""


@pytest.mark.parametrize(
    ("operation", "groups"),
    [
        ("all-reduce(%x), replica_groups={}, to_apply=%add", ((0, 2), (1, 3))),
        ("all-reduce(%x), replica_groups={{0},{1}}, channel_id=1, to_apply=%add", ((0, 1), (2, 3))),
        ("all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add", ((0, 1, 2, 3),)),
        ("all-to-all(%x), channel_id=1, replica_groups={{0,1}}", ((0, 1), (2, 3))),
        (
            "all-reduce(%x), channel_id=1, replica_groups={{0,3},{1,2}}, "
            "use_global_device_ids=true, to_apply=%add",
            ((0, 3), (1, 2)),
        ),
    ],
)
def test_replicas_and_partitions(operation, groups):
    module = parse(REPLICATED.format(operation=operation))
    assert group_positions(module.entry.root, module.entry.root.opcode, module) == groups


def test_a_mesh_of_another_size_is_refused():
    text = REPLICATED.format(operation="negate(%x)")
    with pytest.raises(LedgerError, match=r"4 devices, but the mesh \{data: 2, tensor: 4\} has 8"):
        ledger_of_text(text, {"data": 2, "tensor": 4})


def test_all_pairs_of_axes():
    shape = (2, 3, 2, 2)
    for count in range(5):
        for dims in itertools.combinations(range(4), count):
            groups = groups_over(shape, dims, range(24))
            assert layout(shape).group_axes(groups) == tuple(NAMES[dim] for dim in dims)
