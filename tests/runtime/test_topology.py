from __future__ import annotations

import importlib.util
import os

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.errors import MeshError
from jaxdist.hlo.ledger import compile_with_text, ledger_of_text
from jaxdist.runtime.topology import (
    FAMILIES,
    Topology,
    TpuFamily,
    parse_topology,
    topology_devices,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v5e:2x4", Topology("v5e", (2, 4))),
        ("v5p:4x4x4", Topology("v5p", (4, 4, 4))),
        ("v5e:16x16", Topology("v5e", (16, 16))),
        ("tpu7x:2x2x1", Topology("tpu7x", (2, 2, 1))),
        ("v5p:16x16x24", Topology("v5p", (16, 16, 24))),
        ("v5p:4x4x20", Topology("v5p", (4, 4, 20))),
        ("v4:12x12x24", Topology("v4", (12, 12, 24))),
        ("v6e:1x1", Topology("v6e", (1, 1))),
        ("v5e:16x8", Topology("v5e", (16, 8))),
    ],
)
def test_parse(text: str, expected: Topology) -> None:
    assert parse_topology(text) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("v5e", ["topology 'v5e' cannot be read", "family:AxB", "v5e:2x4"]),
        ("v5e:2x", ["'v5e:2x' cannot be read", "v5p:4x4x4"]),
        ("v5e:2x-4", ["'v5e:2x-4' cannot be read"]),
        ("v5e:2x4*2", ["'v5e:2x4*2' cannot be read"]),
        ("v5f:2x4", ["no TPU family 'v5f'", "did you mean", "tpu7x"]),
        (
            "v5e:2x2x2",
            ["'v5e:2x2x2' has 3 dims, but topologies of v5e have 2: write it as v5e:2x4"],
        ),
        ("v5p:4x4", ["'v5p:4x4' has 2 dims, but topologies of v5p have 3: write it as v5p:4x4x4"]),
        ("v5e:0x4", ["'v5e:0x4' has 0 chips: a slice of v5e has 1 to 256"]),
        ("v5e:32x32", ["'v5e:32x32' has 1,024 chips", "1 to 256"]),
        ("v5p:16x16x28", ["has 7,168 chips: a slice of v5p has 1 to 6,144"]),
        ("v5p:8x8x9", ["'v5p:8x8x9' is not a slice of v5p", "multiples of 4", "mean v5p:8x8x8?"]),
        ("tpu7x:2x4x8", ["'tpu7x:2x4x8' is not a slice of tpu7x", "mean tpu7x:4x4x8?"]),
        ("v4:3x3x3", ["'v4:3x3x3' is not a slice of v4", "mean v4:4x4x4?"]),
        ("v5e:3x3", ["'v5e:3x3' is not a slice of v5e", "powers of two", "mean v5e:4x4?"]),
        ("v6e:2x16", ["'v6e:2x16' is not a slice of v6e", "mean v6e:8x16?"]),
    ],
)
def test_what_is_no_topology(text: str, parts: list[str]) -> None:
    with pytest.raises(MeshError) as raised:
        parse_topology(text)
    for part in parts:
        assert part in str(raised.value)


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeshError, match=r"'v5e:2x4' .* pip install 'jaxdist\[tpu\]'"):
        topology_devices("v5e:2x4")


@pytest.mark.needs_libtpu
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    devices = topology_devices(FAMILIES[name].example)
    assert {device.platform for device in devices} == {"tpu"}
    chips = len({tuple(device.coords) for device in devices})
    assert chips * FAMILIES[name].devices == len(devices)


@pytest.mark.needs_libtpu
def test_a_family_that_libtpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "v9", TpuFamily(2, 16, "v9:2x2"))
    with pytest.raises(MeshError, match=r"topology 'v9:2x2' is unknown to libtpu: "):
        topology_devices("v9:2x2")


@pytest.mark.needs_libtpu
def test_what_the_user_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "elsewhere")
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    topology_devices("v5e:2x2")
    assert (os.environ["TPU_WORKER_HOSTNAMES"], os.environ["TPU_WORKER_ID"]) == ("elsewhere", "0")


@pytest.mark.needs_libtpu
def test_rings_gather_along_all_dims_at_once() -> None:
    """On lines libtpu gathers by an all-reduce of zeros around a shard, which sends twice that."""
    chips = topology_devices("v5p:4x4x4")
    mesh = jax.make_mesh((len(chips),), ("data",), (AxisType.Auto,), devices=chips)
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("data", None))
    lowered = jax.jit(lambda x: x, in_shardings=split, out_shardings=whole).lower(
        jax.ShapeDtypeStruct((8192, 1024), "bfloat16")
    )
    _, text = compile_with_text(lowered)
    (found,) = ledger_of_text(text, {"data": len(chips)}).collectives
    assert found.kind == "all-gather"


@pytest.mark.needs_libtpu
def test_compiles_beside_the_cpu_backend() -> None:
    device = topology_devices("v5e:2x2")[0]
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    assert "HloModule" in str(jax.jit(lambda x: x + 1).lower(x).compile().as_text())
    assert jax.devices()[0].platform == "cpu"
