"""The request to a run for another number of table servers, as a file in its directory.

RUN/servers.json    {"servers": 3}; process 0 reads this file and then removes it
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxdist.config.files import read_json
from jaxdist.train.strategy.config import Hybrid

FILE_NAME = "servers.json"


def fixed_port(port: int) -> str:
    """Return why no server can join a run whose servers listen on fixed ports."""
    return (
        f"strategy.processes.port is {port}, but a server that joins needs another port; resume "
        "the run with strategy.processes.port: 0"
    )


def servers_problem(strategy: Hybrid, servers: int) -> str | None:
    """Return why a run cannot have a number of servers, or None if it can."""
    if strategy.processes.port:
        return fixed_port(strategy.processes.port)
    if servers > strategy.range_count:
        return (
            f"{servers} servers are too many for {strategy.range_count} ranges of rows: each "
            f"server needs at least one range; resume the run with strategy.ranges: {servers} or "
            "more"
        )
    if servers < strategy.replicas:
        return (
            f"{servers} servers are too few for replicas {strategy.replicas}: the copies of a row "
            f"must be on different servers; ask for {strategy.replicas} or more"
        )
    return None


def write_request(run: Path, servers: int) -> Path:
    """Write a file that asks a run for a number of servers, and return the path of the file.

    The run removes the file after it has read the request.
    """
    path = run / FILE_NAME
    staged = run / f".{FILE_NAME}"
    staged.write_text(json.dumps({"servers": servers}), encoding="utf-8")
    return staged.replace(path)


def take_request(run: Path) -> int | None:
    """Return the requested number of servers and remove the request, or None without a request."""
    path = run / FILE_NAME
    try:
        told = read_json(path)
        path.unlink()
    except (OSError, ValueError):
        return None
    found = told.get("servers") if isinstance(told, dict) else None
    return found if isinstance(found, int) and found > 0 else None
