"""Helpers that start a run in a process, and that wait for events in it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxdist.errors import RunError

CONFIG = """
model: {type: mlp, hidden: [512, 256]}
data: {type: images, source: digits}
optim: {type: adamw, learning_rate: 1.0e-3}
train: {steps: 100000, batch_size: 64, log_every: 1}
eval: {every: null}
checkpoint: {every: 100, memory_every: 10}
"""
WAIT_SECONDS = 180.0


@contextmanager
def started(
    command: list[str], folder: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process whose output goes to FOLDER/out; end it with its children at the end.

    Args:
      environ: variables to add to this process's environment.
    """
    with (folder / "out").open("wb") as out:
        told = {**os.environ, **(environ or {})}
        # In a new session, `killpg` below also ends the processes that this process starts.
        process = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=out, start_new_session=True, env=told
        )
        try:
            yield process
        except RunError as error:
            words = (folder / "out").read_text(errors="replace")[-1000:]
            raise RunError(f"{error}: {words}") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(WAIT_SECONDS / 6)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def until(found: Callable[[], dict | bool | None], process: subprocess.Popen[bytes]) -> dict:
    """Wait until `found` returns a true value, and return it; a bool becomes an empty dict.

    Raises:
      RunError: the time is over, or the process has ended.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        answer = found()
        if answer:
            return answer if isinstance(answer, dict) else {}
        time.sleep(0.02)
    raise RunError(f"nothing has happened for {WAIT_SECONDS:g} s ({process.poll()})")
