"""Commands that start jobs on clusters, and query them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared
from jaxdist.cli.measurement import ConfigOrCommand

LAUNCHES = Path("runs/launches")
Folder = Annotated[Path, typer.Argument(help="Folder of the launch.")]


class ConfigOrQuestion(ConfigOrCommand):
    """A group in which a config is launched, and other words query a launch."""

    default = "job"


def job(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    on: Annotated[str, typer.Option(help="local, slurm, mpi, ray, gke or tpu-vm.")] = "local",
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    processes: Annotated[
        int,
        typer.Option("--processes-per-node", min=1, help="Number of processes on each machine."),
    ] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of the engine, such as partition=gpu; may be repeated."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the job; by default the config file's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the submission without running it.")
    ] = False,
) -> None:
    """Train CONFIG on a cluster, with the same `jaxdist train --resume` in every process."""
    from jaxdist import cli
    from jaxdist.config import read, validate
    from jaxdist.experiment import ExperimentConfig
    from jaxdist.launch.build import engine
    from jaxdist.launch.contract import Job
    from jaxdist.launch.submit import launch

    one = engine(on, settings or [])
    extra = tuple(overrides or [])
    # these engines have the config where they run
    if os.path.exists(config) or on not in ("gke", "tpu-vm"):
        validate(read(config, extra), ExperimentConfig)
    called = name or config.stem.replace("_", "-")
    what = Job(str(config), extra, called, cli.__name__, nodes, processes, Path.cwd())
    if dry_run:
        one.check(what)
        typer.echo(one.render(what).at(LAUNCHES.absolute() / called).text())
        return
    say = partial(shared.console().print, soft_wrap=True, markup=False)
    code = launch(one, settings or [], what, LAUNCHES, say)
    if code:
        raise typer.Exit(code)


def explain() -> None:
    """Print the schedulers and engines detected here, and the variables that reveal them."""
    from jaxdist.launch.explain import explain as lines

    for line in lines(os.environ):
        typer.echo(line)


def _ask(what: str, folder: Path) -> None:
    from jaxdist.launch.submit import ask

    code = ask(what, folder)
    if code:
        raise typer.Exit(code)


def status(folder: Folder) -> None:
    """Query the engine for the status of a job."""
    _ask("status", folder)


def logs(folder: Folder) -> None:
    """Print the end of the output of a job's processes."""
    _ask("logs", folder)


def stop(folder: Folder) -> None:
    """End a job."""
    _ask("stop", folder)
