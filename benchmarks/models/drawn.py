"""Small models of every family with random weights, and the results of transformers for them.

`python -m benchmarks.models.drawn PYTHON FILE` writes the golden file of tests/interchange; PYTHON
must have torch and transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.errors import RunError
from jaxdist.interchange.families import build_model, family_of
from jaxdist.interchange.leaves import BUFFERS
from jaxdist.interchange.source import Source, leaves_of, open_source
from jaxdist.interchange.write import pieces_of, write_directory
from jaxdist.models.functional import nest
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject

VOCAB, LENGTH = 67, 512
SEEN = (0, 1, 2, 63, 64, 65, 127, 200, 255, 511)
"""The positions whose logits are in the golden file."""
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    # transformers warns about ids beyond the vocabulary, and drops the gradient of the padding id's
    # embedding.
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LABELS: JsonObject = {
    "id2label": {"0": "A", "1": "B", "2": "C"},
    "label2id": {"A": 0, "B": 1, "C": 2},
}
_BERT: JsonObject = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": LENGTH,
    "type_vocab_size": 2,
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ENCODER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob",
)  # fmt: skip
CONFIGS: Mapping[str, JsonObject] = {
    "llama": {**_SIZES, "model_type": "llama", "attention_bias": True},
    "llama3": {
        **_SIZES,
        "model_type": "llama",
        "rope_scaling": _LLAMA3,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 48, "head_dim": 12},
    "mixtral": {
        **_SIZES,
        "model_type": "mixtral",
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2": {**_SIZES, "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 12, "use_sliding_window": False},
    "gemma": {
        **_SIZES,
        "model_type": "gemma",
        "head_dim": 12,
        "num_key_value_heads": 1,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": LENGTH,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "bert": {**_BERT, "architectures": ["BertForMaskedLM"]},
    "bert_classes": {**_BERT, "architectures": ["BertForSequenceClassification"], **_LABELS},
    "vit": {
        **{key: _BERT[key] for key in _ENCODER},
        "model_type": "vit",
        "image_size": 24,
        "patch_size": 4,
        "num_channels": 3,
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
        **_LABELS,
    },
    "resnet": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [32, 64],
        "depths": [1, 2],
        "layer_type": "bottleneck",
        "hidden_act": "relu",
        "num_channels": 3,
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        **_LABELS,
    },
    "resnet_basic": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [2, 1],
        "layer_type": "basic",
        "hidden_act": "relu",
        "num_channels": 3,
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        **_LABELS,
    },
}


def drawn(name: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weights of a name and layer, the same in each process.

    Values are normal around 0, or around 1 for the scales of norms; variances exceed 0.
    """
    # The seed is a checksum, since Python's `hash` of a text differs between processes.
    rng = np.random.default_rng(zlib.crc32(f"{name} {layer}".encode()))
    values = 0.2 * rng.standard_normal(shape) + name.endswith("scale")
    return (np.abs(values) + 0.5 if name.endswith("/var") else values).astype(np.float32)


def write_drawn(name: str, out: Path) -> None:
    """Write a model of `CONFIGS` with random weights as a Hugging Face directory."""
    config = CONFIGS[name]
    family = family_of(config, where=name)
    model = build_model(family.model(config), family.inputs(config))
    shapes = {
        leaf: tuple(
            VOCAB if dim == "vocab" else n
            for n, dim in zip(s.shape, model.dims.get(leaf) or [None] * s.ndim, strict=True)
        )
        for leaf, s in flatten_with_names({**model.params, BUFFERS: model.buffers})
    }
    pieces = pieces_of(shapes, model.stacked, family.table(config))
    by_layer = {n: s[1:] if n in model.stacked else s for n, s in shapes.items()}
    write_directory(
        out,
        {"architectures": [family.architecture], **config},
        pieces,
        lambda leaf, layer: drawn(leaf, layer, by_layer[leaf]),
        dtype="float32",
        folder=None,
    )


def tokens() -> np.ndarray:
    """Return one random sequence, int32 [1, LENGTH]."""
    return np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH), np.int32)


def given(source: Source) -> dict[str, np.ndarray]:
    """Return random inputs of a model by the names of transformers, and its labels.

    A decoder's labels are its next tokens.
    """
    rng, sizes = np.random.default_rng(0), source.inputs
    if sizes.image is not None:
        height, width, channels = sizes.image
        side = (channels, min(height, 48), min(width, 48))
        labels = rng.integers(0, sizes.classes, 2)
        return {"pixel_values": rng.standard_normal((2, *side), np.float32), "labels": labels}
    text = rng.integers(0, sizes.vocab_size, (1, LENGTH), np.int32).astype(np.int64)
    if source.family.kind == "gpt":
        return {"input_ids": text, "labels": text[0, 1:]}
    kinds = rng.integers(0, 2, text.shape)
    labels = rng.integers(0, sizes.classes or sizes.vocab_size, 1 if sizes.classes else LENGTH)
    return {"input_ids": text, "token_type_ids": kinds, "labels": labels}


