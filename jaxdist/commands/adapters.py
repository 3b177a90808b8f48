"""`jaxdist import --base` and `jaxdist export --to peft`: adapters in the file format of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxdist.checkpoint.parts import BeginWith
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.commands.evaluate import open_run
from jaxdist.commands.import_model import NEW_DIRECTORY
from jaxdist.config import plain_yaml
from jaxdist.errors import ConfigError, RunError, os_errors_as
from jaxdist.experiment import build, load
from jaxdist.interchange.adapters import (
    SETTINGS,
    open_adapters,
    read_adapters,
    settings_of,
    write_adapters,
)
from jaxdist.interchange.families import families_of, family_of
from jaxdist.interchange.family import Row
from jaxdist.interchange.source import CONFIG, SOURCE
from jaxdist.interchange.write import check_free
from jaxdist.models.gpt import GptConfig
from jaxdist.run.directory import RunDirectory, prepare_directory
from jaxdist.run.loading.begin import begin_with
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject


def import_adapters(
    folder: Path, base: Path, out: Path, overrides: Sequence[str] = (), *, console: Console
) -> JsonObject:
    """Write a run directory, in which a base run continues with adapters.

    Step 0 of the new run has the parameters of the base run and the adapters of the folder.

    Args:
      folder: a directory with adapters in the file format of PEFT.
      base: the directory of the base run.
      out: the run directory to write.
      overrides: the settings that override the config of the base run.
      console: the console that prints the results.

    Returns:
      The run directory, and the number of adapted kernels.

    Raises:
      JaxdistError: there are no adapters or no base run, the adapters are for another base model,
        or the run directory exists.
    """
    files, directory = open_adapters(folder), RunDirectory(out.absolute())
    check_free(out, NEW_DIRECTORY)
    if not RunDirectory(base).occupied:
        raise RunError(f"--base {base} is not a run directory: import the base model first")
    document, config = load(RunDirectory(base).config)
    rows = _rows(config.model, base)
    # The values are copied, since the document of the base run must not change.
    values: Any = json.loads(json.dumps(document.values))
    values["model"] |= {"lora": settings_of(files, rows)}
    section = {**(values.get("checkpoint") or {}), "begin_with": {"run": str(directory.path)}}
    document, config = load({**values, "checkpoint": section}, overrides)
    experiment = build(config, document)
    program = experiment.program
    read = read_adapters(files, program.model.adapters, rows)
    state, _ = begin_with(program, BeginWith(run=str(base)), say=console.print)
    given = {f"params/{name}": array for name, array in read.items()}
    # The arrays of PEFT have the shapes of the model. The state is therefore converted from the
    # form in which the plan stores it, and back.
    own = program.home.used(state)
    leaves = [given.get(name, leaf) for name, leaf in flatten_with_names(own)]
    shardings = jax.tree.map(lambda shape: shape.sharding, program.state_shapes)
    filled = program.home.stored(jax.tree.unflatten(jax.tree.structure(own), leaves))
    state = program.home.to_files(jax.device_put(filled, shardings))
    with CheckpointStore(
        directory.checkpoints, keep=1, keep_best=False, on_event=console.print
    ) as store:
        metadata = {"imported": str(folder)}
        store.save(0, state, metadata=metadata, shapes=program.own_shapes)
        store.wait()
    # The config is written last, since a directory with a config counts as a run that has begun.
    prepare_directory(directory, plain_yaml(document.values))
    count = len(program.model.adapters)
    console.print(f"run    {out}: adapters of {count} kernels", soft_wrap=True, markup=False)
    return {"run": str(out), "kernels": count}


def export_adapters(
    run: Path,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    console: Console,
) -> JsonObject:
    """Write a run's adapters in the file format of PEFT.

    Args:
      run: the run directory.
      out: the directory to write.
      overrides: the settings that override the run's config.
      step: the step of the checkpoint, or None for the newest checkpoint.
      console: the console that prints the results.

    Returns:
      The directory, and the number of adapted kernels.

    Raises:
      JaxdistError: there is no such run, the run has no adapters, or the directory exists.
    """
    experiment, restored = open_run(run, overrides, step=step, console=console)
    model, program = experiment.config.model, experiment.program
    if model.lora is None:
        raise ConfigError(
            f"{run} has no adapters (model.lora): export the whole model with --to hf"
        )
    check_free(out)
    state: Any = restored.state
    params = program.home.used.params(program.evaluated(state))
    values = {name: np.asarray(leaf) for name, leaf in flatten_with_names(params)}
    rows, adapters = _rows(model, run), program.model.adapters
    with os_errors_as(RunError, f"{out} cannot be written", "name another directory"):
        out.mkdir(parents=True, exist_ok=True)
        given = (model.lora, adapters, rows, values)
        settings = write_adapters(out, *given, base=str(_source(run)))
        (out / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    console.print(f"files  {out}: adapters of {len(adapters)} kernels", soft_wrap=True)
    return {"directory": str(out), "kernels": len(adapters)}


def _source(run: Path) -> Path:
    return run / SOURCE if (run / SOURCE).is_dir() else run


def _rows(model: Any, run: Path) -> Mapping[str, Row]:
    """Return the names of a model's tensors in the files of Hugging Face.

    If the run was imported, the imported model determines the names. Otherwise a family that fits
    the model determines the names.

    Raises:
      ConfigError: no family of Hugging Face fits the model.
    """
    if not isinstance(model, GptConfig):
        raise ConfigError(
            f"model.type {model.type} cannot be converted to PEFT's names: adapters can be written "
            "only for model.type gpt. Export the merged model instead (--to hf)"
        )
    file = run / SOURCE / CONFIG
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        return family_of(config, where=str(file)).table(config)
    fitting = families_of(model.model_copy(update={"lora": None}))
    if not fitting:
        raise ConfigError(
            "no model of Hugging Face's transformers has the options of this model, so its "
            "adapters cannot be written for PEFT. docs/guides/hugging-face.md lists the options "
            "that each family has"
        )
    return fitting[0].table({})
