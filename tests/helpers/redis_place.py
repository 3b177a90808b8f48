"""A Redis server that a test starts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a Redis server, and yield its address and process; skip the test without Redis."""
    pytest.importorskip("redis", reason="the extra redis is not installed")
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server: apt-get install redis-server")
    port = free_port()
    given = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([binary, *given], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()
