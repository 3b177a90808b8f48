"""Generation by jaxdist and by transformers, in two processes that take turns.

`python -m benchmarks.models.generated RUN PYTHON MODEL ROWS` prints as JSON the seconds of a token
by the clock and of all cores, for a batch of ROWS: a list of [clock, cores, their clock, their
cores].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxdist.commands.evaluate import open_run
from jaxdist.train.generate import Generator
from jaxdist.train.sampling import Sampling

ROWS = (1, 8)
PROMPT, SHORT, LONG, WINDOW = 65, 1, 13, 128
"""The numbers of tokens of a prompt, of a short and a long continuation, and of the caches.

The time of a token is computed from the difference of the two continuations, so that it does not
include the prompt.
"""
REPEATS = 5


def main(run: Path, python: str, model: str, rows: int) -> None:
    peer = Path(__file__).with_name("peer_generate.py")
    command = [python, str(peer), model, str(PROMPT), str(SHORT), str(LONG)]
    experiment, restored = open_run(run, [], step=None, console=Console(quiet=True))
    program, state = experiment.program, restored.state
    vocab = experiment.dataset.vocab_size or 0
    params = program.evaluated(state)
    generator = Generator(program, WINDOW, vocab)

    def seconds(prompts: list[list[int]], count: int) -> np.ndarray:
        begun = np.array([time.perf_counter(), time.process_time()])
        generator(params, state.buffers, prompts=prompts, count=count, sampling=Sampling())
        return np.array([time.perf_counter(), time.process_time()]) - begun

    found: list[list[float]] = []
    # Otherwise torch's threads wait in loops, which would count as CPU seconds.
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-3, text=True, env=env) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        rng = np.random.default_rng(rows)
        prompts = rng.integers(3, vocab, (rows, PROMPT)).tolist()
        for repeat in range(REPEATS + 1):
            ours = seconds(prompts, LONG) - seconds(prompts, SHORT)
            child.stdin.write(json.dumps(prompts) + "\n")
            child.stdin.flush()
            theirs = np.array(json.loads(child.stdout.readline()))
            if repeat:  # The first time compiles.
                pair = np.concatenate([ours, theirs]) / (LONG - SHORT)
                found.append(pair.tolist())
        child.stdin.close()
    print(json.dumps(found))


if __name__ == "__main__":
    assert len(jax.devices()) == 1, "XLA_FLAGS divides the cores"
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
