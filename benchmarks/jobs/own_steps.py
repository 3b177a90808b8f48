"""A program with jaxdist's side of `benchmarks.jobs.steps`: a process that takes steps on request.

`python -m benchmarks.jobs.own_steps CONFIG OVERRIDE...` prints the number of parameters and the
cores on which it may run. For each number N on its input, it takes N steps with the same batch, and
prints their wall seconds, their CPU seconds and the last loss. Answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

from jaxdist.experiment import build, load


def main() -> None:
    """Build the experiment, and take steps on request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # standard output must have nothing but answers
    document, config = load(Path(sys.argv[1]), sys.argv[2:])
    experiment = build(config, document, devices=jax.devices()[:1])
    program, batch = experiment.program, experiment.loader.batch(0)
    state, loss = program.init(), program.metrics.index("loss")
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    hello = {"params": params, "cores": sorted(os.sched_getaffinity(0))}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        begun, spent, metrics = time.perf_counter(), time.process_time(), None
        for _ in range(int(line)):
            state, metrics = program.train(state, batch)
        jax.block_until_ready(state)
        took = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - spent}
        found = {**took, "loss": float(np.asarray(metrics)[loss])}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
