"""A process that forks others, its own end, and theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from jaxdist.errors import RunError
from jaxdist.runtime import forks
from jaxdist.runtime.forks import PASSED_ON, ForkServer

SCRIPT = """
import os, signal, sys
from jaxdist.runtime.forks import await_fork, hold_signals
hold_signals()
if await_fork():
    sys.stderr.write(f"{os.getpid()} {os.getsid(0)} ")
    sys.exit(int(sys.stdin.readline() or 9))
"""


class Forked:
    """One process, and what it hears."""

    def __init__(self, server: ForkServer, log: Path) -> None:
        self.server, self.log = server, log
        reader, self.writer = os.pipe()
        with log.open("ab") as errors:
            self.pid = server.fork([reader, errors.fileno()])
        os.close(reader)

    def end(self, code: int) -> int | None:
        os.write(self.writer, f"{code}\n".encode())
        return ended(self.server, self.pid)


def ended(server: ForkServer, pid: int) -> int | None:
    return forks.Forked(server, pid).wait(60)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ForkServer]]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    servers = []

    def given(script: str) -> ForkServer:
        (tmp_path / "forks_for_a_test.py").write_text(script)
        servers.append(ForkServer("forks_for_a_test", tmp_path / "server"))
        return servers[-1]

    yield given
    for server in servers:
        server.close()


def test_each_has_its_own_input_its_own_log_and_its_own_code(start, tmp_path: Path):
    server = start(SCRIPT)
    all_of_them = [Forked(server, tmp_path / f"log_{number}") for number in range(5)]
    assert [server.ended(one.pid) for one in all_of_them] == [None] * 5
    for number, one in reversed([*enumerate(all_of_them)]):
        assert one.end(number) == number
        assert (tmp_path / f"log_{number}").read_text().split() == [str(one.pid)] * 2  # a session


def test_one_that_was_killed_is_told_by_its_signal(start, tmp_path: Path):
    server = start(SCRIPT)
    one, other = (Forked(server, tmp_path / "log") for _ in range(2))
    os.kill(one.pid, signal.SIGKILL)
    assert ended(server, one.pid) == -signal.SIGKILL
    assert server.ended(other.pid) is None
    os.close(other.writer)  # as if this process had ended
    assert ended(server, other.pid) == 9


def test_what_ends_a_job_ends_those_that_were_forked_and_not_the_server(start, tmp_path: Path):
    server = start(SCRIPT)
    Forked(server, tmp_path / "log").end(0)
    for number in PASSED_ON:
        os.kill(server._process.pid, number)
    one = Forked(server, tmp_path / "log")
    assert server.ended(one.pid) is None  # what the server was sent is not the other's
    os.kill(one.pid, signal.SIGTERM)
    assert ended(server, one.pid) == -signal.SIGTERM


def test_a_server_that_was_killed_is_started_anew(start, tmp_path: Path):
    server = start(SCRIPT)
    before = Forked(server, tmp_path / "log")
    os.kill(server._process.pid, signal.SIGKILL)
    assert ended(server, before.pid) == -signal.SIGKILL  # nobody can know
    assert Forked(server, tmp_path / "log").end(5) == 5
    with suppress(ProcessLookupError):
        os.kill(before.pid, signal.SIGKILL)


def test_a_server_that_ends_before_it_can_fork_says_why(start, tmp_path: Path):
    server = start("import nothing_of_this_name")
    with pytest.raises(RunError, match=r"has ended: .*nothing_of_this_name"):
        Forked(server, tmp_path / "log")


@pytest.mark.parametrize("number", [3, -signal.SIGKILL])
def test_threads_may_wait_for_one_while_another_is_forked(start, tmp_path: Path, number: int):
    server = start(SCRIPT)
    (reader, writer), log = os.pipe(), tmp_path / "log"
    with log.open("ab") as errors, open(os.devnull) as empty, ThreadPoolExecutor(2) as threads:
        one = server.begin(reader, errors.fileno())
        waiting = [threads.submit(one.wait, 60) for _ in range(2)]
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.02)
        assert server.begin(empty.fileno(), errors.fileno()).wait(60) == 9
        assert one.poll() is None
        if number < 0:
            one.kill()
        os.write(writer, f"{number}\n".encode())
        assert [each.result() for each in waiting] == [number] * 2
    one.kill()  # nothing happens
    for end in (reader, writer):
        os.close(end)


THREADS = """
import os
from jaxdist.cli import runs
from jaxdist.param_server.processes import __main__
runs.import_all()
print(*(open(f"/proc/self/task/{name}/comm").read() for name in os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc: threads are not known")
def test_what_is_imported_before_a_fork_starts_no_thread():
    """A fork has one thread: a lock that another held would stay held in it."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it ends its threads before a fork
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert len(done.stdout.split()) == 1, done.stdout
