"""Snapshots in memory: the same bits on any mesh, or none at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint.snapshots import Snapshots, load_snapshot, whole_steps
from jaxdist.errors import CheckpointError

SPECS = {
    "w": P("data", "tensor"),
    "b": P(None, "tensor"),
    "m": P(("data", "tensor")),
    "step": P(),
    "none": P("data"),
}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((8, 16)).astype(np.float32),
        "b": rng.standard_normal((3, 8)).astype(jnp.bfloat16),
        "m": rng.integers(0, 100, 32, np.int32),
        "step": np.int32(7),
        "none": np.zeros((0, 4), np.float32),
    }


def shardings(data: int, tensor: int) -> dict[str, NamedSharding]:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    mesh = Mesh(devices, ("data", "tensor"))
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def on(data: int, tensor: int) -> dict[str, jax.Array]:
    return jax.device_put(arrays(), shardings(data, tensor))


def shapes(data: int, tensor: int) -> dict[str, jax.ShapeDtypeStruct]:
    pairs = zip(arrays().items(), shardings(data, tensor).values(), strict=True)
    return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for (n, x), s in pairs}


def taken(folder: Path, *steps: int) -> None:
    with Snapshots(folder, 0, 1, pytest.fail) as snapshots:
        for step in steps:
            snapshots.take(step, on(4, 2), {"best": 0.5, "step": step})


def test_a_snapshot_is_loaded_on_any_mesh_to_the_bit(tmp_path: Path):
    taken(tmp_path, 10)
    for mesh in ((4, 2), (2, 4), (1, 8), (1, 1), (2, 1)):
        found, metadata = load_snapshot(tmp_path, 10, shapes(*mesh))
        assert metadata == {"best": 0.5, "step": 10}
        for name, wanted in arrays().items():
            assert found[name].sharding == shardings(*mesh)[name]
            assert np.asarray(found[name]).tobytes() == wanted.tobytes(), name


def test_every_part_is_kept_once(tmp_path: Path):
    taken(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    _, _, raw = path.read_bytes().partition(b"\n")
    assert len(raw) == sum(array.nbytes for array in arrays().values())


def test_what_a_step_does_to_the_state_does_not_reach_a_snapshot(tmp_path: Path):
    """Steps take the memory of the state; on CPU an array on the host may be the same memory."""
    state = {"w": jax.device_put(np.ones(2**16, np.float32))}
    spec = {"w": jax.ShapeDtypeStruct((2**16,), np.float32, sharding=state["w"].sharding)}
    double = jax.jit(lambda tree: {"w": tree["w"] * 2}, donate_argnums=0)
    with Snapshots(tmp_path, 0, 1, pytest.fail) as snapshots:
        snapshots.take(1, state, {})
        for _ in range(5):
            state = double(state)
    found, _ = load_snapshot(tmp_path, 1, spec)
    assert float(found["w"].sum()) == 2**16


def test_the_newest_two_stay_and_half_a_snapshot_does_not_count(tmp_path: Path):
    taken(tmp_path, 10, 20, 30)
    assert whole_steps(tmp_path) == [20, 30]
    shutil.copy(tmp_path / "step_00000030.0_of_1", tmp_path / "step_00000040.0_of_2")
    assert whole_steps(tmp_path) == [20, 30]
    shutil.copy(tmp_path / "step_00000030.0_of_1", tmp_path / "step_00000040.1_of_2")
    assert whole_steps(tmp_path) == [20, 30, 40]


def test_a_bit_that_flips_is_found(tmp_path: Path):
    taken(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    whole, rng = path.read_bytes(), np.random.default_rng(1)
    for _ in range(50):
        at, bit = int(rng.integers(len(whole))), int(rng.integers(8))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"step_00000010.0_of_1"):
            load_snapshot(tmp_path, 10, shapes(1, 1))


def test_another_state_is_refused(tmp_path: Path):
    taken(tmp_path, 10)
    wanted = shapes(1, 1)
    wanted["w"] = jax.ShapeDtypeStruct((8, 32), np.float32, sharding=wanted["w"].sharding)
    with pytest.raises(
        CheckpointError, match=r"snapshot's w has another dtype or shape than the float32\[8, 32\]"
    ):
        load_snapshot(tmp_path, 10, wanted)


def test_no_room_ends_nothing(tmp_path: Path):
    said: list[str] = []
    with Snapshots(tmp_path, 0, 1, said.append) as snapshots:
        shutil.rmtree(tmp_path)
        snapshots.take(10, on(1, 1), {})
    assert said[0].startswith("cannot write the snapshot of step 10")


def test_what_is_taken_anew_is_forgotten_and_other_numbers_of_processes_go_with_time(tmp_path):
    names = [f"step_{step:08d}.{process}_of_2" for step in (5, 15, 40) for process in (0, 1)]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with Snapshots(tmp_path, 0, 1, pytest.fail, lasts=True) as snapshots:
        snapshots.forget(20)
        assert sorted(path.name for path in tmp_path.iterdir()) == names[:4]
        for step in (20, 30, 40):
            snapshots.take(step, on(4, 2), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000030.0_of_1", "step_00000040.0_of_1"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"snapshots cannot be kept in .*choose another"):
        Snapshots(tmp_path / "file" / "x", 0, 1, print)


def test_snapshots_that_fail_again_and_again_are_not_said_each_time(tmp_path: Path):
    said: list[str] = []
    with Snapshots(tmp_path / "kept", 0, 1, said.append) as snapshots:
        (tmp_path / "kept").rmdir()
        for step in range(1, 21):
            snapshots.take(step, {"w": jnp.zeros(2)}, {})
        snapshots.wait()
        told = [line.split(" into ")[0] for line in said]
        assert told == [f"cannot write the snapshot of step {step}" for step in (1, 2, 4, 8, 16)]
        assert said[-1].endswith("No such file or directory (16 times in a row)")
        (tmp_path / "kept").mkdir()
        snapshots.take(21, {"w": jnp.zeros(2)}, {})
        snapshots.wait()
        (tmp_path / "kept" / "step_00000021.0_of_1").unlink()
        (tmp_path / "kept").rmdir()
        snapshots.take(22, {"w": jnp.zeros(2)}, {})
        snapshots.wait()
        assert said[-1].startswith("cannot write the snapshot of step 22")
