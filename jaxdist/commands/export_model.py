"""`jaxdist export`: the parameters of a run in the files of other frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxdist.commands.evaluate import open_run
from jaxdist.errors import ConfigError
from jaxdist.interchange.families import family_of
from jaxdist.interchange.source import CONFIG, SOURCE
from jaxdist.interchange.write import DTYPES, config_of, pieces_of, write_directory
from jaxdist.interchange.write_gguf import gguf_rows, metadata_of, tokenizer_metadata, write_gguf
from jaxdist.models.gpt import GptConfig
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject, Params


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
      step: step of the checkpoint; None takes the newest checkpoint.
      dtype: dtype of the tensors; None takes the dtype of the imported model, or else float32.

    Returns:
      The directory or file, the family, the dtype, and the number of tensors.

    Raises:
      JaxdistError: there is no such run, or no family describes the run's model.
    """
    experiment, restored = open_run(run, overrides, step=step, console=console)
    model, program = experiment.config.model, experiment.program
    if not isinstance(model, GptConfig):
        raise ConfigError(f"model.type {model.type} has no table of names: export takes gpt")
    vocab_size, state = experiment.dataset.vocab_size or 0, restored.state
    tokenizer: Any = getattr(experiment.config.data, "tokenizer", None)
    file = getattr(tokenizer, "file", None)
    folder = None if file is None else Path(file).expanduser().parent
    folder = run / SOURCE if (run / SOURCE).is_dir() else folder
    config = config_of(model, vocab_size, folder, experiment.units_per_example)
    family = family_of(config, where=CONFIG)
    held = dtype or str(config.get("dtype", config.get("torch_dtype", "float32")))
    if held not in DTYPES:
        raise ConfigError(f"--dtype {held}: there are {', '.join(DTYPES)}")
    # Adapters are added to their kernels, since these files have no place for adapters.
    params = program.model.merged(program.home.used_params(program.evaluated(state)))
    values = dict(flatten_with_names(params))
    shapes = _shapes(params, program.model.dims, vocab_size)
    rows = gguf_rows(family, model) if gguf else family.rows
    tensors = pieces_of(shapes, program.model.stacked, rows)

    def value(name: str, layer: int | None) -> np.ndarray:
        return np.asarray(values[name] if layer is None else values[name][layer])

    if gguf:
        length = int(str(config.get("max_position_embeddings") or 0))
        metadata = metadata_of(family, model, length, vocab_size)
        metadata |= tokenizer_metadata(folder, config)
        write_gguf(out, metadata, tensors, value, dtype=held)
    else:
        write_directory(out, config, tensors, value, dtype=held, folder=folder)
    console.print(f"model  {family.name}, {len(tensors):,} tensors of {held}", soft_wrap=True)
    console.print(f"files  {out}", soft_wrap=True, markup=False)
    return {"directory": str(out), "family": family.name, "dtype": held, "tensors": len(tensors)}


def _shapes(params: Params, dims: Any, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name, without the padding of the vocabulary."""
    return {
        name: tuple(
            vocab_size if dim == "vocab" else size
            for size, dim in zip(leaf.shape, dims[name] or [None] * leaf.ndim, strict=True)
        )
        for name, leaf in flatten_with_names(params)
    }
