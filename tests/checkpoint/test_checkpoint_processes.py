"""Two real processes of two devices each, over gloo on loopback, with one directory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.checkpoint.restore import restore
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.runtime.rendezvous import free_port

CHILD = textwrap.dedent("""
    import json, sys
    from pathlib import Path

    from jaxdist.runtime import environment
    environment.prepare(fake_devices=2)
    import jax
    jax.config.update("jax_enable_preemption_service", False)
    directory, port, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    jax.distributed.initialize(
        coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=process
    )
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxdist.checkpoint import pieces, store as store_module
    from jaxdist.checkpoint.store import CheckpointStore
    from jaxdist.errors import CheckpointError

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())

    def state(step):
        w = np.arange(4096, dtype=np.float32).reshape(64, 64) + step
        return {"w": jax.device_put(w, sharded), "step": jax.device_put(np.int32(step), replicated)}

    def target(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
        )

    def local(tree):
        return [[np.asarray(s.data).tolist() for s in x.addressable_shards] for x in
                jax.tree.leaves(tree)]

    said, seen = {}, []
    store = CheckpointStore(
        directory, keep=2, keep_best=False, chunk_bytes=4096, on_event=seen.append
    )
    for step in (1, 2, 3):
        store.save(step, state(step), metadata={"step": step}, metric=float(step))
    store.wait()
    said["steps"] = store.steps()

    whole = store.restore(target(state(0)))
    said["newest"] = [whole.step, local(whole.state) == local(state(3))]

    multihost_utils.sync_global_devices("before the damage")
    if process == 0:
        (directory / "step_00000003" / "metadata.json").write_text("{}")
    multihost_utils.sync_global_devices("after the damage")
    older = store.restore(target(state(0)))
    said["older"] = [older.step, older.metadata, local(older.state) == local(state(2))]
    said["events"] = len(seen)

    def refusal(action):
        try:
            action()
        except CheckpointError as error:
            return str(error)

    said["other model"] = refusal(lambda: store.restore({"w": target(state(0))["w"]}))
    said["no step"] = refusal(lambda: store.restore(target(state(0)), step=9))
    if process == 0:
        real, store_module.seal = store_module.seal, lambda *a, **o: 1 / 0
    store.save(4, state(4), metadata={})
    said["failed save"] = refusal(store.wait)
    if process == 0:
        store_module.seal = real
    if process == 1:
        real, pieces.place_pieces = pieces.place_pieces, lambda *a: 1 / 0
    store.save(4, state(4), metadata={})
    said["failed part"] = refusal(store.wait)
    if process == 1:
        pieces.place_pieces = real
        said["why"] = seen[-1]
    store.save(5, state(5), metadata={"step": 5})
    store.close()
    said["at last"] = store.steps()
    print(json.dumps(said), flush=True)
    jax.distributed.shutdown()
""")


def run_two(script: str, *arguments: str) -> list[Any]:
    """What the two processes printed last, as JSON."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments, str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    outputs = []
    try:
        for child in children:
            out, err = child.communicate(timeout=120)
            assert child.returncode == 0, err[-3000:]
            outputs.append(json.loads(out.splitlines()[-1]))
    finally:
        for child in children:
            child.kill()
            child.wait(timeout=10)
    return outputs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "checkpoints"


@pytest.fixture(scope="module")
def said(directory: Path) -> list[Any]:
    return run_two(CHILD, str(directory), str(free_port()))


def test_both_commit_and_load_the_same(said: list[Any]) -> None:
    for one in said:
        assert one["steps"] == [2, 3]
        assert one["newest"] == [3, True]


def test_both_fall_back_together_and_only_process_0_says_so(said: list[Any]) -> None:
    assert [one["older"] for one in said] == [[2, {"step": 2}, True]] * 2
    assert [one["events"] for one in said] == [1, 0]


@pytest.mark.full
def test_both_refuse_alike(said: list[Any]) -> None:
    for one in said:
        # Step 3 is damaged, step 2 holds an array more than the target.
        assert "step: saved int32[], not expected" in one["other model"]
        assert "has no checkpoint of step 9" in one["no step"]


def test_a_commit_that_fails_on_process_0_fails_on_both(said: list[Any]) -> None:
    for one in said:
        assert "saving step 4" in one["failed save"]
        assert "ZeroDivisionError" in one["failed save"]
        assert one["at last"] == [3, 5]


def test_a_part_that_fails_on_process_1_fails_on_both(said: list[Any]) -> None:
    for one in said:
        assert "saving step 4" in one["failed part"]
        assert "pieces/000001/32.0" in one["failed part"]
    assert "ZeroDivisionError" in said[1]["why"]


def test_one_process_restores_what_two_saved(said: list[Any], directory: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("tensor", "data"))
    target: Any = {
        "w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
    }
    restored = restore(directory, target, on_event=pytest.fail)
    assert (restored.step, restored.metadata) == (5, {"step": 5})
    wanted = np.arange(4096, dtype=np.float32).reshape(64, 64) + 5
    np.testing.assert_array_equal(np.asarray(restored.state["w"]), wanted)


RESTORE = textwrap.dedent("""
    import json, sys
    from pathlib import Path

    from jaxdist.runtime import environment
    environment.prepare(fake_devices=2)
    import jax
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[3])
    )
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxdist.checkpoint.restore import restore

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    target = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding),
              "empty": jax.ShapeDtypeStruct((0, 4), np.float32, sharding=sharding)}
    restored = restore(Path(sys.argv[1]), target, on_event=print)
    shards = restored.state["w"].addressable_shards
    print(json.dumps([[s.index[1].start, np.asarray(s.data)[:, 0].tolist()] for s in shards]))
    jax.distributed.shutdown()
""")


@pytest.mark.slow
def test_two_processes_restore_what_one_saved(tmp_path: Path) -> None:
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(1, {"w": jnp.asarray(w), "empty": jnp.zeros((0, 4))}, metadata={})
    for shards in run_two(RESTORE, str(tmp_path), str(free_port())):
        assert len(shards) == 2
        for column, values in shards:
            assert values == w[:, column].tolist()
