"""Runs in strict mode, drawn at random, whose final bits tests compare between device counts.

The program `strict_cases.py FIRST LAST` compares the cases of these seeds with the default flags of
XLA, which differ from the flags of a test session.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from contextlib import suppress
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.config import Document, validate
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.models.adapters import from_linen
from jaxdist.train.evaluate import evaluate

ROWS = 48
STEPS = 3
TOKENS = {"type": "synthetic", "kind": "tokens", "window": 16, "heldout_examples": 50}
IMAGES = {"type": "images", "source": "digits"}
GPT = {"type": "gpt", "layers": 2, "embed": 32, "heads": 4}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mlp": ({"type": "mlp", "hidden": [40, 17]}, IMAGES, {}),
    "cnn": ({"type": "cnn", "channels": [4, 8], "hidden": 16}, IMAGES, {}),
    "gpt": (GPT, TOKENS, {}),
    "gpt bfloat16": ({**GPT, "compute_dtype": "bfloat16", "remat": "full"}, TOKENS, {}),
    "nnx": ({"type": "import", "path": "strict_cases:Normed"}, IMAGES, {"batch_norm": "local"}),
    "linen": ({"type": "import", "path": "strict_cases:linen"}, IMAGES, {"batch_norm": "local"}),
}
ADAMW = {"type": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {**ADAMW, "clip_norm": 0.3},
    "sgd": {"type": "sgd", "learning_rate": 0.1, "nesterov": True, "clip_norm": 0.3},
    "guarded": {**ADAMW, "skip_nonfinite": True, "clip_norm": 0.3},
    "masters": {**ADAMW, "master_weights": "bfloat16"},
    "scaled": {**ADAMW, "master_weights": "float16", "loss_scale": {"type": "dynamic"}},
    "lamb": {"type": "lamb", "learning_rate": 1e-2},
    "lars": {"type": "lars", "learning_rate": 0.1},
    "spikes": {**ADAMW, "skip_spikes": {"factor": 1.01, "window": 1}},
    "moments": {**ADAMW, "bf16_moments": True},
}
ELEMENTWISE = ("adamw", "sgd", "guarded", "masters", "scaled")
"""The updates that ZeRO may split."""


class Normed(nnx.Module):
    """A model with running statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(64, 24, rngs=rngs), nnx.Linear(24, 10, rngs=rngs)
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = image.reshape(len(image), -1)
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


class Linen(nn.Module):
    """A model of flax linen with running statistics and dropout."""

    @nn.compact
    def __call__(self, image: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(6, (3, 3))(image)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x)).reshape(len(x), -1)
        return nn.Dense(10)(nn.Dropout(0.3, deterministic=not train)(x))


def linen(rngs: nnx.Rngs) -> nnx.Module:
    return from_linen(Linen(), jnp.zeros((1, 8, 8, 1)))(rngs)


def drawn(seed: int) -> dict[str, Any]:
    """Draw a config in strict mode, without a mesh."""
    draw = random.Random(seed)
    shards, stage = draw.choice([4, 6, 8, 12]), draw.choice([0, 0, 1, 2, 3])
    kind = draw.choice(ELEMENTWISE if stage else list(OPTIMIZERS))
    name = draw.choice(list(MODELS))
    steps = draw.choice([None, 2])
    lookahead = steps if kind not in ("masters", "scaled") else None
    pieces = draw.choice([1, 2]) if ROWS % (2 * shards) == 0 else 1
    return config(name, kind, shards, stage, seed=seed, microbatches=pieces, lookahead=lookahead)


def config(
    name: str,
    kind: str,
    shards: int,
    stage: int,
    *,
    seed: int = 0,
    microbatches: int = 1,
    lookahead: int | None = None,
) -> dict[str, Any]:
    model, data, parallel = MODELS[name]
    outer = {"type": "lookahead", "steps": lookahead, "momentum": 0.5}
    own: dict[str, Any] = {}
    if model["type"] == "import":
        own = {"loss": {"type": "classification"}, "sharding": {"params": {"*": "whole"}}}
    return {
        "model": model,
        "data": data,
        "optim": OPTIMIZERS[kind],
        "train": {"steps": STEPS, "batch_size": ROWS, "microbatches": microbatches},
        "parallel": {
            "deterministic": {"type": "strict", "shards": shards},
            "zero": {"stage": stage, "whole_below": 16},
            **parallel,
        },
        "strategy": {"type": "synchronous"} if lookahead is None else outer,
        "seed": seed,
        **own,
    }


def built(sections: dict[str, Any], mesh: dict[str, Any], count: int) -> Experiment:
    made = validate(Document({**sections, "mesh": mesh}), ExperimentConfig)
    return build(made, devices=jax.devices()[:count])


def prints(found: Experiment) -> dict[str, str]:
    """Train, and return digests of logged values, of the unpadded state, and of an evaluation."""
    program, outer = found.program, found.program.outer
    state, logged = program.init(), []
    with found.loader.batches() as batches:
        for step, batch in enumerate(itertools.islice(batches, STEPS), 1):
            state, values = program.train(state, batch)
            logged.append(np.asarray(values).tobytes())
            if outer is not None and outer.due(step):
                state = program.between(state)
    assert found.heldout is not None
    with found.heldout.evaluation_batches(2) as rows:
        means = evaluate(program, state.params, state.buffers, rows)
    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.jit(program.home.used)(state))]
    return {
        "logged": _digest(logged),
        "state": _digest(leaves),
        "evaluation": _digest([json.dumps(means, sort_keys=True).encode()]),
    }


def _digest(pieces: list[bytes]) -> str:
    return hashlib.sha256(b"|".join(pieces)).hexdigest()[:12]


def on_all(sections: dict[str, Any]) -> dict[int, dict[str, str]]:
    """Return the digests by number of devices, for all numbers that divide the number of shards."""
    return {n: prints(built(sections, {"data": n}, n)) for n in _counts(sections)}


def on_some(sections: dict[str, Any], *, greatest: bool) -> dict[int, dict[str, str]]:
    """Return the digests for the least and the middle number of devices; see `greatest`."""
    counts = _counts(sections)
    chosen = (counts[0], counts[len(counts) // 2], *counts[-1:] * greatest)
    return {n: prints(built(sections, {"data": n}, n)) for n in chosen}


def _counts(sections: dict[str, Any]) -> list[int]:
    shards = sections["parallel"]["deterministic"]["shards"]
    return [n for n in range(1, len(jax.devices()) + 1) if shards % n == 0]


def compare(first: int, last: int) -> int:
    """Print the result of each case, and return the number of cases whose digests differ."""
    wrong = 0
    for seed in range(first, last):
        found = on_all(drawn(seed))
        same = len({json.dumps(prints) for prints in found.values()}) == 1
        wrong += not same
        told = drawn(seed)
        what = told["model"].get("path", told["model"]["type"]), told["optim"], told["parallel"]
        print("same" if same else "DIFFERS", seed, *what, told["train"], told["strategy"]["type"])
        if not same:
            print(json.dumps(found, indent=1))
        sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(compare(int(sys.argv[1]), int(sys.argv[2])))
