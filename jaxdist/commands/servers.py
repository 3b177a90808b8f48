"""`jaxdist servers`: another number of table servers for a run that is training."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from jaxdist.errors import RunError
from jaxdist.experiment import load
from jaxdist.metrics.report import write_json
from jaxdist.run.directory import RunDirectory
from jaxdist.tables.training.request import servers_problem, write_request
from jaxdist.train.strategy.config import Hybrid

PATIENCE_SECONDS = 30.0


def ask_for_servers(
    run: Path,
    servers: int,
    json_file: Path | None = None,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> str:
    """Ask a run for a number of table servers, and return a line for the user.

    Args:
      json_file: a file for the number as JSON, or None to write none.
      patience_seconds: the time for which the run may leave the request unread.

    Raises:
      RunError: the run has no tables on servers, has ended, or cannot have this number of servers.
    """
    directory = RunDirectory(run)
    strategy = load(directory.config)[1].strategy
    if not isinstance(strategy, Hybrid):
        raise RunError(
            f"{run} has strategy.type {strategy.type}: give a run with strategy.type hybrid; only "
            "such a run can change the number of its servers"
        )
    if not directory.lock.exists():
        raise RunError(
            f"the run in {run} has ended: continue it with jaxdist train --resume and "
            f"strategy.servers={servers}"
        )
    problem = servers_problem(strategy, servers)
    if problem is not None:
        raise RunError(f"{run}: {problem}")
    _ask(run, servers, patience_seconds)
    if json_file is not None:
        write_json(json_file, {"run": str(run), "servers": servers}, what="request")
    return f"the run changes the number of its table servers to {servers}; its log says when"


def _ask(run: Path, servers: int, patience_seconds: float) -> None:
    try:
        request = write_request(run, servers)
    except OSError as error:
        raise RunError(
            f"{run} cannot be written: {error.strerror or error}; use the account of the run"
        ) from error
    deadline = time.monotonic() + patience_seconds
    while request.exists():
        if time.monotonic() > deadline:
            with suppress(FileNotFoundError):
                request.unlink()
                raise RunError(
                    f"no process of the run in {run} has read the request in {patience_seconds:g} "
                    "s: see in the log of the run whether it is training"
                )
        time.sleep(0.05)
