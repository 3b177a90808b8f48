"""The commands that start, query and end jobs on clusters."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared

LAUNCHES = Path("runs/launches")
Folder = Annotated[Path, typer.Argument(help="Folder that `jaxdist launch` wrote for the job.")]


def job(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    on: str = "local",
    nodes: shared.AtLeastOne = 1,
    processes: Annotated[int, typer.Option("--processes-per-node", min=1)] = 1,
    servers: shared.AtLeastZero = 0,
    settings: Annotated[list[str] | None, typer.Option("--set")] = None,
    name: str | None = None,
    dry_run: bool = False,
    json_file: shared.JsonFile = None,
) -> None:
    """Train CONFIG on a cluster. Every process runs the same `jaxdist train --resume`.

    With --servers, further machines run `jaxdist servers RUN --here`.

    Args:
      on: Engine that starts the processes: local, slurm, mpi, ray, gke or tpu-vm.
      nodes: Number of machines.
      processes: Number of processes on each machine.
      servers: Number of further machines on which the servers of strategy.servers run; with 0,
        process 0 starts the servers.
      settings: A setting of the engine, such as partition=gpu; may be repeated.
      name: Name of the job; by default the name of the config file.
      dry_run: Print the commands and files of the submission without running the commands.
    """
    from jaxdist import cli
    from jaxdist.config import read, validate
    from jaxdist.experiment import ExperimentConfig
    from jaxdist.launch.build import engine
    from jaxdist.launch.contract import Job
    from jaxdist.launch.servers import check_workers, with_servers
    from jaxdist.launch.submit import launch
    from jaxdist.train.strategy.config import ParameterServer

    one = engine(on, settings or [])
    extra = tuple(overrides or [])
    strategy = None
    # With the engines gke and tpu-vm, the config may exist only on the machines of the job, where
    # it cannot be checked now.
    if os.path.exists(config) or on not in ("gke", "tpu-vm"):
        strategy = validate(read(config, extra), ExperimentConfig).strategy
    called = name or config.stem.replace("_", "-")
    what = Job(str(config), extra, called, cli.__name__, nodes, processes, Path.cwd())
    if isinstance(strategy, ParameterServer):
        what = replace(what, apart=True)
        check_workers(what, one, strategy)
    if servers:
        what = with_servers(what, one, servers)
    if dry_run:
        one.check(what)
        text = one.render(what, LAUNCHES.absolute() / called).text()
        typer.echo(text)
        shared.write_result(
            json_file, "submission", on=on, folder=None, job=None, exit_code=None, text=text
        )
        return
    begun, code = launch(one, settings or [], what, LAUNCHES, shared.say)
    started = {"folder": str(begun.folder), "job": begun.identity or None, "exit_code": code}
    shared.write_result(json_file, "launch", on=on, **started, text=None)
    raise typer.Exit(code)


def explain(*, json_file: shared.JsonFile = None) -> None:
    """Print the detected schedulers and engines, and the environment variables that show them."""
    from jaxdist.launch.explain import as_json
    from jaxdist.launch.explain import explain_launch as lines

    for line in lines(os.environ):
        typer.echo(line)
    shared.write_result(json_file, "explanation", **as_json(os.environ))


def _ask(what: str, folder: Path, json_file: Path | None) -> None:
    from jaxdist.launch.submit import ask

    done = ask(what, folder, capture=json_file is not None)
    if done.stdout is not None:
        typer.echo(done.stdout, nl=False)
    shared.write_result(
        json_file,
        "answer",
        folder=str(folder),
        command=[*done.args],
        exit_code=done.returncode,
        output=done.stdout,
    )
    raise typer.Exit(done.returncode)


def status(folder: Folder, *, json_file: shared.JsonFile = None) -> None:
    """Print the status of a job, as the engine reports it."""
    _ask("status", folder, json_file)


def logs(folder: Folder, *, json_file: shared.JsonFile = None) -> None:
    """Print the last lines of the output of a job's processes."""
    _ask("logs", folder, json_file)


def stop(folder: Folder, *, json_file: shared.JsonFile = None) -> None:
    """End a job."""
    _ask("stop", folder, json_file)
