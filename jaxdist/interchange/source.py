"""The files of a downloaded model: its configuration, its tensors, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxdist.config.files import read_json
from jaxdist.errors import DataError, os_errors_as
from jaxdist.interchange import gguf_files, safetensors
from jaxdist.interchange.families import family_of
from jaxdist.interchange.family import Family, Inputs, Row
from jaxdist.interchange.leaves import BUFFERS, Leaf, match
from jaxdist.interchange.tensors import Tensor
from jaxdist.models.functional import Functional
from jaxdist.models.tuning.lora import PREFIX
from jaxdist.types import JsonObject

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PREPROCESSOR, ADAPTERS = "preprocessor_config.json", "adapter_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BESIDES = (
    CONFIG, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", PREPROCESSOR,
)  # fmt: skip
"""The names of the files that describe a model, or its tokenizer, next to the tensors."""
SOURCE = "source"
"""The name of the folder with the files of `BESIDES` in the run directory of an imported model."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Source:
    """The files of a model, of which only the headers are read.

    Attributes:
      path: the directory, or the GGUF file.
      config: the content of config.json, or the equivalent metadata of a GGUF file.
    """

    path: Path
    config: JsonObject

    @property
    def family(self) -> Family:
        """The family to which the model belongs.

        Raises:
          ConfigError: the architecture has no table.
        """
        return family_of(self.config, where=str(self.path))

    @property
    def is_gguf(self) -> bool:
        """Whether the source is a GGUF file, with other names and layouts than a directory."""
        return self.path.is_file()

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name, from the headers of all files.

        Raises:
          DataError: a file is missing or damaged, or it is a pickle.
        """
        if self.is_gguf:
            return gguf_files.read(self.path).tensors
        found = _tensors(self.path)
        for older, present in self.family.older.items():
            found = {name.replace(older, present): tensor for name, tensor in found.items()}
        return found

    def rows(self) -> Mapping[str, Row]:
        """Return the family's table of names, with the tensors' names in these files."""
        if self.is_gguf:
            return gguf_files.rows(self.family, self.tensors)
        rows, prefix = self.family.table(self.config), self.family.prefix
        if any(name.startswith(prefix) for name in self.tensors):
            return rows
        # If a model was saved without its head, the names of its tensors have no prefix.
        return {
            own: row._replace(tensor=row.tensor.removeprefix(prefix)) for own, row in rows.items()
        }

    @property
    def besides(self) -> list[Path]:
        """The files of `BESIDES` that the directory has."""
        return [] if self.is_gguf else [f for n in BESIDES if (f := self.path / n).is_file()]

    @property
    def inputs(self) -> Inputs:
        """The sizes of the model's inputs and predictions.

        Raises:
          ConfigError: config.json lacks a size, or a size is not valid.
        """
        return self.family.inputs(self.config)


def leaves_of(source: Source, model: Functional) -> list[Leaf]:
    """Match a model's parameters, without adapters, with a source's tensors; no element is read.

    Raises:
      JaxdistError: the family is unknown, or the tensors do not fit the model.
    """
    tied = () if "output" in model.params else ("lm_head.weight",)
    own = {n: tree for n, tree in model.params.items() if n != PREFIX or not model.adapters}
    return match(
        own | ({BUFFERS: model.buffers} if model.buffers else {}), model.stacked,
        model.dims, source.rows(), source.tensors, ignored=(*source.family.ignored, *tied),
        vocab_size=source.inputs.vocab_size or None, where=str(source.path),
    )  # fmt: skip


def open_source(path: Path) -> Source:
    """Open a Hugging Face directory or a GGUF file.

    Raises:
      DataError: the path has no model, or its config.json cannot be read.
    """
    # The path may be too long, or unreadable.
    with os_errors_as(DataError, f"{path} cannot be read", "give a directory or a GGUF file"):
        is_gguf = path.is_file() and gguf_files.is_gguf(path)
    if is_gguf:
        return Source(path, gguf_files.read(path).config())
    if path.is_file() or not path.is_dir():
        what = "is a file of another kind" if path.is_file() else "does not exist"
        raise DataError(
            f"{path} {what}: give the directory of a model (with {CONFIG} and safetensors), or a "
            "GGUF file"
        )
    file = path / CONFIG
    if not file.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        more = f"; {ggufs[0]} is a GGUF file: give that file" if ggufs else ""
        if (path / ADAPTERS).is_file():
            more = f", only {ADAPTERS}; adapters need --base, the run of their base model"
        raise DataError(
            f"{path} is not a model: it has no {CONFIG}{more or '; give the directory of a model'}"
        )
    again = "download the file again"
    with os_errors_as(DataError, f"{file} cannot be read", again, also=(ValueError,)):
        config: Any = read_json(file)
    if not isinstance(config, dict):
        raise DataError(f"{file} holds no mapping; download the file again")
    return Source(path, config)


def tensors_of(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors by name, from a directory of safetensors, one such file, or a GGUF file.

    Raises:
      DataError: files are missing or damaged.
    """
    if path.is_file():
        read = gguf_files.is_gguf(path)
        return gguf_files.read(path).tensors if read else safetensors.read_header(path)
    if not path.is_dir():
        raise DataError(f"{path} does not exist: give a directory with safetensors")
    return _tensors(path)


def _tensors(path: Path) -> dict[str, Tensor]:
    files = _files(path)
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in safetensors.read_header(file).items():
            if name in found:
                raise DataError(
                    f"{name!r} is in {found[name].file.name} and in {file.name} of {path}: keep "
                    "only one of the files there"
                )
            found[name] = tensor
    return found


def _files(path: Path) -> list[Path]:
    """List the files with tensors: the files that an index names, or else all safetensors files."""
    index = path / INDEX
    if index.is_file():
        malformed = (ValueError, TypeError, KeyError, AttributeError)
        again = "download the file again"
        with os_errors_as(DataError, f"{index} cannot be read", again, also=malformed):
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [path / str(name) for name in names]
        # Files in other folders are refused too, since the index may be from the network.
        lacking = [
            name
            for name, file in zip(names, files, strict=True)
            if file.parent != path or not file.is_file()
        ]
        if lacking:
            wrong = ", ".join(map(str, lacking))
            raise DataError(
                f"{index} names {wrong}, which {path} does not have; download the file again"
            )
        return files
    files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if files:
        return files
    refuse_pickles(path, "the model's safetensors", "transformers")
    raise DataError(f"{path} has no safetensors: download {SINGLE} too")


def refuse_pickles(path: Path, instead: str, package: str) -> None:
    """Refuse a directory that has no safetensors if it has pickled tensors.

    Args:
      instead: the files that the message asks for.
      package: the package that wrote the pickle.

    Raises:
      DataError: the directory has a file with a suffix of pickles.
    """
    pickled = sorted(f.name for f in path.iterdir() if f.suffix in PICKLED)
    if pickled:
        raise DataError(
            f"{path} has its tensors in {pickled[0]}, a pickle. Reading a pickle can run any "
            f"code, so jaxdist never reads pickles: download {instead}, or convert the file where "
            f"you trust it (save_pretrained(DIR) of {package})"
        )
