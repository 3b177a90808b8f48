"""The commands that precede a run, for its configuration, its data and its machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxdist.cli import shared


def show(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    json_file: shared.JsonFile = None,
) -> None:
    """Print all settings of the resolved config with their origins, and the derived values."""
    shared.prepare_devices(config, overrides, None)
    from jaxdist.config import dotted, provenance, render_rows
    from jaxdist.experiment import explain_config, load

    console = shared.console()
    document, instance = load(config, overrides or [])
    rows = provenance(document, instance)
    typer.echo(render_rows(rows, console.width))
    derived = [*explain_config(instance, document)]
    for line in derived:
        typer.echo(f"derived: {line}")
    origins = {dotted(row.path): str(row.origin) for row in rows}
    values = instance.model_dump(mode="json")
    shared.write_result(json_file, "configuration", config=values, origins=origins, derived=derived)


def init(
    name: Annotated[str | None, typer.Argument()] = None,
    *,
    to: Path = Path("configs"),
    json_file: shared.JsonFile = None,
) -> None:
    """Write copies of the shipped configurations, which can be run and changed.

    Args:
      name: Shipped config such as gpt/quickstart, or a folder of shipped configs such as gpt; by
        default all configs.
      to: Folder into which the configs are written.
    """
    from jaxdist.commands.init import init as write

    files = write(name, to, console=shared.console())
    shared.write_result(json_file, "list of files", files=[str(file) for file in files])


def eject(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    out: Path | None = None,
    keep: Literal["data"] | None = None,
    devices: shared.Devices = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Write CONFIG's training as a readable file of plain JAX, without jaxdist.

    The file has only the model, loss, optimizer, shardings and communication of CONFIG, to read and
    to change. The file trains to the same losses.

    Args:
      out: Python file to write; by default the program is printed.
      keep: The part of the training that the file imports from jaxdist.
    """
    extra = shared.prepare_devices(config, overrides, devices)
    from jaxdist.commands.eject.eject import eject as write

    text = write(config, extra, keep=keep, out=out)
    lines = len(text.splitlines())
    typer.echo(text if out is None else f"file   {out}, {lines} lines\n", nl=False)
    shared.write_result(
        json_file, "ejected file", file=None if out is None else str(out), lines=lines, text=text
    )


def schema(*, json_file: shared.JsonFile = None) -> None:
    """Print the JSON schema of a configuration, for editors."""
    from jaxdist.runtime import environment

    environment.prepare()
    from jaxdist.config import json_schema
    from jaxdist.experiment import ExperimentConfig

    text = json_schema(ExperimentConfig)
    typer.echo(text)
    shared.write_result(json_file, "schema", config=json.loads(text))


def tokenize(
    out: Path,
    files: Annotated[list[str] | None, typer.Argument()] = None,
    *,
    vocab_size: int = 4096,
    heldout_fraction: Annotated[float, typer.Option(min=0, max=0.99)] = 0.05,
    json_file: shared.JsonFile = None,
) -> None:
    """Train a BPE tokenizer, for `data.tokenizer: {type: bpe, file: OUT}`.

    Args:
      out: File tokenizer.json to write.
      files: Globs of text files to learn from; by default the files of Python's standard library.
      vocab_size: Number of tokens to learn.
      heldout_fraction: Fraction of the text to hold out; the config's data.heldout_fraction by
        default.
    """
    from jaxdist.commands.tokenize import tokenize as learn

    learned = learn(
        out,
        files or [],
        vocab_size=vocab_size,
        heldout_fraction=heldout_fraction,
        console=shared.console(),
    )
    shared.write_result(json_file, "figures of the tokenizer", file=str(out), **learned)


def doctor(
    devices: shared.Devices = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Check the requirements of a run: versions, devices, memory and caches.

    Args:
      as_json: Print JSON.
    """
    from jaxdist.doctor import main as examine

    raise typer.Exit(examine(devices=devices, as_json=as_json))
