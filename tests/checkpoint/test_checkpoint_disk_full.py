"""No room left: one clear message, nothing left behind, everything older intact."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxdist.checkpoint import store as store_module
from jaxdist.checkpoint.arrays import ArrayWriter
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError

DISK_BYTES = 1 << 20


def state(step: int, *, kib: int = 64) -> dict[str, jax.Array]:
    return {"w": jax.random.bits(jax.random.key(step), (kib * 256,))}


def target(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.mark.parametrize("kib", [900, 1000, 3000])
def test_a_full_disk(
    tmp_path: Path,
    mount_tmpfs: Callable[[Path, int], Path],
    kib: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = mount_tmpfs(tmp_path, DISK_BYTES) / "run"
    with CheckpointStore(directory, keep=3, keep_best=False, on_event=pytest.fail) as store:
        store.save(1, state(1), metadata={})
        store.save(2, state(2, kib=kib), metadata={})
        with pytest.raises(CheckpointError) as caught:
            store.wait()
        for part in [
            f"saving step 2 in {directory} failed: the disk is full",
            "free bytes",
            "last good checkpoint is step 1",
            "make room",
        ]:
            assert part in str(caught.value)
        assert os.listdir(directory) == ["step_00000001"]
        store.save(3, state(3), metadata={})
        restored = store.restore(target(state(3)))
        assert (restored.step, (restored.state["w"] == state(3)["w"]).all()) == (3, True)
        assert store.steps() == (1, 3)
    assert caplog.records == []


# Where one write fails, jax may close its event loop before others of the same array began.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <coroutine object async_serialize_from_host:"
    "pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.filterwarnings("ignore:coroutine 'async_serialize_from_host:RuntimeWarning")
@pytest.mark.parametrize("chunk_bytes", [1 << 20, pytest.param(1 << 12, id="pieces")])
@pytest.mark.every(2)
def test_a_disk_with_room_for_some_of_the_files(
    tmp_path: Path,
    mount_tmpfs: Callable[[Path, int], Path],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    chunk_bytes: int,
) -> None:
    """Wherever it ends, the save alone fails and says so once: not the next one, nor the close."""
    disk = mount_tmpfs(tmp_path, DISK_BYTES)
    many = {str(i): state(i, kib=16)["w"] for i in range(8)}
    others = {name: leaf + 1 for name, leaf in many.items()}
    pages = range(12)
    with CheckpointStore(
        disk / "run", keep=1, keep_best=False, chunk_bytes=chunk_bytes, on_event=pytest.fail
    ) as store:
        for room in pages:
            store.save(2 * room, many, metadata={})
            store.wait()
            with filled(disk, room), pytest.raises(CheckpointError, match="the disk is full"):
                save_and_wait(store, 2 * room + 1, others)
            assert store.steps() == (2 * room,)
    gc.collect()
    assert (caplog.records, capfd.readouterr().err) == ([], "")


@contextmanager
def filled(disk: Path, pages: int) -> Iterator[None]:
    """All but some pages of a disk are taken."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - pages * mmap.PAGESIZE))
    yield
    ballast.unlink()


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WRITER_WAIT = ArrayWriter.wait


def no_space_in_tensorstore(writer: ArrayWriter) -> None:
    WRITER_WAIT(writer)
    raise ValueError("RESOURCE_EXHAUSTED: Error writing: [OS error: No space left on device]")


def save_and_wait(store: CheckpointStore, step: int, tree: Any = None) -> None:
    store.save(step, state(step) if tree is None else tree, metadata={})
    store.wait()


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (ArrayWriter, "start", no_space),
        (ArrayWriter, "wait", no_space_in_tensorstore),
        (store_module, "seal", no_space),
        (os, "fsync", no_space),
        (os, "rename", no_space),
    ],
)
def test_no_space_at_each_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any
) -> None:
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(1, state(1), metadata={})
        store.wait()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            with pytest.raises(CheckpointError, match=r"step 2 .*the disk is full.* is step 1;"):
                save_and_wait(store, 2)
        assert os.listdir(tmp_path) == ["step_00000001"]
        assert store.restore(target(state(1))).step == 1


def test_a_replacement_that_fails_half_way_leaves_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def full_for_the_new_one(source: Any, destination: Any) -> None:
        if Path(source).name == ".tmp-step_00000001":
            no_space()
        rename(source, destination)

    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(1, state(7), metadata={"former": True})
        store.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", full_for_the_new_one)
            with pytest.raises(CheckpointError, match=r"the disk is full.* is step 1;"):
                save_and_wait(store, 1)
        restored = store.restore(target(state(7)))
        assert restored.metadata == {"former": True}
        assert (restored.state["w"] == state(7)["w"]).all()
        assert os.listdir(tmp_path) == ["step_00000001"]


def test_a_background_failure_is_raised_once_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail) as store:
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "seal", lambda *_, **__: 1 / 0)
            store.save(1, state(1), metadata={})
            assert store._thread is not None
            store._thread.join()
        with pytest.raises(CheckpointError, match=r"ZeroDivisionError.*there is no checkpoint;"):
            store.save(2, state(2), metadata={})
        store.save(3, state(3), metadata={})
    assert store.steps() == (3,)


def test_closing_raises_a_background_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail)
    monkeypatch.setattr(store_module, "seal", no_space)
    store.save(1, state(1), metadata={})
    with pytest.raises(CheckpointError, match="saving step 1"):
        store.close()


def test_a_failed_save_is_told_even_when_the_loop_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(store_module, "seal", no_space)

    def fail() -> None:
        with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=events.append) as store:
            store.save(1, state(1), metadata={})
            raise KeyError("the loop")

    with pytest.raises(KeyError, match="the loop"):
        fail()
    assert "saving step 1" in events[0]


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=events.append) as store:
        store.save(1, state(1), metadata={})
        store.wait()
        monkeypatch.setattr(store_module.layout, "delete", no_space)
        store.save(2, state(2), metadata={})
    assert store.steps() == (1, 2)
    assert "step_00000001 cannot be deleted: OSError" in events[0]
