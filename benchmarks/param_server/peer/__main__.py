"""A parameter server as in Ray's documentation: an actor that holds the weights.

In each step the workers, also actors, compute gradients of the actor's weights, and the actor
applies their mean. `PYTHON __main__.py WORKERS STEPS` prints the seconds of each step as JSON. The
program needs ray, jax and numpy, and nothing of jaxdist. `benchmarks.param_server.race` trains the
same model with a server of jaxdist.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTHS = (784, 1024, 1024, 10)
BATCH = 32
RATE = 0.01
WARMUP = 5
Weights = dict[str, np.ndarray]


def initial() -> Weights:
    """Return the initial weights of an MLP of 1.9 million parameters."""
    rng = np.random.default_rng(0)
    pairs = enumerate(pairwise(WIDTHS))
    return {
        f"w{at}": (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        for at, shape in pairs
    }


def batch(worker: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a worker's batch, which is the same at each step."""
    rng = np.random.default_rng(worker + 1)
    x = rng.standard_normal((BATCH, WIDTHS[0])).astype(np.float32)
    return x, rng.integers(0, WIDTHS[-1], BATCH)


@jax.jit
def gradient(weights: Any, x: Any, labels: Any) -> Any:
    """Return the gradients of the mean cross-entropy."""

    def loss(weights: Any) -> Any:
        h = x
        for at in range(len(WIDTHS) - 1):
            h = h @ weights[f"w{at}"]
            h = jax.nn.relu(h) if at < len(WIDTHS) - 2 else h
        return -jnp.mean(jax.nn.log_softmax(h)[jnp.arange(BATCH), labels])

    return jax.grad(loss)(weights)


def main(workers: int, steps: int) -> None:
    """Time the steps, and print their seconds."""
    ray: Any = importlib.import_module("ray")  # jaxdist's Python may lack ray

    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=1)
    class ParameterServer:
        def __init__(self) -> None:
            self.weights = initial()

        def apply_gradients(self, *gradients: Weights) -> Weights:
            for name, weight in self.weights.items():
                total = np.stack([one[name] for one in gradients]).sum(axis=0)
                self.weights[name] = weight - RATE / len(gradients) * total
            return self.weights

        def get_weights(self) -> Weights:
            return self.weights

    @ray.remote(num_cpus=1)
    class DataWorker:
        def __init__(self, number: int) -> None:
            self.batch = batch(number)

        def compute_gradients(self, weights: Weights) -> Weights:
            return {n: np.asarray(g) for n, g in gradient(weights, *self.batch).items()}

    actor: Any = DataWorker
    team = [actor.remote(number) for number in range(workers)]
    actor = ParameterServer
    server = actor.remote()
    weights = server.get_weights.remote()
    seconds: list[float] = []
    for _ in range(WARMUP + steps):
        begun = time.perf_counter()
        gradients = [worker.compute_gradients.remote(weights) for worker in team]
        weights = server.apply_gradients.remote(*gradients)
        ray.wait([weights])
        seconds.append(time.perf_counter() - begun)
    print(json.dumps(seconds[WARMUP:]))
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
