"""`jaxdist export`: the parameters of a run as files for other frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxdist.commands.evaluate import open_run
from jaxdist.commands.export_tables import export_recommender
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment
from jaxdist.interchange.families import Described, family_of
from jaxdist.interchange.family import Inputs
from jaxdist.interchange.leaves import BUFFERS
from jaxdist.interchange.source import CONFIG, SOURCE
from jaxdist.interchange.write import DTYPES, config_of, pieces_of, write_directory
from jaxdist.interchange.write_gguf import gguf_rows, metadata_of, tokenizer_metadata, write_gguf
from jaxdist.models.gpt import GptConfig
from jaxdist.models.recommend.tables import RecommenderConfig
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject


def export_model(
    run: Path,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    dtype: str | None = None,
    gguf: bool = False,
    console: Console,
) -> JsonObject:
    """Write a run's parameters as a Hugging Face directory, or as a GGUF file.

    Args:
      run: the run directory.
      out: the directory or file to write.
      overrides: the settings that override the run's config.
      step: the step of the checkpoint, or None for the newest checkpoint.
      dtype: the dtype of the tensors. None means the dtype of the imported model, or float32 if the
        model was not imported.
      gguf: whether to write a GGUF file instead of a Hugging Face directory.
      console: the console that prints the results.

    Returns:
      The directory or file, the family, the dtype, and the number of tensors.

    Raises:
      JaxdistError: there is no such run, or no family describes the run's model.
    """
    experiment, restored = open_run(run, overrides, step=step, console=console)
    model, program = experiment.config.model, experiment.program
    if isinstance(model, RecommenderConfig) and not gguf:
        found = export_recommender(experiment, restored, run, out, dtype)
        console.print(f"model  {model.type}, {found['tensors']} tensors", soft_wrap=True)
        console.print(f"files  {out}", soft_wrap=True, markup=False)
        return found
    if not isinstance(model, Described):
        raise ConfigError(
            f"model.type {model.type} cannot be exported, since jaxdist does not know the names of "
            "its tensors: export supports gpt, bert, vit, resnet and, without --to, mf and dlrm"
        )
    if gguf and not isinstance(model, GptConfig):
        raise ConfigError(
            f"--to gguf supports only model.type gpt, but model.type is {model.type}: use --to hf"
        )
    inputs, state = _inputs(experiment), restored.state
    tokenizer: Any = getattr(experiment.config.data, "tokenizer", None)
    file = getattr(tokenizer, "file", None)
    folder = None if file is None else Path(file).expanduser().parent
    folder = run / SOURCE if (run / SOURCE).is_dir() else folder
    config = config_of(model, inputs, folder, experiment.units_per_example)
    family = family_of(config, where=CONFIG)
    held = dtype or str(config.get("dtype", config.get("torch_dtype", "float32")))
    if held not in DTYPES:
        raise ConfigError(f"--dtype {held} is unknown: use one of {', '.join(DTYPES)}")
    # Adapters are added to their kernels, since these files cannot contain adapters.
    params = program.model.merged(program.home.used.params(program.evaluated(state)))
    values = dict(flatten_with_names(params))
    if program.model.buffers:
        kept = flatten_with_names(state.buffers)
        values |= {f"{BUFFERS}/{name}": leaf for name, leaf in kept}
    shapes = _shapes(values, program.model.dims, inputs.vocab_size)
    rows = family.table(config)
    tensors = pieces_of(shapes, program.model.stacked, rows)

    def value(name: str, layer: int | None) -> np.ndarray:
        return np.asarray(values[name] if layer is None else values[name][layer])

    if gguf and isinstance(model, GptConfig):
        tensors = pieces_of(shapes, program.model.stacked, gguf_rows(family, model))
        length = int(str(config.get("max_position_embeddings") or 0))
        metadata = metadata_of(family, model, length, inputs.vocab_size)
        metadata |= tokenizer_metadata(folder, config)
        write_gguf(out, metadata, tensors, value, dtype=held)
    else:
        write_directory(out, config, tensors, value, dtype=held, folder=folder)
    console.print(f"model  {family.name}, {len(tensors):,} tensors of {held}", soft_wrap=True)
    console.print(f"files  {out}", soft_wrap=True, markup=False)
    return {"directory": str(out), "family": family.name, "dtype": held, "tensors": len(tensors)}


def _inputs(experiment: Experiment) -> Inputs:
    """Return the sizes of the data on which the run was trained."""
    image = experiment.program.batch.get("image")
    return Inputs(
        experiment.dataset.vocab_size or 0,
        experiment.dataset.classes or 0,
        None if image is None else (image.shape[1], image.shape[2], image.shape[3]),
    )


def _shapes(
    values: Mapping[str, Any], dims: Mapping[str, Any], vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter and buffer, without the padding of the vocabulary."""
    return {
        name: tuple(
            vocab_size if dim == "vocab" else size
            for size, dim in zip(leaf.shape, dims.get(name) or [None] * leaf.ndim, strict=True)
        )
        for name, leaf in values.items()
    }
