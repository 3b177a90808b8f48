"""The command that starts the processes of a run on several hosts, and restarts lost processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared
from jaxdist.runtime.rendezvous import JOIN_SECONDS


def agent(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    rendezvous: Annotated[
        str,
        typer.Option(
            help="Rendezvous of the hosts: a shared directory, redis://HOST:PORT or "
            "etcd://HOST:PORT."
        ),
    ],
    least: Annotated[
        int, typer.Option("--min", min=1, help="Smallest number of hosts to start with.")
    ] = 1,
    most: Annotated[
        int, typer.Option("--max", min=1, help="Largest number of hosts; further hosts wait.")
    ] = 64,
    processes: Annotated[
        int, typer.Option("--processes-per-host", min=1, help="Number of processes on this host.")
    ] = 1,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="NAME/ADDRESS",
            help="Name or address at which other hosts reach this host; by default the host name.",
        ),
    ] = None,
    devices: shared.Devices = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the secret that all hosts share; by default the rendezvous creates one."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest complete checkpoint.")
    ] = False,
    restarts: Annotated[
        int,
        typer.Option(
            min=1,
            help="End the run after this many losses in a row without a new step.",
        ),
    ] = 3,
    join_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds to wait for enough hosts.")
    ] = JOIN_SECONDS,
    json_file: shared.JsonFile = None,
) -> None:
    """Train CONFIG on all hosts that run this command. Hosts may join and leave."""
    extra = shared.prepare_devices(config, overrides, devices)
    from jaxdist.cli import fork_server
    from jaxdist.elastic.hosts.start import agent_of

    say = partial(shared.console().print, soft_wrap=True, markup=False)
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
        say=say,
        fork_module=fork_server.__name__,
        json_file=json_file,
    )
    code = found.run()
    if code:
        raise typer.Exit(code)
