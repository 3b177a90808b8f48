from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from jaxdist.errors import RunError
from jaxdist.run import lock
from jaxdist.run.lock import FILE_NAME, RunLock


def leave_behind(directory: Path, **changes: object) -> Path:
    """The lock of a process that was killed, with something in it changed."""
    directory.mkdir()
    path = directory / FILE_NAME
    path.write_text(json.dumps({**lock.this_process(), **changes}))
    return path


def no_flock(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "YOUNG_SECONDS", 0.2)


def test_the_second_is_refused_and_told_who_holds_it(tmp_path):
    run = tmp_path / "runs" / "gpt"
    with (
        RunLock(run, say=pytest.fail),
        pytest.raises(RunError, match=rf"{run} is in use by process {os.getpid()} on .* since 20"),
    ):
        RunLock(run, say=pytest.fail)
    with RunLock(run, say=pytest.fail):
        pass


def test_what_was_made_for_the_lock_alone_goes_with_it(tmp_path):
    with RunLock(tmp_path / "a" / "b", say=pytest.fail):
        assert [path.name for path in (tmp_path / "a/b").iterdir()] == [FILE_NAME]
    assert not (tmp_path / "a").exists()
    with RunLock(tmp_path / "a" / "b", say=pytest.fail):
        (tmp_path / "a" / "config.yaml").write_text("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.yaml"]


def test_a_lock_of_this_host_that_nobody_holds_is_taken_at_once(tmp_path):
    """Its process number may be in use again: what counts is the kernel's word."""
    leave_behind(tmp_path / "run", process=os.getppid())
    with RunLock(tmp_path / "run", say=pytest.fail):
        found = json.loads((tmp_path / "run" / FILE_NAME).read_text())
        assert found["process"] == os.getpid()


@pytest.mark.parametrize("content", [{"host": "elsewhere"}, {"boot": "another"}, None])
def test_a_lock_of_another_host_is_taken_when_it_shows_no_life(
    tmp_path, fast, content, monkeypatch
):
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.05)
    path = leave_behind(tmp_path / "run", **(content or {}))
    if content is None:
        path.write_text("")  # killed between making the file and writing into it
    said: list[str] = []
    with RunLock(tmp_path / "run", say=said.append):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert len(said) == 1
    assert "waiting up to 0.05 s to see whether that process is alive" in said[0]


@pytest.mark.parametrize("flock", [True, False])
def test_a_lock_of_another_host_that_lives_is_respected(tmp_path, fast, flock, monkeypatch):
    """Where the disk passes no lock from host to host, the time stamp that moves tells."""
    path = leave_behind(tmp_path / "run", host="elsewhere", process=7)
    if not flock:
        monkeypatch.setattr(fcntl, "flock", no_flock)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunError, match="in use by process 7 on elsewhere"):
            RunLock(tmp_path / "run", say=lambda line: None)
    finally:
        stop.set()
        thread.join()
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_without_flock_a_live_holder_beats(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_flock)
    with (
        RunLock(tmp_path / "run", say=pytest.fail),
        pytest.raises(RunError, match="is in use by process"),
    ):
        RunLock(tmp_path / "run", say=lambda line: None)


def test_a_directory_that_vanished_is_no_trouble_at_the_end(tmp_path, fast):
    with RunLock(tmp_path / "run", say=pytest.fail):
        (tmp_path / "run" / FILE_NAME).unlink()
        (tmp_path / "run").rmdir()


def test_another_lock_in_its_place_is_left_alone(tmp_path):
    with RunLock(tmp_path / "run", say=pytest.fail):
        (tmp_path / "run" / FILE_NAME).unlink()
        (tmp_path / "run" / FILE_NAME).write_text("another's")
    assert (tmp_path / "run" / FILE_NAME).read_text() == "another's"


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file.run cannot be written: .*run.directory="):
        RunLock(tmp_path / "file" / "run", say=pytest.fail)


def test_a_disk_that_numbers_its_files_anew_is_no_trap(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(lock, "_is_at", lambda *_: False)
    leave_behind(tmp_path / "run")
    with RunLock(tmp_path / "run", say=pytest.fail):
        pass


@pytest.mark.parametrize("_", range(20))
def test_of_many_at_once_one_gets_it_and_the_others_are_told_by_whom(tmp_path, _):
    """Also between the moments when the file is made, locked and written."""
    barrier = threading.Barrier(4)
    got: list[RunLock] = []
    refused: list[str] = []

    def take() -> None:
        barrier.wait()
        try:
            got.append(RunLock(tmp_path, say=refused.append))
        except RunError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert len(refused) == 3
    assert all(f"in use by process {os.getpid()} on" in text for text in refused), refused
    got[0].release()
