"""The command that starts the processes of a run on several hosts, and restarts lost processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared
from jaxdist.runtime.rendezvous import JOIN_SECONDS


def agent(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    rendezvous: Annotated[str, typer.Option()],
    least: Annotated[int, typer.Option("--min", min=1)] = 1,
    most: Annotated[int, typer.Option("--max", min=1)] = 64,
    processes: Annotated[int, typer.Option("--processes-per-host", min=1)] = 1,
    host: Annotated[str | None, typer.Option(metavar="NAME/ADDRESS")] = None,
    devices: shared.Devices = None,
    token_file: Path | None = None,
    resume: bool = False,
    restarts: shared.AtLeastOne = 3,
    join_timeout: shared.AtLeastOne = JOIN_SECONDS,
    json_file: shared.JsonFile = None,
) -> None:
    """Train CONFIG on all hosts that run this command. Hosts may join and leave.

    Args:
      rendezvous: Rendezvous of the hosts: a shared directory, redis://HOST:PORT or
        etcd://HOST:PORT.
      least: Smallest number of hosts to start with.
      most: Largest number of hosts; further hosts wait.
      processes: Number of processes on this host.
      host: Name or address at which other hosts reach this host; by default the host name.
      token_file: File with the secret that all hosts share; by default the rendezvous creates one.
      resume: Resume from the newest complete checkpoint.
      restarts: End the run after this many consecutive failures without a new step between them.
      join_timeout: Seconds to wait for enough hosts.
    """
    extra = shared.prepare_devices(config, overrides, devices)
    from jaxdist.cli import fork_server
    from jaxdist.elastic.hosts.start import agent_of

    found = agent_of(
        config,
        extra,
        rendezvous=rendezvous,
        least=least,
        most=most,
        processes=processes,
        host=host,
        token_file=token_file,
        resume=resume,
        restarts=restarts,
        seconds=join_timeout,
        say=shared.say,
        fork_module=fork_server.__name__,
        json_file=json_file,
    )
    raise typer.Exit(found.run())
