"""The writer of a model's parameters as a Hugging Face directory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdist.config.files import read_json
from jaxdist.errors import ConfigError, DataError, RunError, os_errors_as
from jaxdist.interchange import safetensors
from jaxdist.interchange.families import (
    Described,
    architecture,
    describes,
    families_of,
    family_of,
)
from jaxdist.interchange.family import Inputs, Row
from jaxdist.interchange.layouts import WeightLayout
from jaxdist.interchange.leaves import EXPERT, names_of
from jaxdist.interchange.source import BESIDES, CONFIG, INDEX, SINGLE
from jaxdist.types import JsonObject

FILE_BYTES = 5_000_000_000
"""The largest number of bytes of tensors in a file; a larger model has several files."""
DTYPES: Mapping[str, np.dtype] = {
    "float32": safetensors.DTYPES["F32"],
    "float16": safetensors.DTYPES["F16"],
    "bfloat16": safetensors.DTYPES["BF16"],
}


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor: a parameter, a layer of a parameter, or an expert of a layer.

    Attributes:
      name: the name of the parameter.
      layer: the index of the layer, or None if the parameter is not stacked.
      shape: the shape of the part, without padding.
      layout: the layout of the tensor.
      expert: the index of the expert, or None if the tensor has all experts.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    layout: WeightLayout
    expert: int | None = None

    def held(self, value: np.ndarray) -> np.ndarray:
        """Return the value of this part, without padding.

        Args:
          value: the value of the parameter, or of its layer.
        """
        own = value if self.expert is None else value[self.expert]
        return own[tuple(slice(0, size) for size in self.shape)]


Value = Callable[[str, int | None], np.ndarray]
"""A function from (name of a parameter, index of a layer or None) to the parameter's value."""


def pieces_of(
    shapes: Mapping[str, tuple[int, ...]], stacked: frozenset[str], rows: Mapping[str, Row]
) -> dict[str, list[TensorPiece]]:
    """Return the parts of each tensor of a file, by the tensor's name.

    Args:
      shapes: the shape of each parameter by name, without padding.
      stacked: the names of the parameters whose first dim counts layers.
      rows: the entry of the table of names for each parameter.
    """
    found: dict[str, list[TensorPiece]] = {}
    for name, shape in shapes.items():
        row = rows[name]
        layers = shape[0] if name in stacked else None
        experts = shape[layers is not None] if EXPERT in row.tensor else None
        outer = (layers is not None) + (experts is not None)
        for i, tensor in enumerate(names_of(row.tensor, layers, experts)):
            layer, expert = divmod(i, experts) if experts else (i, None)
            given = (None if layers is None else layer, shape[outer:])
            piece = TensorPiece(name, *given, WeightLayout(row.layout, row.part), expert)
            found.setdefault(tensor, []).append(piece)
    return found


def assembled(pieces: Sequence[TensorPiece], value: Value, dtype: np.dtype) -> np.ndarray:
    """Return a tensor, given its parts.

    Args:
      value: the function that returns the value of a parameter; see `Value`.
      dtype: the dtype of the tensor.
    """
    out = np.empty(pieces[0].layout.file_shape(pieces[0].shape), dtype)
    for piece in pieces:
        piece.layout.fill(out, piece.held(value(piece.name, piece.layer)))
    return out


def config_of(model: Described, inputs: Inputs, folder: Path | None, length: int) -> JsonObject:
    """Return the config.json of a model.

    If the config.json in `folder` describes the model, its content is returned, except that
    `architectures` names the class that has a head. Otherwise a new config.json is made.

    Args:
      inputs: the sizes of the data that the model was trained on.
      folder: the folder of the model's tokenizer, which may also have a config.json, or None
        without a tokenizer.
      length: the length of the sequences that the model was trained on.

    Raises:
      ConfigError: no family has the model's options.
      DataError: the folder's config.json cannot be read.
    """
    own = _own(folder)
    if own is not None and describes(own, model):
        family = family_of(own, where=CONFIG)
        if family.inputs(own) == inputs._replace(image=family.inputs(own).image):
            # The written model has a head, even if the source was saved without its head.
            named = family.config(architecture(model))["architectures"]
            return {**own, "architectures": named}
    fitting = families_of(model)
    if not fitting:
        raise ConfigError(
            "no model family of Hugging Face has the options of this model, so the model cannot be "
            "written for transformers. docs/guides/hugging-face.md lists the options of each family"
        )
    made = fitting[0].config(architecture(model)) | fitting[0].written_inputs(inputs)
    ids: JsonObject = {"bos_token_id": None, "eos_token_id": None}
    return {"max_position_embeddings": length, **ids, **made} if inputs.vocab_size else made


def write_directory(
    out: Path,
    config: JsonObject,
    tensors: Mapping[str, Sequence[TensorPiece]],
    value: Value,
    *,
    dtype: str,
    folder: Path | None,
) -> None:
    """Write a model's directory: config.json, the tensors, and the tokenizer's files.

    Args:
      config: the content of config.json.
      tensors: the parts of each tensor.
      value: the function that returns the value of a parameter; see `Value`.
      dtype: the name of the dtype of the tensors.
      folder: the folder with the tokenizer's files, or None to write no tokenizer.

    Raises:
      RunError: the directory has files, or cannot be written.
    """
    check_free(out)
    held = DTYPES[dtype]
    shapes = {name: p[0].layout.file_shape(p[0].shape) for name, p in tensors.items()}
    parts = _files(shapes, held.itemsize)
    with os_errors_as(RunError, f"{out} cannot be written", "name another directory"):
        out.mkdir(parents=True, exist_ok=True)
        besides = [] if folder is None else [folder / name for name in BESIDES if name != CONFIG]
        for file in besides:
            if file.is_file():
                shutil.copyfile(file, out / file.name)
        # Older versions of transformers read torch_dtype.
        text = json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}, indent=2)
        (out / CONFIG).write_text(text + "\n", encoding="utf-8")
        for file, names in parts.items():
            entries = [(name, shapes[name], held) for name in names]
            safetensors.write(out / file, entries, lambda n: assembled(tensors[n], value, held))
        if len(parts) > 1:
            placed = {name: file for file, names in parts.items() for name in names}
            total = sum(map(math.prod, shapes.values())) * held.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            (out / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def check_free(out: Path, remedy: str = "choose a new directory") -> None:
    """Check that a directory to write is new or empty.

    Args:
      remedy: the advice in the error message.

    Raises:
      RunError: the directory has files, or it is a file.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists already: {remedy}")


def _files(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in the order of `shapes`.

    Args:
      itemsize: the bytes of an element.
    """
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        own = math.prod(shape) * itemsize
        if files[-1] and size + own > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": n for i, n in enumerate(files, 1)}


def _own(folder: Path | None) -> JsonObject | None:
    if folder is None or not (folder / CONFIG).is_file():
        return None
    failed = f"{folder / CONFIG}, whose content an export copies, cannot be read"
    with os_errors_as(DataError, failed, "repair the file, or delete it", also=(ValueError,)):
        found = read_json(folder / CONFIG)
    return found if isinstance(found, dict) and "model_type" in found else None
