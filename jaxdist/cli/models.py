"""Commands that read and write models of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxdist.cli import shared


def import_model(
    model: Annotated[
        Path, typer.Argument(help="A Hugging Face directory, or a GGUF file.", metavar="DIR")
    ],
    overrides: shared.Overrides = None,
    *,
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
    json_file: shared.JsonFile = None,
) -> None:
    """Turn a downloaded model into a run directory, for train, eval, generate and export."""
    from jaxdist.runtime import environment

    environment.prepare()
    from jaxdist.commands.import_model import import_model as run

    found = run(model, out, list(overrides or []), console=shared.console())
    shared.write_result(json_file, "import", **found)


def export_model(
    run: shared.Run,
    out: Annotated[Path, typer.Argument(help="The directory to write.")],
    overrides: shared.Overrides = None,
    *,
    to: Annotated[Literal["hf"], typer.Option(help="The form of the files.")] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; the imported model's by default."),
    ] = None,
    step: shared.CheckpointStep = None,
    devices: shared.Devices = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Write a run's model as files that transformers loads."""
    del to
    extra = shared.prepare_run(run, overrides, devices)
    from jaxdist.commands.export_model import export_model as write

    found = write(run, out, extra, step=step, dtype=dtype, console=shared.console())
    shared.write_result(json_file, "export", **found)
