"""Commands that read and write models of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
