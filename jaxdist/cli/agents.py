"""Commands that start the processes of a run, and begin anew what is lost."""

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
        typer.Option(help="Where hosts meet: a directory that all see, or redis://HOST:PORT."),
    ],
    least: Annotated[
        int, typer.Option("--min", min=1, help="Nothing begins with fewer hosts.")
    ] = 1,
    most: Annotated[int, typer.Option("--max", min=1, help="More hosts wait.")] = 64,
    processes: Annotated[
        int, typer.Option("--processes-per-host", min=1, help="Processes of this host.")
    ] = 1,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="NAME/ADDRESS",
            help="This host for people, and where the others reach it; its own name by default.",
        ),
    ] = None,
    devices: shared.Devices = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with a token that all hosts share; else the rendezvous has one."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest whole checkpoint.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=1, help="Losses in a row without a new step that end it.")
    ] = 3,
    join_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds to wait for enough hosts.")
    ] = JOIN_SECONDS,
) -> None:
    """Train as CONFIG says on all hosts that run this command, as they come and go."""
    extra = shared.prepare(config, overrides, devices)
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
    )
    code = found.run()
    if code:
        raise typer.Exit(code)
