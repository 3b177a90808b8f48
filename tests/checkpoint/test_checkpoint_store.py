"""Round trips, resharding, retention on disk, refusals: the store in one process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxdist.checkpoint.arrays import ArrayWriter
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.restore import restore
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.checkpoint.structure import check_structure, describe_arrays
from jaxdist.errors import CheckpointError

P = PartitionSpec


def mesh(**axes: int) -> jax.sharding.Mesh:
    count = int(np.prod(list(axes.values())))
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:count]
    )


def replicated() -> NamedSharding:
    return NamedSharding(mesh(data=8), P())


def target_of(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree
    )


def bits(x: jax.Array) -> bytes:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def assert_same(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype, bits(a)) == (b.shape, b.dtype, bits(b))


def small(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.full((4,), step, jnp.float32), "step": jnp.asarray(step, jnp.int32)}


@pytest.fixture
def events() -> list[str]:
    return []


Factory = Callable[..., CheckpointStore]


@pytest.fixture
def new_store(tmp_path: Path, events: list[str]) -> Iterator[Factory]:
    stores: list[CheckpointStore] = []

    def factory(**options: Any) -> CheckpointStore:
        settings: dict[str, Any] = {"keep": 3, "keep_best": False, "on_event": events.append}
        store = CheckpointStore(tmp_path / "checkpoints", **(settings | options))
        stores.append(store)
        return store

    yield factory
    for store in stores:
        store.close()


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    opt: Any


def rich_state() -> State:
    params = {"block/0": {"w": jax.random.normal(jax.random.key(0), (8, 16))}}
    noise = jax.random.bits(jax.random.key(1), (8, 3), jnp.uint16)
    return State(
        params={
            **params,
            "bf16": jax.lax.bitcast_convert_type(noise, jnp.bfloat16),
            "nan": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45]),
            "u32": jnp.arange(7, dtype=jnp.uint32),
            "u8": jnp.arange(3, dtype=jnp.uint8),
            "flag": jnp.array([True, False]),
            "fp8": jnp.ones((4,), jnp.float8_e4m3fn),
            "empty": jnp.zeros((0, 3)),
            "keys": jax.random.split(jax.random.key(3), 4),
            "key": jax.random.key(5, impl="rbg"),
            "none": None,
            "nothing": {},
            "pair": Pair((), [jnp.int32(-7)]),
        },
        opt=optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
    )


def test_every_kind_of_leaf_returns_bit_for_bit(new_store: Factory) -> None:
    state = rich_state()
    store = new_store()
    store.save(7, state, metadata={"data": {"epoch": 1}, "note": "ü"})
    restored = store.restore(target_of(state))
    assert (restored.step, restored.metadata) == (7, {"data": {"epoch": 1}, "note": "ü"})
    assert_same(restored.state, state)


def test_a_tree_of_nothing_but_empty_leaves(new_store: Factory) -> None:
    state = {"a": jnp.zeros((0,)), "b": None}
    store = new_store()
    store.save(0, state, metadata={})
    assert_same(store.restore(target_of(state)).state, state)


@pytest.mark.parametrize(
    "spec",
    [
        lambda: NamedSharding(mesh(data=2, tensor=4), P("tensor", "data")),
        lambda: NamedSharding(mesh(data=2, tensor=4), P(None, "tensor")),
        lambda: NamedSharding(mesh(data=4), P("data")),
        lambda: SingleDeviceSharding(jax.devices()[0]),
    ],
)
def test_saved_on_8_devices_restores_on_any_mesh(new_store: Factory, spec: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (16, 8))
    state = {
        "f32": jax.device_put(x, NamedSharding(mesh(data=8), P("data"))),
        "bf16": jax.device_put(
            x.astype(jnp.bfloat16), NamedSharding(mesh(data=8), P(None, "data"))
        ),
    }
    store = new_store()
    store.save(1, state, metadata={})
    restored = store.restore(target_of(state, spec())).state
    assert_same(restored, state)
    assert all(leaf.sharding == spec() for leaf in restored.values())


def test_the_state_may_be_donated_as_soon_as_save_returns(new_store: Factory) -> None:
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    sharding = NamedSharding(mesh(data=8), P("data"))
    state = step({"a": jax.device_put(jnp.ones((1 << 20,)), sharding), "b": jnp.ones((1 << 18,))})
    wanted = jax.tree.map(np.array, state)
    target = target_of(state)
    store = new_store()
    store.save(1, state, metadata={})
    for _ in range(20):
        state = step(state)
    assert_same(jax.tree.map(np.asarray, store.restore(target).state), wanted)


def test_saving_goes_on_in_the_background_and_wait_commits(
    new_store: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from jaxdist.checkpoint import layout

    gate, real = threading.Event(), layout.commit

    def slow_commit(staging: Path, final: Path) -> None:
        assert gate.wait(60)
        real(staging, final)

    monkeypatch.setattr(layout, "commit", slow_commit)
    store = new_store()
    store.save(1, small(1), metadata={})
    assert store.steps() == ()
    gate.set()
    store.wait()
    assert store.steps() == (1,)


def test_the_last_n_and_the_best_stay(new_store: Factory) -> None:
    store = new_store(keep=2, keep_best=True)
    for step, metric in enumerate([3.0, 1.0, float("nan"), 2.0, None, 2.5], start=1):
        store.save(step, small(step), metadata={}, metric=metric)
    store.wait()
    assert store.steps() == (2, 5, 6)
    assert_same(store.restore(target_of(small(0)), step=2).state, small(2))
    names = {path.name for path in store.directory.iterdir()}
    assert names == {"step_00000002", "step_00000005", "step_00000006"}


def test_saving_a_step_again_replaces_it(new_store: Factory) -> None:
    store = new_store()
    store.save(5, small(1), metadata={"n": 1})
    store.save(5, small(2), metadata={"n": 2})
    restored = store.restore(target_of(small(0)))
    assert restored.metadata == {"n": 2}
    assert_same(restored.state, small(2))
    assert [path.name for path in store.directory.iterdir()] == ["step_00000005"]


def test_later_steps_neither_push_out_the_new_one_nor_vanish(
    new_store: Factory, events: list[str]
) -> None:
    store = new_store(keep=1)
    store.save(900, small(9), metadata={})
    store.save(500, small(5), metadata={})
    store.wait()
    assert store.steps() == (500, 900)
    assert "steps [900], later than step 500" in events[-1]


def test_an_empty_directory_says_so(new_store: Factory, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoints has no checkpoint: no step was saved"):
        new_store().restore(target_of(small(0)))
    with pytest.raises(CheckpointError, match=r"absent has no checkpoint"):
        restore(tmp_path / "absent", target_of(small(0)), on_event=print)


def test_a_step_that_is_not_there_names_those_that_are(new_store: Factory) -> None:
    store = new_store()
    store.save(3, small(3), metadata={})
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint of step 4; choose from steps \[3\]"
    ):
        store.restore(target_of(small(0)), step=4)


def test_another_model_is_refused_with_its_differences_and_no_fallback(
    new_store: Factory, events: list[str]
) -> None:
    store = new_store()
    old = {"a": jnp.ones((2,)), "b": jnp.ones((2, 3)), "c": jnp.ones((1,), jnp.int32)}
    new = {"b": jnp.ones((2, 4)), "c": jnp.ones((1,)), "d": jnp.ones(())}
    store.save(1, new, metadata={})
    store.save(2, old, metadata={})
    with pytest.raises(CheckpointError) as caught:
        store.restore(target_of(new))
    for line in [
        "step_00000002 contains a different model or optimizer",
        "a: saved float32[2], not expected",
        "b: saved float32[2,3], expected float32[2,4]",
        "c: saved int32[1], expected float32[1]",
        "d: not saved, expected float32[]",
        "resume with the configuration",
    ]:
        assert line in str(caught.value)
    assert events == []


def test_a_long_list_of_differences_is_cut(new_store: Factory) -> None:
    store = new_store()
    store.save(1, {f"w{i}": jnp.ones(2) for i in range(20)}, metadata={})
    with pytest.raises(CheckpointError, match=r"20 differ:\n(.*\n){8}  and 12 more"):
        store.restore(target_of({f"w{i}": jnp.ones(3) for i in range(20)}))


def test_metadata_must_be_json(new_store: Factory) -> None:
    with pytest.raises(CheckpointError, match=r"must be JSON values.*object.*'x'"):
        new_store().save(1, small(1), metadata={"x": object()})


def test_two_leaves_of_one_path_are_refused(new_store: Factory) -> None:
    state = {"a/b": jnp.ones(1), "a": {"b": jnp.ones(2)}}
    with pytest.raises(CheckpointError, match="same path 'a/b'"):
        new_store().save(1, state, metadata={})


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file/run: NotADirectory"):
        CheckpointStore(tmp_path / "file" / "run", keep=1, keep_best=False, on_event=print)


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*Permission denied"):
        CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=print)


def test_leftovers_of_a_crash_are_cleared_and_named(
    new_store: Factory, tmp_path: Path, events: list[str]
) -> None:
    store = new_store()
    store.save(1, small(1), metadata={})
    store.save(2, small(2), metadata={})
    store.wait()
    # The crash came between the two renames of a replacement, and during a save and a deletion.
    os.rename(store.directory / "step_00000002", store.directory / ".replaced-step_00000002")
    for name in [".tmp-step_00000003", ".tmp-deleted-step_00000000"]:
        (store.directory / name / "arrays").mkdir(parents=True)
    again = new_store()
    assert again.steps() == (1, 2)
    assert sorted(os.listdir(again.directory)) == ["step_00000001", "step_00000002"]
    assert ".replaced-step_00000002" in events[-1]
    assert ".tmp-step_00000003" in events[-1]
    assert_same(again.restore(target_of(small(0))).state, small(2))


def test_reading_never_touches_the_directory(new_store: Factory, tmp_path: Path) -> None:
    store = new_store()
    store.save(1, small(1), metadata={})
    store.wait()
    (store.directory / ".tmp-step_00000002").mkdir()
    before = sorted(store.directory.rglob("*"))
    assert restore(store.directory, target_of(small(0)), on_event=print).step == 1
    assert sorted(store.directory.rglob("*")) == before


def test_every_file_and_directory_is_synced_before_the_name_is_given(
    new_store: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store()
    synced: set[int] = set()
    checked: list[Path] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def spy_rename(source: Any, destination: Any) -> None:
        if Path(destination).name == "step_00000001":
            inside = [Path(source), *Path(source).rglob("*")]
            checked.extend(inside)
            assert {path.stat().st_ino for path in inside} <= synced
            synced.clear()
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    store.save(1, small(1), metadata={})
    store.wait()
    assert any(path.name == "manifest.json" for path in checked)
    assert store.directory.stat().st_ino in synced


def test_the_context_manager_closes_and_does_not_hide_an_error(
    tmp_path: Path, events: list[str]
) -> None:
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=events.append) as store:
        store.save(1, small(1), metadata={})
    assert store.steps() == (1,)

    def fail() -> None:
        with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=events.append) as store:
            store.save(2, small(2), metadata={})
            raise KeyError("the loop")

    with pytest.raises(KeyError, match="the loop"):
        fail()
    assert store.steps() == (2,)
    assert events == []


def test_the_config_refuses_zero() -> None:
    assert CheckpointConfig().keep == 3
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        CheckpointConfig(keep=0)


def test_arrays_that_do_not_fit_are_counted_among_saved_and_wanted() -> None:
    """Saved and wanted ones that lack each other count together: more than either has."""
    saved = describe_arrays({"a": jnp.zeros(2), "b": jnp.zeros(2)})
    wanted = {"c": jnp.zeros(2), "d": jnp.zeros(2), "e": jnp.zeros(2)}
    with pytest.raises(CheckpointError, match="of 2 saved and 3 expected arrays, 5 differ:\n"):
        check_structure(saved, wanted, where="here")


def test_a_step_can_reuse_all_memory_of_what_was_read(new_store: Factory):
    """NumPy's memory would stay beside the new state: the first step after a resume held two."""
    sharding = NamedSharding(mesh(data=4), P("data"))
    rng = np.random.default_rng(0)
    state = {str(n): jax.device_put(rng.random((256, 64)), sharding) for n in range(40)}
    state["whole"] = jax.device_put(rng.random((64, 64)), NamedSharding(mesh(data=4), P()))
    found = new_store()
    found.save(1, state, metadata={})
    found.wait()
    read = found.restore(target_of(state)).state
    before = buffers(read)
    after = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(read)
    assert len(before) == 41 * 4
    assert buffers(after) == before


def buffers(tree: Any) -> set[int]:
    """The addresses of what devices hold."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


def test_replicas_of_small_arrays_are_saved_without_compiling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    array = jax.device_put(
        np.ones((56, 34), np.float32), NamedSharding(mesh, PartitionSpec(None, "tensor"))
    )
    writer = ArrayWriter()
    with jax.log_compiles():
        writer.start(tmp_path, {"array": array})
        writer.wait()
    assert "Compiling" not in caplog.text
