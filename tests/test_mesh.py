import itertools
import math
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from pydantic import ValidationError

from jaxdist.errors import MeshError
from jaxdist.mesh import MeshConfig, axis_names, build_mesh, mesh_axis_size, propose, resolve_sizes


def mesh_config(**sizes):
    return MeshConfig.model_validate(sizes)


def test_order_and_sizes_are_kept():
    mesh = build_mesh(mesh_config(tensor=2, data=4))
    assert mesh.axis_names == ("tensor", "data")
    assert dict(mesh.shape) == {"tensor": 2, "data": 4}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_the_last_axis_connects_neighbours():
    mesh = build_mesh(mesh_config(data=4, tensor=2))
    assert [d.id for d in mesh.devices[0]] == [0, 1]


def test_one_size_is_whatever_is_left():
    assert resolve_sizes(mesh_config(data=-1, tensor=2), 8) == {"data": 4, "tensor": 2}
    assert resolve_sizes(MeshConfig(), 8) == {"data": 8}


def test_an_axis_over_two_networks():
    mesh = build_mesh(mesh_config(data={"dcn": 2, "ici": 2}, tensor=2))
    assert mesh.axis_names == ("data_dcn", "data_ici", "tensor")
    assert axis_names(mesh, "data") == ("data_dcn", "data_ici")
    assert mesh_axis_size(mesh, "data") == 4
    assert axis_names(mesh, "stage") == ()
    assert mesh_axis_size(mesh, "stage") == 1
    fast = [{d.id for d in mesh.devices[i].ravel()} for i in range(2)]
    assert fast == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_a_split_inner_axis_keeps_the_slow_network_outermost_in_devices():
    mesh = build_mesh(mesh_config(tensor=2, data={"dcn": 2, "ici": 2}))
    assert {d.id for d in mesh.devices[:, 0].ravel()} == {0, 1, 2, 3}


def test_a_mesh_that_does_not_fit_proposes_meshes_that_do():
    with pytest.raises(MeshError) as caught:
        build_mesh(mesh_config(data=3, tensor=2))
    message = str(caught.value)
    assert "{data: 3, tensor: 2} needs 6 devices, but there are 8" in message
    assert "{data: 4, tensor: 2}" in message
    assert "--devices 6" in message


def test_a_remainder_that_does_not_divide():
    with pytest.raises(MeshError, match=r"needs a multiple of 3 devices, but there are 8"):
        build_mesh(mesh_config(data=-1, tensor=3))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": -1, "tensor": -1}, "only one axis may be -1"),
        ({"data": 0}, "axis data has size 0"),
        ({"data": -2}, "axis data has size -2"),
        ({"data": {"dcn": 0, "ici": 2}}, "greater than or equal to 1"),
        ({"batch": 2}, "Extra inputs"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValidationError, match=message):
        mesh_config(**sizes)


def test_serialised_in_order():
    sizes = {"tensor": 2, "data": {"dcn": 2, "ici": 2}, "fake_devices": 8}
    config = mesh_config(**sizes)
    assert list(config.model_dump()) == list(sizes)
    assert mesh_config(**config.model_dump()).sizes() == config.sizes()


@given(st.integers(1, 64), st.integers(1, 4))
def test_proposals_use_exactly_the_devices(count, axes):
    sizes = dict(zip(["data", "stage", "tensor", "context"][:axes], itertools.repeat(2)))
    for text in propose(sizes, count):
        found = [int(part.split(":")[1]) for part in text.strip("{}").split(",")]
        assert math.prod(found) == count


def test_proposals_keep_the_size_across_the_slow_network():
    with pytest.raises(MeshError) as caught:
        resolve_sizes(mesh_config(data={"dcn": 2, "ici": 4}), 16)
    assert "meshes that fit: {data: {dcn: 2, ici: 8}}; or run" in str(caught.value)
    sizes = mesh_config(data={"dcn": 2, "ici": 4}, tensor=2).sizes()
    assert propose(sizes, 8)[0] == "{data: {dcn: 2, ici: 2}, tensor: 2}"
    # An odd number of devices has no two equal halves.
    assert propose(sizes, 3) == ["{data: 3, tensor: 1}", "{data: 1, tensor: 3}"]


def test_fewer_devices_can_be_given():
    assert build_mesh(mesh_config(data=2), jax.devices()[:2]).size == 2


def torus(*shape, cores=1):
    """What jax takes for chips of v5p, or of tpu7x where a chip is two devices."""
    spots = itertools.product(*map(range, (*reversed(shape), cores)))
    return [
        SimpleNamespace(
            id=number, process_index=0, platform="tpu", slice_index=0, core_on_chip=core,
            device_kind="TPU7x" if cores > 1 else "TPU v5", coords=tuple(reversed(chip)),
        )
        for number, (*chip, core) in enumerate(spots)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "sizes", "parts"),
    [
        (torus(4, 4, 4), {"data": 32, "tensor": 2}, ["of 4x4x4,", "{data: 16, tensor: 4}"]),
        (torus(4, 4, 4), {"stage": 8, "data": 8}, ["{stage: 4, data: 16} or {stage: 16, data: 4}"]),
        (torus(8, 8, 8, cores=2), {"data": 256, "tensor": 4}, ["8x8x8x2,", "tensor: 2}"]),
    ],
)  # fmt: skip
def test_an_axis_on_part_of_a_dim_is_one_message(devices, sizes, parts):
    with pytest.raises(MeshError) as raised:
        build_mesh(mesh_config(**sizes), devices)
    for part in ("does not map onto whole dims", *parts):
        assert part in str(raised.value)
