"""A command that ends with whoever started it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLEEP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def tied(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "jaxdist.launch.tied", *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("body", "code"), [("pass", 0), ("exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_command_s_while_its_input_is_open(body, code):
    process = tied(sys.executable, "-c", body)
    found = process.wait(60)
    assert process.stderr is not None
    # A thread that waits at `sys.stdin` would have Python abort the process here.
    assert (found, process.stderr.read()) == (code, b"")
    process.communicate()


def begun(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    said = folder / "pid"
    process = tied(sys.executable, "-c", SLEEP, str(said))
    while not (said.exists() and said.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    return process, int(said.read_text())


def test_it_ends_when_the_other_end_of_its_input_is_closed(tmp_path):
    process, child = begun(tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert not Path(f"/proc/{child}").exists()


def test_a_signal_is_passed_on(tmp_path):
    process, _ = begun(tmp_path)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    process.communicate()
