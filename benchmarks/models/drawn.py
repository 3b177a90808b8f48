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
from jaxdist.interchange.families import family_of
from jaxdist.interchange.source import leaves_of, open_source
from jaxdist.interchange.write import pieces_of, write_directory
from jaxdist.models.functional import Functional, functional, nest
from jaxdist.models.gpt import GptConfig
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
    # transformers warns of ids beyond the vocabulary, and drops the gradient of a padding id's
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
}


def drawn(name: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weights of a name and layer, the same in each process.

    Values are normal around 0, or around 1 for the scales of norms.
    """
    # A checksum, since Python's `hash` of a text differs between processes.
    rng = np.random.default_rng(zlib.crc32(f"{name} {layer}".encode()))
    return (0.2 * rng.standard_normal(shape) + name.endswith("scale")).astype(np.float32)


def write_drawn(name: str, out: Path) -> None:
    """Write a model of `CONFIGS` with random weights as a Hugging Face directory."""
    config = CONFIGS[name]
    family = family_of(config, where=name)
    model = model_of(family.model(config))
    shapes = {
        leaf: tuple(VOCAB if dim == "vocab" else n for n, dim in zip(s.shape, dims, strict=True))
        for leaf, s, dims in _named(model)
    }
    pieces = pieces_of(shapes, model.stacked, family.rows)
    by_layer = {n: s[1:] if n in model.stacked else s for n, s in shapes.items()}
    write_directory(
        out,
        {"architectures": [family.architecture], **config},
        pieces,
        lambda leaf, layer: drawn(leaf, layer, by_layer[leaf]),
        dtype="float32",
        folder=None,
    )


def _named(model: Functional) -> list[tuple[str, Any, Any]]:
    return [(name, leaf, model.dims[name]) for name, leaf in flatten_with_names(model.params)]


def model_of(options: JsonObject) -> Functional:
    """Return jaxdist's model of a family's options."""
    config = GptConfig.model_validate(options)
    return functional(lambda rngs: config.build(rngs, vocab_size=VOCAB))


def tokens() -> np.ndarray:
    """Return one random sequence, int32 [1, LENGTH]."""
    return np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH), np.int32)


def ours(path: Path, tokens_BL: np.ndarray) -> dict[str, np.ndarray]:
    """Return jaxdist's loss, logits and gradients of a model; gradients by the file's names."""
    source = open_source(path)
    config = GptConfig.model_validate(source.family.model(source.config))
    model = functional(lambda rngs: config.build(rngs, vocab_size=source.vocab_size))
    leaves = leaves_of(source, model)
    whole = [leaf.block((slice(None),) * len(leaf.shape)) for leaf in leaves]
    params = nest([tuple(leaf.name.split("/")) for leaf in leaves], whole)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        module: Any = model.bind(params, {})
        logits = module(tokens_BL, None)[0]
        log = jax.nn.log_softmax(logits[:-1])
        return -jnp.take_along_axis(log, tokens_BL[0, 1:, None], 1).mean(), logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    found = {"loss": np.asarray(value), "logits": np.asarray(logits)}
    by_name = {name: np.asarray(grad) for name, grad in flatten_with_names(grads)}
    shapes = {leaf.name: leaf.filled for leaf in leaves}
    for name, pieces in pieces_of(shapes, model.stacked, source.rows()).items():
        out = np.zeros(pieces[0].layout.file_shape(pieces[0].shape), np.float32)
        for piece in pieces:
            own = by_name[piece.name] if piece.layer is None else by_name[piece.name][piece.layer]
            piece.layout.fill(out, piece.held(own))
        found[f"grad {name}"] = out
    return found


def theirs(python: str, path: Path, tokens_BL: np.ndarray) -> dict[str, np.ndarray]:
    """Return the loss, logits and gradients of transformers, in a process of another Python.

    Raises:
      RunError: the process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "tokens.npy", Path(folder) / "made.npz"
        np.save(given, tokens_BL.astype(np.int64))
        peer = Path(__file__).with_name("peer.py")
        done = subprocess.run(
            [python, str(peer), str(path), str(given), str(made)], capture_output=True, text=True
        )
        if done.returncode:
            raise RunError(f"transformers failed on {path}: {done.stderr.strip()[-500:]}")
        with np.load(made) as arrays:
            return dict(arrays)


def apart(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the largest difference of logits, and of gradients, over the largest absolute value.

    That value is taken over all gradients, since the gradient of a key's bias is 0 but for
    rounding.
    """
    grads = [name for name in right if name.startswith("grad ")]
    most = max(float(np.abs(right[name]).max()) for name in grads)
    return {
        "logits": _apart(found["logits"], right["logits"]) / float(np.abs(right["logits"]).max()),
        "gradients": max(_apart(found[name], right[name]) for name in grads) / most,
    }


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def shortened(found: Mapping[str, np.ndarray]) -> JsonObject:
    """Return a model's entry in the golden file: a few logits, and the norms of gradients."""
    norms = {n: float(np.linalg.norm(g)) for n, g in found.items() if n.startswith("grad ")}
    logits = {str(at): found["logits"][at, ::16].tolist() for at in SEEN}
    return {"loss": float(found["loss"]), "logits": logits, "grads": norms}


def main(python: str, file: str) -> None:
    made: JsonObject = {}
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            write_drawn(name, Path(folder) / name)
            made[name] = shortened(theirs(python, Path(folder) / name, tokens()))
    Path(file).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
