"""`jaxdist import`: the conversion of a downloaded model to a run directory, without devices."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxdist.commands.evaluate import print_foreign_code
from jaxdist.config import Document, plain_yaml, validate
from jaxdist.config.files import read_json
from jaxdist.errors import DataError, RunError, os_errors_as
from jaxdist.experiment import ExperimentConfig, build, load
from jaxdist.interchange import gguf_files
from jaxdist.interchange.families import build_model
from jaxdist.interchange.leaves import BUFFERS, Leaf
from jaxdist.interchange.source import (
    CONFIG,
    PREPROCESSOR,
    SOURCE,
    TOKENIZER,
    Source,
    leaves_of,
    open_source,
    tensors_of,
)
from jaxdist.interchange.stream import Streamed, write_streamed
from jaxdist.interchange.table import match_with, read_table
from jaxdist.interchange.tokenizers import from_gguf, tokenizer_config, tokenizer_section
from jaxdist.interchange.write import check_free
from jaxdist.run.directory import RunDirectory, prepare_directory
from jaxdist.run.loading.model import is_downloaded_model
from jaxdist.types import JsonObject

NEW_DIRECTORY = "choose a new directory with --out"
WINDOW = 512
"""The largest length of sequences in the config of an imported run, in tokens."""


def import_model(
    path: Path, out: Path, overrides: Sequence[str] = (), *, console: Console
) -> JsonObject:
    """Write a run directory with a model's parameters as step 0, reading one tensor at a time.

    Args:
      path: a Hugging Face directory, or a GGUF file.
      out: the run directory to write.
      overrides: the settings that override the run's config.
      console: the console that prints the summary.

    Returns:
      The run directory, the family, and the numbers of parameters and tensors.

    Raises:
      JaxdistError: there is no model, its architecture is unknown, its tensors do not fit, or the
        run directory exists.
    """
    source, directory = open_source(path), RunDirectory(out.absolute())
    check_free(out, NEW_DIRECTORY)
    options = source.family.model(source.config)
    leaves = leaves_of(source, build_model(options, source.inputs))
    folder = directory.path / SOURCE
    texts = _texts(source)
    own = path / TOKENIZER
    if not source.is_gguf and own.is_file():
        tokenizer_section(source, own)  # The tokenizer is checked before any file is written.
    with os_errors_as(RunError, f"{folder} cannot be written", "name another directory with --out"):
        folder.mkdir(parents=True)
        for file in source.besides:
            shutil.copyfile(file, folder / file.name)
        (folder / CONFIG).write_text(json.dumps(_with_dtype(source, leaves), indent=2) + "\n")
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    # A run of the written config begins with the parameters that are imported here.
    values = config_values(source, folder, begin_with=directory.path)
    document, _ = load(values, overrides)
    metadata: JsonObject = {"imported": str(path)}
    tensors = len(source.tensors)
    return _written(
        directory, out, leaves, tensors, source.family.name, document, metadata, console
    )


def import_with_table(
    path: Path,
    out: Path,
    config: Path,
    table: Path,
    overrides: Sequence[str] = (),
    *,
    console: Console,
) -> JsonObject:
    """Write a run directory for a config, with the parameters of files that a table describes.

    Args:
      path: a directory of safetensors files, or a single file.
      out: the run directory to write.
      config: the config of the run, with a model of any type.
      table: the file of the table, as `jaxdist.interchange.table` describes it.
      overrides: the settings that override the config.
      console: the console that prints the summary.

    Returns:
      The run directory, the table, and the numbers of parameters and tensors.

    Raises:
      JaxdistError: the config or the table cannot be read, or the files do not fit the model.
    """
    check_free(out, NEW_DIRECTORY)
    directory = RunDirectory(out.absolute())
    document, loaded = load(config, overrides)
    print_foreign_code(document.values, console)
    tensors = tensors_of(path)
    model = build(loaded, document).program.model
    leaves = match_with(read_table(table), model, tensors, where=str(path))
    values: Any = copy.deepcopy(document.values)
    values.setdefault("checkpoint", {})["begin_with"] = {"run": str(directory.path)}
    if model.buffers:
        values["checkpoint"]["begin_with"]["parts"] = ["params", BUFFERS]
    written = Document(values), {"imported": str(path), "table": str(table)}
    validate(written[0], ExperimentConfig)
    return _written(directory, out, leaves, len(tensors), str(table), *written, console)


def _written(
    directory: RunDirectory,
    out: Path,
    leaves: Sequence[Leaf],
    tensors: int,
    family: str,
    document: Document,
    metadata: JsonObject,
    console: Console,
) -> JsonObject:
    """Write the checkpoint and the config of a run; print a summary and return it.

    Args:
      directory: the run directory.
      out: the path of the run directory, for the summary.
      leaves: the parameters and buffers.
      tensors: the number of tensors in the imported files.
      family: the name of the family, or of the table.
      document: the config of the run.
      metadata: the metadata of the checkpoint.
      console: the console that prints the summary.
    """
    write_streamed(directory.checkpoints, 0, _streamed(leaves), metadata)
    # The config is written last, since a directory with a config counts as a run that has begun.
    prepare_directory(directory, plain_yaml(document.values))
    count = sum(math.prod(leaf.filled) for leaf in leaves)
    console.print(f"model  {family}, {count:,} parameters in {tensors:,} tensors", soft_wrap=True)
    console.print(f"run    {out}", soft_wrap=True, markup=False)
    return {"run": str(out), "family": family, "parameters": count, "tensors": tensors}


def config_values(source: Source, folder: Path, *, begin_with: Path) -> JsonObject:
    """Return the values of a config that fine-tunes a model.

    Args:
      source: the model.
      folder: the folder of the model's tokenizer.
      begin_with: the run directory or model with the initial parameters.

    Raises:
      JaxdistError: the architecture is unknown, or the tokenizer does not fit the model.
    """
    data = synthetic_data(source)
    file = folder / TOKENIZER
    if file.is_file() and data["kind"] == "tokens":
        masking = {"masking": {}} if "masking" in data else {}
        section = tokenizer_section(source, file)
        data = {"type": "text", "window": data["window"], **masking, "tokenizer": section}
    scaling = _scaling(folder) if data.get("kind") == "images" else None
    if scaling is not None:
        data["transform"] = scaling
    # A downloaded model is loaded with its buffers. From a run, only the parameters are loaded,
    # unless the config names the buffers too.
    buffers = source.family.kind == "resnet" and not is_downloaded_model(begin_with)
    parts: JsonObject = {"parts": ["params", BUFFERS]} if buffers else {}
    return {
        "model": source.family.model(source.config),
        "data": data,
        "optim": {
            "type": "adamw",
            "learning_rate": 2e-5,
            "clip_norm": 1.0,
            "schedule": {"type": "cosine", "warmup_steps": 10, "end_fraction": 0.1},
        },
        "train": {"steps": 100, "batch_size": 8},
        "checkpoint": {"begin_with": {"run": str(begin_with), **parts}},
    }


def synthetic_data(source: Source) -> JsonObject:
    """Return a section `data` with random examples that have the shapes of a model's inputs."""
    inputs, kind = source.inputs, source.family.kind
    if inputs.image is not None:
        sizes = dict(zip(("height", "width", "channels"), inputs.image, strict=True))
        return {"type": "synthetic", "kind": "images", **sizes, "classes": inputs.classes}
    length: Any = source.config.get("max_position_embeddings", source.config.get("n_positions"))
    vocab: JsonObject = {"vocab_size": inputs.vocab_size}
    given: JsonObject = {"type": "synthetic", "window": min(WINDOW, length or WINDOW)}
    if inputs.classes:
        return {**given, "kind": "labelled_tokens", "classes": inputs.classes, **vocab}
    if kind == "bert":
        # Masked data adds the mask token to the vocabulary, so the config has one token less.
        vocab = {"vocab_size": inputs.vocab_size - 1, "masking": {}}
    return {**given, "kind": "tokens", **vocab}


