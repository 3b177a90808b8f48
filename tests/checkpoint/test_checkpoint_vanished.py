"""The directory is taken away while a run saves into it: told, by every call that follows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxdist.checkpoint import layout
from jaxdist.checkpoint import store as store_module
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError

STATE = {"w": jnp.arange(8.0)}


def vanish(directory: Path) -> None:
    shutil.rmtree(directory)


def become_a_file(directory: Path) -> None:
    vanish(directory)
    directory.write_text("in the way")


def vanish_with_the_run(directory: Path) -> None:
    vanish(directory.parent)


def new_store(directory: Path, say: Callable[[str], None] = pytest.fail) -> CheckpointStore:
    return CheckpointStore(directory, keep=2, keep_best=False, on_event=say)


def save_and_close(store: CheckpointStore, step: int) -> None:
    store.save(step, STATE, metadata={})
    store.close()


@pytest.mark.parametrize("take_away", [vanish, become_a_file, vanish_with_the_run])
@pytest.mark.parametrize("when", ["seal", "commit", "before the save"])
def test_the_save_fails_and_so_do_wait_and_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take_away: Callable[[Path], None], when: str
) -> None:
    directory = tmp_path / "run" / "checkpoints"
    store = new_store(directory)
    store.save(1, STATE, metadata={})
    store.wait()
    if when == "before the save":
        take_away(directory)
    else:
        module = {"seal": store_module, "commit": layout}[when]
        real = getattr(module, when)

        def taken_away(*args: object, **options: object) -> None:
            take_away(directory)
            real(*args, **options)

        monkeypatch.setattr(module, when, taken_away)
    with pytest.raises(CheckpointError) as caught:
        save_and_close(store, 2)
    said = str(caught.value)
    gone = "is no longer a directory" if take_away is become_a_file else "is gone"
    assert said.startswith(f"saving step 2 failed: {directory} {gone}"), said
    assert "there is no checkpoint" in said
    assert "\n" not in said
    store.close()


def test_directories_that_the_writer_of_arrays_made_anew_are_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path / "run")
    real = store._writer.wait

    def made_anew() -> None:
        real()
        staging = layout.staging_directory(store.directory, 1)
        staging.rename(tmp_path / "moved")
        store.directory.rename(tmp_path / "elsewhere")
        store.directory.mkdir()
        (tmp_path / "moved").rename(staging)
        (staging / layout.METADATA).unlink()

    monkeypatch.setattr(store._writer, "wait", made_anew)
    store.save(1, STATE, metadata={})
    with pytest.raises(CheckpointError, match=r"saving step 1 failed: .*run is gone"):
        store.close()
    assert store.steps() == ()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(13, "Permission denied"),
            r"can no longer be used \(PermissionError.*13",
        ),
        (MemoryError(), r"saving step 2 in .*checkpoints did not finish"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_that_cannot_be_cleared_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """Not the success of the save before, even where the background thread dies."""

    def broken(*_: object, **__: object) -> None:
        raise error

    store = new_store(tmp_path / "checkpoints")
    store.save(1, STATE, metadata={})
    store.wait()
    monkeypatch.setattr(store_module, "seal", broken)
    monkeypatch.setattr(layout, "recover", broken)
    store.save(2, STATE, metadata={})
    with pytest.raises(CheckpointError, match=said):
        store.close()
