from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.data.placement import BatchPlacement, cut_block, rows_needed
from jaxdist.errors import ShardingError


def _mesh(**axes: int) -> Mesh:
    shape = tuple(axes.values())
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), tuple(axes))


def _halves(sharding: NamedSharding, shape: tuple[int, ...]) -> list[tuple[list, np.ndarray]]:
    """The blocks and rows of two processes that own half of the devices each."""
    indices = list(sharding.devices_indices_map(shape).values())
    owned = indices[: len(indices) // 2], indices[len(indices) // 2 :]
    return [(mine, rows_needed(shape[0], mine)) for mine in owned]


@pytest.mark.parametrize(
    ("axes", "spec", "expected"),
    [
        ({"data": 8}, ("data",), [range(8), range(8, 16)]),
        ({"data": 2, "tensor": 4}, ("data", "tensor"), [range(8), range(8, 16)]),
        ({"tensor": 8}, (None, "tensor"), [range(16), range(16)]),
    ],
)
def test_each_of_two_processes_reads_what_its_devices_need(
    axes: dict[str, int], spec: tuple, expected: list
) -> None:
    values = np.arange(16 * 8).reshape(16, 8)
    sharding = NamedSharding(_mesh(**axes), PartitionSpec(*spec))
    for (indices, rows), wanted in zip(_halves(sharding, values.shape), expected, strict=True):
        assert rows.tolist() == list(wanted)
        for index in indices:
            np.testing.assert_array_equal(cut_block(values[rows], rows, 16, index), values[index])


def test_one_name_may_need_more_rows_than_another() -> None:
    mesh = _mesh(data=8)
    layout = {
        "a": NamedSharding(mesh, PartitionSpec("data")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }
    placement = BatchPlacement({"a": (2,), "b": ()}, 8, lambda name, shape: layout[name])
    local = {"a": np.arange(16).reshape(8, 2), "b": np.arange(8)}
    assert placement.rows.tolist() == list(range(8))
    for name, array in placement.place(local).items():
        assert array.sharding == layout[name]
        np.testing.assert_array_equal(np.asarray(array), local[name])


def test_a_batch_that_does_not_divide() -> None:
    sharding = NamedSharding(_mesh(data=8), PartitionSpec("data"))
    with pytest.raises(
        ShardingError, match=r"'image' \(30, 4\) of the .* cannot be split.*8 times.*30"
    ):
        BatchPlacement({"image": (4,)}, 30, lambda name, shape: sharding)
