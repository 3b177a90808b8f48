"""The writer of a model's parameters as a GGUF file with a floating-point type."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.errors import ConfigError, RunError, os_errors_as
from jaxdist.interchange.families import LLAMA_ROWS
from jaxdist.interchange.family import Family, Row
from jaxdist.interchange.gguf_files import ALIGNMENT, FLOATS, MAGIC, rows
from jaxdist.interchange.source import TOKENIZER
from jaxdist.interchange.tokenizers import pre_of
from jaxdist.interchange.write import DTYPES, TensorPiece, Value, assembled
from jaxdist.models.gpt import GptConfig
from jaxdist.types import JsonObject

WRITTEN = ("llama", "qwen2", "qwen3", "gpt2")
"""The families that can be written to GGUF files, from which programs read all their options."""


def gguf_rows(family: Family, model: GptConfig) -> Mapping[str, Row]:
    """Return a family's table of names, with the names and layouts of a GGUF file.

    Raises:
      ConfigError: the family, or an option of the model, cannot be written to GGUF files.
    """
    if family.name not in WRITTEN or model.attention_window or model.rope_scaling:
        why = "attention_window or rope_scaling" if family.name in WRITTEN else family.name
        raise ConfigError(
            f"--to gguf cannot write {why}: it writes only {', '.join(WRITTEN)}, without "
            "attention_window or rope_scaling. Use --to hf"
        )
    joined = family.rows is not LLAMA_ROWS
    return rows(family, ["blk.0.attn_qkv.weight"] if joined else ())


def metadata_of(family: Family, model: GptConfig, length: int, vocab_size: int) -> JsonObject:
    """Return the sizes and other settings of a model as metadata of a GGUF file."""
    arch = family.name
    return {
        "general.architecture": arch,
        f"{arch}.vocab_size": vocab_size,
        f"{arch}.block_count": model.layers,
        f"{arch}.context_length": model.positions or length,
        f"{arch}.embedding_length": model.embed,
        f"{arch}.feed_forward_length": model.mlp_width,
        f"{arch}.attention.head_count": model.heads,
        f"{arch}.attention.head_count_kv": model.kv_heads or model.heads,
        f"{arch}.attention.key_length": model.head_dim,
        f"{arch}.attention.value_length": model.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": model.norm_epsilon,
        f"{arch}.attention.layer_norm_epsilon": model.norm_epsilon,
        f"{arch}.rope.freq_base": model.rope_theta,
        f"{arch}.rope.dimension_count": model.head_dim,
    }


def tokenizer_metadata(folder: Path | None, config: Mapping[str, Any]) -> JsonObject:
    """Return the tokens and merges of a tokenizer.json as metadata of a GGUF file.

    The metadata is empty if `folder` is None or has no tokenizer.json.

    Raises:
      ConfigError: the tokenizer is not a byte-pair tokenizer, or the pattern by which it splits
        text has no name in GGUF.
    """
    if folder is None or not (folder / TOKENIZER).is_file():
        return {}
    content: Any = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    pre = pre_of(content)
    if content["model"]["type"] != "BPE" or pre is None:
        raise ConfigError(
            f"{folder / TOKENIZER} has no byte pairs, or splits text in a way that --to gguf "
            "does not write, such as add_prefix_space: true; use --to hf"
        )
    added: Any = {one["id"]: one for one in content.get("added_tokens") or ()}
    held = {i: t for t, i in content["model"]["vocab"].items()}
    held |= {i: one["content"] for i, one in added.items()}
    count = int(config["vocab_size"])
    # The types of GGUF are 1 for a normal token, 3 for a control token, and 5 for an unused number.
    kinds = [
        3 if i in added and added[i]["special"] else 1 if i in held else 5 for i in range(count)
    ]
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    found: JsonObject = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [held.get(i, f"[PAD{i}]") for i in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    for which in ("bos", "eos"):
        number = config.get(f"{which}_token_id")
        if isinstance(number, int):
            found[f"tokenizer.ggml.{which}_token_id"] = number
    return found


def write_gguf(
    out: Path,
    metadata: JsonObject,
    tensors: Mapping[str, Sequence[TensorPiece]],
    value: Value,
    *,
    dtype: str,
) -> None:
    """Write a GGUF file, in which vectors are float32, as programs that read such files expect.

    Args:
      tensors: the parts of each tensor.
      value: the function that returns the value of a parameter; see
        `jaxdist.interchange.write.Value`.
      dtype: the name of the dtype of tensors that are not vectors.

    Raises:
      RunError: the file exists, or cannot be written.
    """
    if out.exists():
        raise RunError(f"{out} exists already: name another file")
    numbers = {held: number for number, held in FLOATS.items()}
    entries, offset = [], 0
    for name, pieces in tensors.items():
        shape = pieces[0].layout.file_shape(pieces[0].shape)
        held = DTYPES[dtype] if len(shape) > 1 else DTYPES["float32"]
        entries.append((name, shape, held, offset))
        offset += -(-math.prod(shape) * held.itemsize // ALIGNMENT) * ALIGNMENT
    head = struct.pack("<4sIQQ", MAGIC, 3, len(entries), len(metadata))
    head += b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    for name, shape, held, begin in entries:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += _text(name) + dims + struct.pack("<IQ", numbers[held], begin)
    with os_errors_as(RunError, f"{out} cannot be written", "name another file"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("wb") as file:
            file.write(head + b"\0" * (-len(head) % ALIGNMENT))
            for name, _, held, _ in entries:
                raw = np.ascontiguousarray(assembled(tensors[name], value, held)).reshape(-1)
                file.write(raw.view(np.uint8).data)
                file.write(b"\0" * (-raw.nbytes % ALIGNMENT))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    # The first element shows the type. Only the array of merges can be empty, and merges are texts.
    text = not value or isinstance(value[0], str)
    items = (_text(one) if text else struct.pack("<i", one) for one in value)
    return struct.pack("<IIQ", 9, 8 if text else 5, len(value)) + b"".join(items)
