"""Ctrl-C before the command line is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from documents import ROOT

SLOW = """
import signal, sys, time
print("importing", flush=True)
try:
    time.sleep({seconds})
except BaseException:  # as a library that goes on where it can
    raise RuntimeError("half imported") from None
print("imported", flush=True)
sys.exit(7)
"""


# A shell that starts tests in the background has them, and their children, ignore SIGINT.
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def started(folder: Path, before: str = HEARD, seconds: int = 60) -> subprocess.Popen[str]:
    """The command `jaxdist`, as its script runs it, where a library takes long to import."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["jaxdist"]
    module, _, function = name.partition(":")
    assert callable(getattr(import_module(module), function))
    (folder / "typer.py").write_text(SLOW.format(seconds=seconds))
    code = f"{before}; from {module} import {function}; {function}()"
    environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    return process


def test_it_ends_quietly(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.full
def test_in_the_background_it_is_not_heard(tmp_path: Path) -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    process = started(tmp_path, ignored, seconds=1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "imported\n")
