"""The commands that read and write models of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxdist.cli import shared


def import_model(
    model: Annotated[Path, typer.Argument(metavar="DIR")],
    overrides: shared.Overrides = None,
    *,
    out: Annotated[Path, typer.Option()],
    config: Path | None = None,
    table: Path | None = None,
    base: Path | None = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Convert a downloaded model to a run directory, for train, eval, generate and export.

    Args:
      model: Hugging Face directory or GGUF file of the model, or (with --base) a directory of PEFT
        adapters.
      out: The run directory to write.
      config: Config whose model is your own code; needs --table.
      table: YAML file with the tensor's name for each parameter of --config's model.
      base: Run directory of the base model to which the adapters belong.
    """
    from jaxdist.runtime import environment

    environment.prepare()
    from jaxdist.commands.adapters import import_adapters
    from jaxdist.commands.import_model import import_model as run
    from jaxdist.commands.import_model import import_with_table
    from jaxdist.errors import ConfigError

    extra, console = list(overrides or []), shared.console()
    if base is not None:
        found = import_adapters(model, base, out, extra, console=console)
    elif config is not None and table is not None:
        found = import_with_table(model, out, config, table, extra, console=console)
    elif config is None and table is None:
        found = run(model, out, extra, console=console)
    else:
        raise ConfigError(
            "--config and --table must be given together: give both, or give neither for a model "
            "of a supported family"
        )
    shared.write_result(json_file, "import", **found)


def export_model(
    run: shared.Run,
    out: Path,
    overrides: shared.Overrides = None,
    *,
    to: Literal["hf", "gguf", "peft"] = "hf",
    dtype: str | None = None,
    step: shared.CheckpointStep = None,
    devices: shared.Devices = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Write the model of a run for transformers or llama.cpp, or the adapters of a run for PEFT.

    Args:
      out: The directory, or the GGUF file, to write.
      to: Format: hf or gguf for the model, peft for the model's adapters.
      dtype: Dtype of the weights: float32, bfloat16 or float16; by default the dtype of the
        imported model.
    """
    extra = shared.prepare_run(run, overrides, devices)
    from jaxdist.commands.adapters import export_adapters
    from jaxdist.commands.export_model import export_model as write

    if to == "peft":
        found = export_adapters(run, out, extra, step=step, console=shared.console())
    else:
        form = {"step": step, "dtype": dtype, "gguf": to == "gguf"}
        found = write(run, out, extra, **form, console=shared.console())
    shared.write_result(json_file, "export", **found)


def adopt(
    model: Annotated[Path, typer.Argument(metavar="DIR")],
    overrides: shared.Overrides = None,
    *,
    on: Annotated[str, typer.Option()],
    out: Path | None = None,
    top: Annotated[int, typer.Option(min=1, max=50)] = 3,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    json_file: shared.JsonFile = None,
) -> None:
    """Write the config of the fastest plan that trains a downloaded model on a slice.

    This command reads only the model's config. A run of the written config loads the weights of the
    model.

    Args:
      model: Hugging Face directory with config.json, or a GGUF file.
      on: TPU slice to plan for, such as v5p:4x4x4.
      out: Config file to write; by default NAME.yaml, where NAME is the name of the directory or
        file.
      top: Number of plans to rank by predicted step time.
      compiled: Rank the plans by their compiled programs, or only by formulas.
    """
    from jaxdist.runtime import environment

    environment.prepare(fake_devices=1)
    from jaxdist.planner.adopt import adopt as choose

    found = choose(
        model,
        on,
        out or Path(f"{model.absolute().stem}.yaml"),
        list(overrides or []),
        top=top,
        compiled=compiled,
        console=shared.console(),
    )
    shared.write_result(json_file, "adopted plan", **found)
