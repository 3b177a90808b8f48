"""The command line: parse, call, print.

Nothing here imports jax before the environment is prepared, so that `--help` starts no backend and
fake devices can still be asked for.
"""

from __future__ import annotations

import sys

import typer

from jaxdist.cli import measurement, pipelines, preparation, programs, runs, shared
from jaxdist.cli.measurement import ConfigOrCommand
from jaxdist.cli.output import lasting_output

app = typer.Typer(
    name="jaxdist",
    help="Train any JAX model on any mesh by changing a config.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
pipeline_app = typer.Typer(no_args_is_help=True, help="Look at pipeline schedules.")
study_app = typer.Typer(
    cls=ConfigOrCommand,
    no_args_is_help=True,
    help="Compare many runs of one config: `jaxdist study CONFIG` is `study compare CONFIG`.",
)

app.command()(preparation.init)
app.command()(runs.train)
app.command("eval")(runs.evaluate)
app.command()(runs.generate)
app.command()(programs.parity)
app.command()(preparation.doctor)
app.command()(programs.inspect)
app.command()(programs.audit)
app.command()(measurement.bench)
app.command()(measurement.simulate)
config_app.command()(preparation.show)
config_app.command()(preparation.schema)
data_app.command()(preparation.tokenize)
pipeline_app.command()(pipelines.show)
pipeline_app.command()(pipelines.compare)
pipeline_app.command()(pipelines.check)
study_app.command("compare")(measurement.compare)
study_app.command("batch-scaling")(measurement.batch_scaling)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(pipeline_app, name="pipeline")
app.add_typer(study_app, name="study")

_COMPUTING = ("train", "eval", "generate", "bench", "study", "simulate")


def main() -> None:
    """Entry point of the `jaxdist` command."""
    if sys.argv[1:2] and sys.argv[1] in _COMPUTING:
        from jaxdist.runtime.environment import restart_with_huge_pages

        restart_with_huge_pages()
    with lasting_output():
        try:
            app()
        except (Exception, KeyboardInterrupt) as error:
            sys.exit(shared.report(error))
