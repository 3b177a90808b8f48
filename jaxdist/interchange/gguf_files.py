"""The reader of GGUF files: metadata as a config.json, and tensors of float or quantized types.

Source: the description of the format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxdist.errors import DataError, os_errors_as
from jaxdist.interchange.families import LLAMA_ROWS
from jaxdist.interchange.family import Family, Row, table_rows
from jaxdist.interchange.tensors import Tensor
from jaxdist.models.rotary import Llama3Scaling, frequencies
from jaxdist.types import JsonObject

MAGIC = b"GGUF"
ALIGNMENT = 32
FLOATS: Mapping[int, np.dtype] = {
    0: np.dtype("float32"),
    1: np.dtype("float16"),
    28: np.dtype("float64"),
    30: np.dtype(ml_dtypes.bfloat16),
}
QUANTIZED: Mapping[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}
"""The name, elements of a block, and bytes of a block of each quantized type, by its number."""
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""The code of `struct` for each type of scalars, by its number."""
_STRING, _ARRAY = 8, 9

NAMES: Mapping[str, str] = {own: row.tensor for own, row in table_rows("gguf").items()}
"""The name of each parameter's tensor. In every family, matrices have the layouts of llama."""
_INTERLEAVED = {
    "blocks/attention/query": "(H h 2) D -> D H (2 h)",
    "blocks/attention/key": "(K h 2) D -> D K (2 h)",
    "blocks/attention/query_bias": "(H h 2) -> H (2 h)",
    "blocks/attention/key_bias": "(K h 2) -> K (2 h)",
}
"""The layouts of the architecture llama, in which the features of a rotated pair are neighbours."""


