"""The command line, which parses arguments, calls the functions of commands, and prints.

No module of this package imports jax before the environment is prepared. `--help` therefore starts
no backend, and a command can still request fake devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer
from typer.core import TyperGroup

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
from jaxdist.cli.output import lasting_output, silence
from jaxdist.cli.parsing import DocumentedCommand, GroupWithDefault

_NAMES: Mapping[Callable[..., None], str] = {
    runs.evaluate: "eval",
    models.import_model: "import",
    models.export_model: "export",
    measurement.batch_scaling: "batch-scaling",
    measurement.run_study: "run",
}
"""The name of each command whose function has another name."""


def _group(
    name: str,
    help: str,
    *functions: Callable[..., None],
    cls: type[TyperGroup] = TyperGroup,
) -> typer.Typer:
    group = typer.Typer(
        name=name, cls=cls, no_args_is_help=True, help=help, pretty_exceptions_enable=False
    )
    for function in functions:
        group.command(_NAMES.get(function), cls=DocumentedCommand)(function)
    return group


app = _group(
    "jaxdist",
    "Train any JAX model on any mesh by changing a config.",
    preparation.init,
    preparation.eject,
    runs.train,
    agents.agent,
    runs.evaluate,
    models.import_model,
    models.export_model,
    models.adopt,
    runs.generate,
    runs.replay,
    runs.servers,
    runs.report,
    runs.drill,
    programs.parity,
    preparation.doctor,
    programs.inspect,
    programs.audit,
    programs.prove,
    planning.plan,
    measurement.bench,
)
for group in (
    _group(
        "launch",
        "Submit a training run to a cluster: `jaxdist launch CONFIG --on ENGINE`.",
        *(launching.job, launching.explain, launching.status, launching.logs, launching.stop),
        cls=GroupWithDefault,
    ),
    _group(
        "config",
        "Show a resolved configuration, or the schema of all settings.",
        *(preparation.show, preparation.schema),
    ),
    _group("data", "Prepare data.", preparation.tokenize),
    _group(
        "pipeline",
        "Show and check pipeline schedules.",
        *(pipelines.show, pipelines.compare, pipelines.check),
    ),
    _group(
        "study",
        "Compare many runs of a config; `jaxdist study CONFIG` is short for `study compare "
        "CONFIG`.",
        *(measurement.compare, measurement.batch_scaling, measurement.run_study),
        measurement.review,
        cls=GroupWithDefault,
    ),
    _group(
        "simulate",
        "Simulate in virtual time; `jaxdist simulate CONFIG` is short for `simulate servers "
        "CONFIG`.",
        *(measurement.servers, measurement.choice, measurement.fleet),
        cls=GroupWithDefault,
    ),
):
    app.add_typer(group, name=group.info.name)


def _print_version(asked: bool) -> None:
    if asked:
        from jaxdist.runtime.environment import versions

        found = versions(("jaxdist", "jax", "python"))
        typer.echo(", ".join(f"{name} {found[name] or 'not installed'}" for name in found))
        raise typer.Exit


@app.callback()
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


_COMPUTING = {"train", "agent", "drill", "eval", "generate", "replay", "bench", "study", "simulate"}


def main() -> None:
    """Run the `jaxdist` command, and exit with its exit code."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    # Only these commands compute enough to gain from huge pages, which need a restart of the
    # process.
    if command in _COMPUTING:
        from jaxdist.runtime.environment import restart_with_huge_pages

        restart_with_huge_pages()
    # The option is also accepted after the command, where most users write it.
    if "--quiet" in sys.argv[1:]:
        sys.argv = [word for word in sys.argv if word != "--quiet"]
        silence()
    with lasting_output():
        try:
            app()
        except (Exception, KeyboardInterrupt) as error:
            sys.exit(shared.print_error(error))
