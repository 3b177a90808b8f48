"""What jaxdist costs beyond the work itself: our step over one written by hand, and the loop."""

from __future__ import annotations

import io
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from jaxdist.bench.harness import REPEATS, Sample, interleave
from jaxdist.bench.plain import gpt_loss, mlp_loss, plain_step
from jaxdist.bench.report import Figure, Report
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import MetricsWriter
from jaxdist.models.loss import Batch
from jaxdist.train.hooks import Cadence, RunHooks
from jaxdist.train.loop import StepFunction, run_loop
from jaxdist.train.state import TrainState
from jaxdist.train.termination import Termination

STEP_GOAL = "<= 1.03"
LOOP_BUDGET_SECONDS = 50e-6
LEARNING_RATE = 1e-3
BUSY_ITERATIONS = 400_000
_NEVER = 2**31 - 1

GPT: dict[str, Any] = {
    "model": {"type": "gpt", "layers": 2, "embed": 128, "heads": 4},
    "data": {"type": "synthetic", "kind": "tokens", "window": 64, "heldout_examples": 0},
    "train": {"steps": _NEVER, "batch_size": 16},
}
MLP: dict[str, Any] = {
    "model": {"type": "mlp", "hidden": [512, 256]},
    "data": {"type": "synthetic", "kind": "images", "heldout_examples": 0},
    "train": {"steps": _NEVER, "batch_size": 256},
}
TINY: dict[str, Any] = {
    "model": {"type": "mlp", "hidden": [8]},
    "data": {**MLP["data"], "height": 4, "width": 4, "channels": 1},
    "train": {"steps": _NEVER, "batch_size": 8},
}

PlainLoss = Callable[[Any, Batch], jax.Array]


def bench(repeats: int = REPEATS) -> Report:
    """Our step over a hand-written one, on all devices; the loop beyond the bare call, on one."""
    devices = len(jax.devices())
    tiny = experiment(TINY, jax.devices()[:1])
    return Report(
        "overhead",
        [
            step_figure(f"gpt step, {devices} devices", experiment(GPT), gpt_loss, repeats),
            step_figure(f"mlp step, {devices} devices", experiment(MLP), mlp_loss, repeats),
            loop_figure(tiny, repeats=repeats),
            loop_with_loader_figure(tiny, repeats=repeats),
        ],
    )


def experiment(settings: dict[str, Any], devices: list[jax.Device] | None = None) -> Experiment:
    """The experiment of these settings with AdamW, its batch split over all devices or these."""
    optim = {"type": "adamw", "learning_rate": LEARNING_RATE, "schedule": {"type": "constant"}}
    mesh = {"data": -1}
    config = ExperimentConfig.model_validate({**settings, "optim": optim, "mesh": mesh})
    return build(config, devices=devices)


def step_figure(name: str, ours: Experiment, loss: PlainLoss, repeats: int = REPEATS) -> Figure:
    """Our step over the hand-written step of the same model, equal in its losses."""
    calls = Calls(ours, loss)
    with ours.loader.batches() as batches:
        calls.check_losses(list(itertools.islice(batches, 3)))
    return Figure.compare(
        name,
        *interleave(calls.ours, calls.reference, repeats=repeats),
        STEP_GOAL,
        "the reference is jax.jit of a hand-written step: same model, shardings, optax.adamw, "
        "donation; it computes the loss alone, ours the gradient norm too",
    )


class Calls:
    """One step of each side, on states that begin equal, with a fixed batch once checked."""

    def __init__(self, experiment: Experiment, loss: PlainLoss):
        program = experiment.program
        self._train, self._state = program.train, program.init()
        shapes = program.state_shapes
        shardings = jax.tree.map(lambda s: s.sharding, (shapes.params, shapes.opt_state))
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.0)
        start = program.init()
        self._plain_state = (start.params, start.opt_state)
        plain_shapes = jax.eval_shape(optimizer.init, start.params)
        same = jax.tree.structure(plain_shapes) == jax.tree.structure(start.opt_state)
        if not same:
            shardings = (shardings[0], None)
            self._plain_state = (start.params, jax.jit(optimizer.init)(start.params))
        self._plain = plain_step(loss, optimizer, shardings)
        self._batch: Batch = {}

    def check_losses(self, batches: list[Batch]) -> None:
        """Train both on these batches; their losses must agree, as float32 sums may."""
        for self._batch in batches:
            ours, reference = float(self.ours()[0]), float(self.reference())
            assert np.isclose(ours, reference, rtol=1e-4), (ours, reference)

    def ours(self) -> jax.Array:
        self._state, values = self._train(self._state, self._batch)
        return jax.block_until_ready((self._state, values))[1]

    def reference(self) -> jax.Array:
        self._plain_state, value = self._plain(self._plain_state, self._batch)
        return jax.block_until_ready((self._plain_state, value))[1]