@dataclass(frozen=True)
class Gguf:
    """The header of a GGUF file: its metadata, and the positions of its tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        """The name of the file's architecture, which may be the name of a family."""
        return str(self.metadata.get("general.architecture"))

    @cached_property
    def _own(self) -> Mapping[str, Any]:
        start = f"{self.architecture}."
        return {k.removeprefix(start): v for k, v in self.metadata.items() if k.startswith(start)}

    def config(self) -> JsonObject:
        """Return the config.json that describes the file's model.

        Raises:
          DataError: the file lacks a size of its model, or its rotary scaling is unknown.
        """
        own, name = self._own, self.architecture
        try:
            layers, width = own["block_count"], own["embedding_length"]
            mlp, heads = own["feed_forward_length"], own["attention.head_count"]
            vocab = self.tensors["token_embd.weight"].shape[0]
        except KeyError as error:
            raise DataError(
                f"{self.path}: the GGUF file of {name!r} lacks {error}, which a language model "
                "needs; use a file with the model's weights"
            ) from error
        tied = "output.weight" not in self.tensors
        ids = {
            f"{which}_token_id": self.metadata.get(f"tokenizer.ggml.{which}_token_id")
            for which in ("bos", "eos")
        }
        common = {"model_type": name, "vocab_size": vocab, "tie_word_embeddings": tied, **ids}
        length = own.get("context_length")
        if name == "gpt2":
            sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_inner": mlp}
            epsilon = own.get("attention.layer_norm_epsilon", 1e-5)
            return {**common, **sizes, "n_positions": length, "layer_norm_epsilon": _short(epsilon)}
        return {
            **common,
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": own.get("attention.head_count_kv", heads),
            "head_dim": own.get("attention.key_length", width // heads),
            "intermediate_size": mlp,
            "rms_norm_eps": _short(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
            "max_position_embeddings": length,
            "attention_bias": name == "llama" and "blk.0.attn_q.bias" in self.tensors,
            "hidden_act": "silu",
            **self._rope(width // heads),
        }

    def _rope(self, head_dim: int) -> JsonObject:
        theta = _short(self._own.get("rope.freq_base", 10_000.0))
        kind = self._own.get("rope.scaling.type", "none")
        factors = self.tensors.get("rope_freqs.weight")
        if factors is not None:
            return {"rope_theta": theta, "rope_scaling": self._llama3(theta, factors)}
        if kind == "none":
            return {"rope_theta": theta}
        factor = _short(self._own.get("rope.scaling.factor", 1.0))
        return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, "factor": factor}}

    def _llama3(self, theta: float, factors: Tensor) -> JsonObject:
        """Return the settings of a rotary scaling, derived from its factors in a tensor.

        The file has the factors, but not the settings of the scaling.

        Args:
          theta: the base of the frequencies; see `jaxdist.models.rotary.frequencies`.
          factors: the tensor of the factors.
        """
        half = factors.shape[0]
        frequency = frequencies(theta, 2 * half)
        bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        for factor in (8.0, 32.0, 16.0, 4.0):
            made = Llama3Scaling(type="llama3", factor=factor, original_length=8192, **bands)
            if np.allclose(frequency / made.scaled(frequency), factors.open(), rtol=1e-3):
                length = {"original_max_position_embeddings": 8192}
                return {"rope_type": "llama3", "factor": factor, **bands, **length}
        raise DataError(
            f"{self.path}: rope_freqs.weight is not the scaling of a Llama 3 model; import the "
            "model's safetensors, whose config.json names the scaling"
        )


def is_gguf(path: Path) -> bool:
    """Return whether a file begins with the signature of GGUF."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def rows(family: Family, tensors: Collection[str]) -> dict[str, Row]:
    """Return a family's table of names, with the names and layouts of GGUF files.

    Args:
      tensors: the names of the tensors in the file.

    Raises:
      DataError: the family is an encoder, or gemma, whose norms have other values in GGUF files
        than in files of transformers.
    """
    if family.kind != "gpt":
        raise DataError(
            f"a model of the family {family.name} cannot be read from a GGUF file: import its "
            "safetensors"
        )
    if family.name == "gemma":
        raise DataError(
            "a GGUF file of the family gemma stores 1 + scale for each norm, a sum that rounds the "
            "scale: import the model's safetensors"
        )
    made = {}
    for own, name in NAMES.items():
        layout = (
            LLAMA_ROWS[own].layout
            if own in LLAMA_ROWS
            else family.table({}).get(own, Row("", "D")).layout
        )
        if family.name == "llama":
            layout = _INTERLEAVED.get(own, layout)
        made[own] = Row(name, layout)
    if "blk.0.attn_qkv.weight" in tensors:
        for i, which in enumerate(("query", "key", "value")):
            qkv = "blk.{layer}.attn_qkv"
            made[f"blocks/attention/{which}"] = Row(f"{qkv}.weight", "(3 H d) D -> D H d", i)
            made[f"blocks/attention/{which}_bias"] = Row(f"{qkv}.bias", "(3 H d) -> H d", i)
    return made


def read(path: Path) -> Gguf:
    """Read the header of a GGUF file, and no element of a tensor.

    Raises:
      DataError: the file is truncated or malformed, or a tensor has an unknown type.
    """
    with os_errors_as(DataError, f"{path} cannot be read", "give a GGUF file that you may read"):
        try:
            with path.open("rb") as file:
                return _read(path, file, path.stat().st_size)
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError, KeyError) as error:
            raise DataError(
                f"{path} is a truncated or malformed GGUF file ({error}); download the file again"
            ) from error


def _read(path: Path, file: BinaryIO, size: int) -> Gguf:
    _, version, tensor_count, pairs = struct.unpack("<4sIQQ", file.read(24))
    if version not in (2, 3):
        raise DataError(
            f"{path} is in version {version} of GGUF, and jaxdist reads the versions 2 and 3: "
            "convert the model again with a current llama.cpp, or import its safetensors"
        )
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = _string(file, size)
        metadata[key] = _value(file, _one(file, "I"), size)
    # Counts and lengths are bounded by the file's size: a damaged count must not fill the memory.
    entries = [_entry(file, size) for _ in range(min(tensor_count, size))]
    align = metadata.get("general.alignment", ALIGNMENT)
    start = -(-file.tell() // align) * align
    tensors = {}
    for name, shape, kind, offset in entries:
        tensor = _tensor(path, name, shape, kind, start + offset)
        end = tensor.offset + tensor.stored_bytes
        if end > size:
            raise DataError(
                f"{path} is truncated: {name!r} ends at byte {end:,} of {size:,}; "
                "download the file again"
            )
        tensors[name] = tensor
    return Gguf(path, metadata, tensors)


def _one(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]


def _string(file: BinaryIO, size: int) -> str:
    length = _one(file, "Q")
    if length > size:
        raise struct.error(f"a text of {length} bytes")
    return file.read(length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    if kind == _STRING:
        return _string(file, size)
    if kind != _ARRAY:
        return _one(file, _SCALARS[kind])
    of, count = _one(file, "I"), _one(file, "Q")
    if count > size:
        raise struct.error(f"an array of {count} values")
    if of in _SCALARS:
        form = f"<{count}{_SCALARS[of]}"
        return list(struct.unpack(form, file.read(struct.calcsize(form))))
    return [_value(file, of, size) for _ in range(count)]


def _entry(file: BinaryIO, size: int) -> tuple[str, tuple[int, ...], int, int]:
    name, ndim = _string(file, size), _one(file, "I")
    if ndim > 8:
        raise struct.error(f"a tensor of {ndim} dims")
    # In the file, the dim whose elements are adjacent comes first, so the order of the dims is
    # reversed.
    shape = struct.unpack(f"<{ndim}Q", file.read(8 * ndim))[::-1]
    return name, shape, _one(file, "I"), _one(file, "Q")


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
    count = math.prod(shape)
    if kind in FLOATS:
        dtype = FLOATS[kind]
        return Tensor(name, shape, dtype, path, offset, count * dtype.itemsize)
    if kind not in QUANTIZED:
        known = ", ".join([*map(str, FLOATS.values()), *(q[0] for q in QUANTIZED.values())])
        raise DataError(
            f"{path}: {name!r} has the unknown quantization number {kind} (known: {known}); use "
            "a file of F16, BF16 or Q8_0"
        )
    quantization, block, block_bytes = QUANTIZED[kind]
    stored = count // block * block_bytes
    decode = _DECODERS.get(quantization) or partial(_by_package, path, kind, quantization)
    return Tensor(name, shape, np.dtype("float32"), path, offset, stored, decode)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Return the 32 numbers of 4 bits that are stored in each block of 16 bytes.

    The low halves of all 16 bytes come first, and then the high halves.
    """
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _scale(blocks: np.ndarray, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].view(np.float16).astype(np.float32)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 34)
    return _scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 18)
    return _scale(blocks, 0) * (_halves(blocks[:, 2:]) - 8)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 20)
    return _scale(blocks, 0) * _halves(blocks[:, 4:]) + _scale(blocks, 2)


_DECODERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}


def _by_package(path: Path, kind: int, name: str, raw: np.ndarray) -> np.ndarray:
    try:
        # The package is imported here, because gguf is an optional dependency.
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise DataError(
            f"{path} has tensors of {name}, which the package gguf decodes: pip install "
            "'jaxdist[gguf]', or use a file of F16, BF16 or Q8_0"
        ) from error
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))


def _short(number: float) -> float:
    """Return the shortest decimal that rounds to a float32: 1e-5, not 9.99999974e-06.

    >>> _short(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(number)))
