"""An etcd server that a test starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis_place import free_port


@contextmanager
def etcd_server(
    folder: Path, files: Mapping[str, Path] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start an etcd server, and yield its address and process; skip the test if etcd is missing.

    Args:
      files: the TLS files by the name of their etcd option, or None for a server without TLS.
    """
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("there is no etcd: apt-get install etcd-server")
    scheme = "http" if files is None else "https"
    client, peer = (f"{scheme}://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}")
    given = {
        "data-dir": folder / "etcd", "listen-client-urls": client, "advertise-client-urls": client,
        "listen-peer-urls": peer, "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}", "log-level": "error", **(files or {}),
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in given.items()]
    if files is not None:
        options.append("--client-cert-auth")
    log = (folder / "etcd.log").open("wb")
    process = subprocess.Popen([binary, *options], stdout=log, stderr=log)
    address = client.split("://")[1]
    try:
        if files is None:
            _await(f"{client}/health")
        yield f"etcd{'' if files is None else 's'}://{address}", process
    finally:
        process.kill()
        process.wait()
        log.close()


def _await(url: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if json.load(answer)["health"] == "true":
                return
        time.sleep(0.05)
