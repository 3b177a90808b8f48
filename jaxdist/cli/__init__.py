"""The command line, which parses arguments, calls the functions of commands, and prints.

No module of this package imports jax before the environment is prepared. `--help` therefore starts
no backend, and a command can still request fake devices.
"""

from __future__ import annotations

import itertools
import sys
from typing import Annotated

import typer

from jaxdist.cli import (
    agents,
    launching,
    measurement,
    models,
    pipelines,
    planning,
    preparation,
    programs,
    runs,
    shared,
)
from jaxdist.cli.measurement import ConfigOrCommand, ConfigOrFleet
from jaxdist.cli.output import lasting_output, silence

app = typer.Typer(
    name="jaxdist",
    help="Train any JAX model on any mesh by changing a config.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    no_args_is_help=True, help="Show a resolved configuration, or the schema of all settings."
)
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
pipeline_app = typer.Typer(no_args_is_help=True, help="Show and check pipeline schedules.")
study_app = typer.Typer(
    cls=ConfigOrCommand,
    no_args_is_help=True,
    help=(
        "Compare many runs of a config; `jaxdist study CONFIG` is short for `study compare CONFIG`."
    ),
)
simulate_app = typer.Typer(
    cls=ConfigOrFleet,
    no_args_is_help=True,
    help=(
        "Simulate in virtual time; `jaxdist simulate CONFIG` is short for `simulate servers "
        "CONFIG`."
    ),
)

launch_app = typer.Typer(
    cls=launching.ConfigOrQuestion,
    no_args_is_help=True,
    help="Submit a training run to a cluster: `jaxdist launch CONFIG --on ENGINE`.",
)


def _print_version(asked: bool) -> None:
    if asked:
        from jaxdist.runtime.environment import versions

        found = versions(("jaxdist", "jax", "python"))
        typer.echo(", ".join(f"{name} {found[name] or 'not installed'}" for name in found))
        raise typer.Exit


@app.callback(help=app.info.help)
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print errors only, on standard error.")
    ] = False,
) -> None:
    """Declare the options that precede a command.

    `--quiet` is only declared here; `main` handles this option before the command is parsed.
    """


app.command()(preparation.init)
app.command()(preparation.eject)
app.command()(runs.train)
app.command()(agents.agent)
app.command("eval")(runs.evaluate)
app.command("import")(models.import_model)
app.command("export")(models.export_model)
app.command()(models.adopt)
app.command()(runs.generate)
app.command()(runs.replay)
app.command()(runs.servers)
app.command()(runs.report)
app.command()(runs.drill)
app.command()(programs.parity)
app.command()(preparation.doctor)
app.command()(programs.inspect)
app.command()(programs.audit)
app.command()(programs.prove)
app.command()(planning.plan)
app.command()(measurement.bench)
config_app.command()(preparation.show)
config_app.command()(preparation.schema)
data_app.command()(preparation.tokenize)
pipeline_app.command()(pipelines.show)
pipeline_app.command()(pipelines.compare)
pipeline_app.command()(pipelines.check)
study_app.command("compare")(measurement.compare)
study_app.command("batch-scaling")(measurement.batch_scaling)
study_app.command("run")(measurement.run_study)
study_app.command("review")(measurement.review)
simulate_app.command("servers")(measurement.servers)
simulate_app.command("choice")(measurement.choice)
simulate_app.command("fleet")(measurement.fleet)
for ask in (launching.job, launching.explain, launching.status, launching.logs, launching.stop):
    launch_app.command()(ask)
app.add_typer(launch_app, name="launch")
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(pipeline_app, name="pipeline")
app.add_typer(study_app, name="study")
app.add_typer(simulate_app, name="simulate")

_COMPUTING = (
    "train",
    "agent",
    "drill",
    "eval",
    "generate",
    "replay",
    "bench",
    "study",
    "simulate",
)


def main() -> None:
    """Run the `jaxdist` command, and exit with its exit code."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    # Only these commands compute enough to gain from huge pages, which need a restart of the
    # process.
    if command in _COMPUTING:
        from jaxdist.runtime.environment import restart_with_huge_pages

        restart_with_huge_pages()
    if "--quiet" in itertools.takewhile(lambda word: word.startswith("-"), sys.argv[1:]):
        silence()
    with lasting_output():
        try:
            app()
        except (Exception, KeyboardInterrupt) as error:
            sys.exit(shared.print_error(error))
