"""What is planned for: topologies as written, and meshes on whole dims of the torus."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.errors import MeshError
from jaxdist.planner.target import meshes, parse_target


def sizes(text: str) -> set[tuple[int, int, int]]:
    return {one.sizes for one in meshes(parse_target(text))}


def test_meshes_have_whole_dims_of_the_torus() -> None:
    assert sizes("v5e:16x16") == {
        (1, 256, 1), (1, 1, 256), (256, 1, 1), (1, 16, 16), (16, 1, 16), (16, 16, 1),
    }  # fmt: skip
    assert (8, 8, 8) in sizes("v5p:8x8x8")
    assert (1, 128, 4) not in sizes("v5p:8x8x8")


def test_a_host_of_gpus_is_split_by_any_divisor() -> None:
    assert sizes("h100:4x8") == {(1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8)}
    assert parse_target("h100:4x8", 2).chips == 64


SHAPES = [*itertools.product((1, 2, 4), repeat=3), *itertools.product((4, 8, 16), repeat=3)]


@given(st.sampled_from(SHAPES))
def test_every_mesh_has_all_chips_on_dims_of_its_own(shape: tuple[int, int, int]) -> None:
    target = parse_target("v5p:" + "x".join(map(str, shape)))
    for one in meshes(target):
        assert math.prod(one.sizes) == target.chips
        dims = [dim for own in one.dims for dim in own]
        assert len(dims) == len(set(dims))
        for size, own in zip(one.sizes, one.dims, strict=True):
            assert size == math.prod(shape[dim] for dim in own)


def test_rings_have_two_links_a_dim_and_lines_one() -> None:
    ring, line = parse_target("v5p:4x4x4"), parse_target("v5p:2x2x4")
    assert ring.ports((0, 1, 2)) == 6
    assert line.ports((0, 1, 2)) == 3
    assert (ring.hops((0,)), line.hops((2,))) == (2, 3)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("v5q:4x4", "v5p"),
        ("v5p", "cannot be read"),
        ("v5p:4x4", "has 2 dims, but topologies of v5p have 3"),
        ("v5e:64x64", "4,096 chips"),
        ("v3:4x4", "speed and memory of v3 are not known"),
        ("v5p:8x8x9", "is not a slice of v5p"),
        ("h100:0x8", "has no GPU"),
        ("cpu:2x2", "h100:16x8"),
        ("", "h100:16x8"),
    ],
)
def test_what_is_no_topology_is_refused(text: str, part: str) -> None:
    with pytest.raises(MeshError, match=part):
        parse_target(text)


def test_two_devices_of_a_chip_are_a_dim_and_share_its_links() -> None:
    target = parse_target("tpu7x:4x4x4", 2)
    assert (target.chips, target.devices) == (128, 256)
    assert {(1, 128, 1), (1, 64, 2), (4, 16, 2), (1, 16, 8)} <= sizes("tpu7x:4x4x4")
    both, one, inside = (0, 1, 2, 3), (0, 1, 2), (3,)
    rate = target.device.fast.bytes_per_second
    assert [target.link_rate(dims) for dims in (both, one, inside)] == [rate, rate / 2, 6 * rate]
    assert [target.ports(dims) for dims in (both, one, inside)] == [6, 6, 1]
    assert [target.hops(dims) for dims in (both, one, inside)] == [6, 6, 0]