def _scaling(folder: Path) -> JsonObject | None:
    """Return the transform of images that a model's preprocessor_config.json describes.

    The result is None if the folder does not have this file.

    Raises:
      DataError: the file cannot be read.
    """
    file = folder / PREPROCESSOR
    if not file.is_file():
        return None
    try:
        content: Any = read_json(file)
        mean, std = ([255 * float(x) for x in content[key]] for key in ("image_mean", "image_std"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} has no image_mean and image_std ({error!r}); download the file again, or "
            "delete the file"
        ) from error
    return {"type": "scale", "mean": mean, "std": std}


def _streamed(leaves: Sequence[Leaf]) -> Iterator[Streamed]:
    for leaf in leaves:

        def read(begin: int, end: int, leaf: Leaf = leaf) -> np.ndarray:
            rows = [slice(None)] * len(leaf.shape)
            rows[:1] = [slice(begin, end)][: len(rows)]
            return leaf.block(tuple(rows))

        name = leaf.name if leaf.name.startswith(f"{BUFFERS}/") else f"params/{leaf.name}"
        yield Streamed(name, leaf.shape, leaf.dtype, read, whole=not leaf.stacked)


def _with_dtype(source: Source, leaves: Sequence[Leaf]) -> JsonObject:
    """Return a model's config.json, with the dtype of the model's largest tensor as the dtype.

    `export` reads this dtype.
    """
    largest = max(leaves, key=lambda leaf: math.prod(leaf.filled))
    return {**source.config, "dtype": largest.tensors[0].dtype.name}


def _texts(source: Source) -> dict[str, str]:
    """Return the contents of the tokenizer files of a GGUF model, by name.

    For a directory, which already has these files, and for a model without a tokenizer, the result
    is empty.
    """
    if not source.is_gguf:
        return {}
    metadata = gguf_files.read(source.path).metadata
    own = source.path.parent / TOKENIZER
    if not own.is_file() and "tokenizer.ggml.model" not in metadata:
        return {}
    found = own.read_text(encoding="utf-8") if own.is_file() else from_gguf(source.path, metadata)
    return {TOKENIZER: found, "tokenizer_config.json": tokenizer_config(metadata)}