def ours(path: Path, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return jaxdist's loss, logits and gradients of a model, gradients by the file's names.

    For a bert without a head, the final states replace the logits, and the mean of their squares
    replaces the loss.
    """
    source = open_source(path)
    model = build_model(source.family.model(source.config), source.inputs)
    leaves = leaves_of(source, model)
    whole = [leaf.block((slice(None),) * len(leaf.shape)) for leaf in leaves]
    params = nest([tuple(leaf.name.split("/")) for leaf in leaves], whole)
    buffers = params.pop(BUFFERS, {})
    states = source.config.get("architectures") == ["BertModel"]
    inputs: list[Any] = [given.get("input_ids"), None, given.get("token_type_ids")]
    if "pixel_values" in given:
        inputs = [given["pixel_values"].transpose(0, 2, 3, 1)]
    elif source.family.kind == "gpt":
        inputs = inputs[:2]

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        module: Any = model.bind(params, buffers)
        module.eval()
        found = module.hidden(*inputs) if states else module(*inputs)
        logits = found.reshape(-1, found.shape[-1])
        if states:
            return jnp.square(logits).mean(), logits
        labels = jnp.asarray(given["labels"]).reshape(-1)
        log = jax.nn.log_softmax(logits[: len(labels)])
        return -jnp.take_along_axis(log, labels[:, None], 1).mean(), logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    found = {"loss": np.asarray(value), "logits": np.asarray(logits)}
    by_name = {name: np.asarray(grad) for name, grad in flatten_with_names(grads)}
    shapes = {leaf.name: leaf.filled for leaf in leaves if leaf.name in by_name and leaf.tensors}
    for name, pieces in pieces_of(shapes, model.stacked, source.rows()).items():
        out = np.zeros(pieces[0].layout.file_shape(pieces[0].shape), np.float32)
        for piece in pieces:
            own = by_name[piece.name] if piece.layer is None else by_name[piece.name][piece.layer]
            piece.layout.fill(out, piece.held(own))
        found[f"grad {name}"] = out
    return found


def theirs(python: str, path: Path, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the loss, logits and gradients of transformers, in a process of another Python.

    Raises:
      RunError: the process fails.
    """
    return asked(python, "peer.py", path, given)


def asked(
    python: str, program: str, path: Path, given: Mapping[str, Any], *more: Path
) -> dict[str, np.ndarray]:
    """Return the arrays that a program of this folder computes in another Python.

    Raises:
      RunError: the process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, made = Path(folder) / "given.npz", Path(folder) / "made.npz"
        np.savez(inputs, allow_pickle=False, **given)
        peer = Path(__file__).with_name(program)
        command = [python, peer, path, inputs, made, *more]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{program} failed on {path}: {done.stderr.strip()[-500:]}")
        with np.load(made) as arrays:
            return dict(arrays)


def apart(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the largest differences of logits and of gradients, relative to the largest value.

    For gradients, this value is the largest of all gradients, since the exact gradient of a key's
    bias is 0.
    """
    most = float(np.abs(right["logits"]).max())
    by_kind = {"logits": _apart(found["logits"], right["logits"]) / most}
    grads = [name for name in right if name.startswith("grad ")]
    if grads:
        most = max(float(np.abs(right[name]).max()) for name in grads)
        by_kind["gradients"] = max(_apart(found[name], right[name]) for name in grads) / most
    return by_kind


def from_exact(
    found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, float]]:
    """Return the distances of jaxdist and of transformers from transformers in float64."""
    exact = {n.removeprefix("exact "): x for n, x in right.items() if n.startswith("exact ")}
    if not exact:
        return {}
    own, other = apart(found, exact), apart(right, exact)
    return {what: (own[what], other[what]) for what in own}


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def seen(logits: np.ndarray) -> dict[str, list[float]]:
    """Return the logits that the golden file has, by position or example."""
    at = SEEN if len(logits) == LENGTH else range(len(logits))
    return {str(i): logits[i, :: 16 if len(logits) == LENGTH else 1].tolist() for i in at}


def shortened(found: Mapping[str, np.ndarray]) -> JsonObject:
    """Return a model's entry in the golden file: a few logits, and the norms of gradients."""
    norms = {n: float(np.linalg.norm(g)) for n, g in found.items() if n.startswith("grad ")}
    return {"loss": float(found["loss"]), "logits": seen(found["logits"]), "grads": norms}


def main(python: str, file: str) -> None:
    made: JsonObject = {}
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            write_drawn(name, path)
            made[name] = shortened(theirs(python, path, given(open_source(path))))
    Path(file).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
