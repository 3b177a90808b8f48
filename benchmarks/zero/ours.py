"""A program with jaxdist's side of `benchmarks.zero.race`: a process that takes steps on request.

`python -m benchmarks.zero.ours CONFIG DIRECTORY` joins the processes that
`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` name; without them it is alone.
Each process trains on its part of DIRECTORY/tokens.npy. A process alone writes its initial
parameters, by torch's names, to DIRECTORY/weights.npz. First the program prints the number of
parameters and the cores that it may run on; then, for each number N on its input, it takes N steps
and prints their seconds and the last loss. CONFIG is the experiment; CONFIG and all answers are
lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import jax
import numpy as np

from jaxdist.experiment import ExperimentConfig, build
from jaxdist.runtime.connection import connected
from jaxdist.runtime.processes import find_processes
from jaxdist.train.step import Program
from jaxdist.types import Json, Params


def serve(program: Program, directory: Path, answers: TextIO) -> None:
    """Take steps on request, each with the same batch."""
    state = program.init()
    if jax.process_count() == 1:
        np.savez(directory / "weights.npz", allow_pickle=False, **torch_weights(state.params))
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    batch = load_batch(program.batch, directory)
    _say(answers, {"params": params, "cores": sorted(os.sched_getaffinity(0))})
    for line in sys.stdin:
        begun = time.perf_counter()
        metrics = None
        for _ in range(int(line)):
            state, metrics = program.train(state, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begun
        loss = float(np.asarray(metrics)[program.metrics.index("loss")])
        _say(answers, {"seconds": seconds, "loss": loss})


def load_batch(shapes: Mapping[str, jax.ShapeDtypeStruct], directory: Path) -> dict[str, jax.Array]:
    """Return a batch of the first rows of the tokens, split over devices; a row is a document."""
    rows = np.load(directory / "tokens.npy")[: shapes["tokens"].shape[0]]
    given = {"tokens": rows.astype(np.int32)}

    def place(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        value = given[name] if name in given else np.zeros(like.shape, like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: value[index])

    return {name: place(name, like) for name, like in shapes.items()}


def torch_weights(params: Params) -> dict[str, np.ndarray]:
    """Return a GPT's parameters by torch's names: a tensor for each layer, kernels `[out, in]`."""
    params = jax.tree.map(np.asarray, params)
    blocks, embed = params["blocks"], params["embedding"].shape[1]
    found = {"embedding": params["embedding"], "norm.weight": params["norm"]["scale"]}
    for index in range(len(blocks["mlp_norm"]["scale"])):
        name = f"blocks.{index}"
        for norm in ("attention_norm", "mlp_norm"):
            found[f"{name}.{norm}.weight"] = blocks[norm]["scale"][index]
        for part, kernel in blocks["attention"].items():
            found[f"{name}.attention.{part}.weight"] = kernel[index].reshape(embed, -1).T
        for part, kernel in blocks["mlp"].items():
            found[f"{name}.{part}.weight"] = kernel[index].T
    return found


def main() -> None:
    """Join the other processes, and take steps on request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints to standard output, which must have nothing but answers
    config = ExperimentConfig.model_validate(json.loads(sys.argv[1]))
    with connected(find_processes(os.environ), _report):
        serve(build(config).program, Path(sys.argv[2]), answers)


def _say(answers: TextIO, answer: Mapping[str, Json]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def _report(error: BaseException) -> int:
    print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
