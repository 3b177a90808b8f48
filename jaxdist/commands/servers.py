"""`jaxdist servers`: a new number of table servers, or one more process of a run on this host."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from jaxdist.checkpoint.identity import base_of
from jaxdist.errors import RunError, os_errors_as
from jaxdist.experiment import load
from jaxdist.metrics.report import write_json
from jaxdist.param_server import processes
from jaxdist.run.directory import RunDirectory
from jaxdist.tables.training.request import fixed_port, servers_problem, write_request
from jaxdist.train.strategy.config import Hybrid, ParameterServer

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
    strategy = _strategy(run, f"strategy.servers={servers}", Hybrid)
    assert isinstance(strategy, Hybrid)
    problem = servers_problem(strategy, servers)
    if problem is not None:
        raise RunError(f"{run}: {problem}")
    _ask(run, servers, patience_seconds)
    write_json(json_file, {"run": str(run), "servers": servers}, what="request")
    return f"the run changes the number of its table servers to {servers}; its log says when"


def serve_here(
    run: Path,
    host: str | None,
    note: Callable[[str], None],
    json_file: Path | None = None,
    *,
    role: Literal["server", "worker"] = "server",
    wait_seconds: float | None = None,
) -> None:
    """Run a server or a worker of a run on this host, until it leaves the run or the run ends.

    SIGTERM and SIGINT ask the process to leave the run. If a table server leaves, a server on the
    host of the run takes its rows. With `wait_seconds`, these signals go to all processes of a job,
    so the process stays until the run ends.

    Args:
      run: the run directory, which this host shares with the hosts of the run.
      host: the address at which the server listens, or None for the address from which this host
        reaches the run.
      note: a function that prints a line for the user.
      json_file: a file for the number and the address of the server as JSON, or None to write none.
      role: whether to run a server or a worker.
      wait_seconds: the time to wait for the run to begin, or None if the run must have begun.

    Raises:
      RunError: the run has no servers, has not begun, has ended, or cannot have one more server at
        this address; or the server or the connection to the run failed.
    """
    # The modules are imported here, since they import gRPC, an optional dependency.
    from jaxdist.tables.training.host import HostedProcess, await_gate

    if wait_seconds is not None:
        note(f"this host waits for the run in {run}")
        await_gate(run, RunDirectory(run).lock, wait_seconds)
    strategy = _strategy(run, "strategy.servers", Hybrid, ParameterServer)
    settings = strategy.processes
    if settings.port and role == "server":
        raise RunError(f"{run}: {fixed_port(settings.port)}")
    stays = wait_seconds is not None
    given = {"module": processes.__name__, "role": role, "stays": stays}
    server = HostedProcess(run, settings, host, **given)
    signals = signal.SIGTERM, signal.SIGINT
    before = {one: signal.signal(one, lambda *_: server.leave()) for one in signals}
    try:
        what = "table server" if isinstance(strategy, Hybrid) else role
        note(f"this host offers {run} a {what} at {server.host}")
        server.serve()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    note(f"{server.name} has ended")
    told = {"run": str(run), "server": server.number, "host": server.host}
    write_json(json_file, told, what="server")


def run_of_workers(config: str, overrides: Sequence[str]) -> Path | None:
    """Return the run directory of a config with strategy.type parameter_server, or None."""
    document, found = load(config, overrides)
    if not isinstance(found.strategy, ParameterServer):
        return None
    return base_of(found.run.directory, document.path or Path(config))


def _strategy(
    run: Path, setting: str, *kinds: type[Hybrid] | type[ParameterServer]
) -> Hybrid | ParameterServer:
    """Return the strategy of a run that has servers and has not ended.

    Args:
      setting: the setting with which an error about a run that has ended says to resume the run.
      kinds: the strategies that the command is for.

    Raises:
      RunError: the run has another strategy, or has ended.
    """
    directory = RunDirectory(run)
    strategy = load(directory.config)[1].strategy
    if not isinstance(strategy, kinds):
        needed = " or ".join(kind.model_fields["type"].default for kind in kinds)
        raise RunError(
            f"{run} has strategy.type {strategy.type}: give a run with strategy.type {needed} to "
            "this command"
        )
    if not directory.lock.exists():
        raise RunError(
            f"the run in {run} has ended: continue it with jaxdist train --resume and {setting}"
        )
    return strategy


def _ask(run: Path, servers: int, patience_seconds: float) -> None:
    with os_errors_as(RunError, f"{run} cannot be written", "use the account of the run"):
        request = write_request(run, servers)
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
