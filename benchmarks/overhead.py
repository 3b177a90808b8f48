"""The overhead of jaxdist: its step compared with a step written by hand, and its loop."""

from __future__ import annotations

import io
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from benchmarks.core.experiments import gpt
from benchmarks.core.harness import REPEATS, Sample, interleave
from benchmarks.core.plain import gpt_loss, mlp_loss, plain_step
from benchmarks.core.report import Figure, Report
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.metrics.account import Account, Activity
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import MetricsWriter
from jaxdist.models.loss import Batch
from jaxdist.run.hooks.loop import Cadence, Guard, Log, RunHooks, Save, StopHook
from jaxdist.run.termination import Termination
from jaxdist.run.watch.reports import GoodputHook
from jaxdist.train.loop import StepFunction, run_loop
from jaxdist.train.replicas import replicas_of
from jaxdist.train.state import TrainState
from jaxdist.types import JsonObject

STEP_GOAL = "<= 1.03"
LOOP_BUDGET_SECONDS = 50e-6
LOADER_GOAL = "<= 1.05"
LEARNING_RATE = 1e-3
BUSY_ITERATIONS = 400_000
_NEVER = 2**31 - 1

GPT = gpt({"layers": 2, "embed": 64, "heads": 4}, window=64, batch_size=16)
MLP: JsonObject = {
    "model": {"type": "mlp", "hidden": [512, 256]},
    "data": {
        "type": "synthetic",
        "kind": "images",
        "height": 28,
        "width": 28,
        "channels": 1,
        "heldout_examples": 0,
    },
    "train": {"steps": _NEVER, "batch_size": 512},
}
TINY: JsonObject = {
    "model": {"type": "mlp", "hidden": [8]},
    "data": {**MLP["data"], "height": 4, "width": 4},
    "train": {"steps": _NEVER, "batch_size": 8},
}

STEPS_PER_SAMPLE = 8
STEP_REPEATS = 3
"""The factor on the repeats of steps, since 9 pairs are too few to resolve 3%. A sample has several
steps, since one step of 30 ms is too short to time on a shared machine."""

PlainLoss = Callable[[Any, Batch], jax.Array]


def bench(repeats: int = REPEATS) -> Report:
    """Compare jaxdist's step with a hand-written step on all devices; time the loop on one."""
    devices, pairs = len(jax.devices()), STEP_REPEATS * repeats
    tiny = experiment(TINY, devices=1)
    return Report(
        "overhead",
        [
            step_figure(f"gpt step, {devices} devices", experiment(GPT), gpt_loss, pairs),
            check_figure(f"gpt replicas compared, {devices} devices", experiment(GPT), pairs),
            step_figure(f"mlp step, {devices} devices", experiment(MLP), mlp_loss, pairs),
            loop_figure(tiny, repeats=repeats),
            loop_with_loader_figure(tiny, repeats=repeats),
        ],
    )


def experiment(settings: JsonObject, devices: int | None = None) -> Experiment:
    """Build an experiment with AdamW, the batch split over all or over the first `devices`."""
    optim = {"type": "adamw", "learning_rate": LEARNING_RATE, "schedule": {"type": "constant"}}
    mesh = {"data": -1}
    config = ExperimentConfig.model_validate({**settings, "optim": optim, "mesh": mesh})
    return build(config, devices=jax.devices()[:devices])


def step_figure(name: str, ours: Experiment, loss: PlainLoss, repeats: int = REPEATS) -> Figure:
    """Compare jaxdist's step with the hand-written step of the same model and equal losses."""
    steps = StepPair(ours, loss)
    with ours.loader.batches() as batches:
        steps.check(list(itertools.islice(batches, 3)))
    return Figure.compare(
        name,
        *interleave(
            lambda: steps.ours(STEPS_PER_SAMPLE),
            lambda: steps.reference(STEPS_PER_SAMPLE),
            repeats=repeats,
        ),
        STEP_GOAL,
        f"{STEPS_PER_SAMPLE} steps a sample; jax.jit of a step written by hand for this model, "
        "with optax.adamw, the same shardings and donation, that reports loss and gradient norm "
        "as ours does",
    )


def check_figure(name: str, ours: Experiment, repeats: int = REPEATS) -> Figure:
    """Compare the time to compare replicas of a training state with the time of a step."""
    program, replicas = ours.program, replicas_of(ours.program)
    state = program.init()
    with ours.loader.batches() as batches:
        batch = next(batches)

    def compare() -> None:
        differing = replicas.differences(np.asarray(replicas.digests(state)))
        assert not differing, differing

    def step() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(program.train(state, batch))

    note = (
        "one comparison of all of the state, as train.check_replicas makes; the reference is a step"
    )
    return Figure.compare(name, *interleave(compare, step, repeats=repeats), note=note)


class StepPair:
    """The steps of both sides, on equal initial states and on the batch that was checked last."""

    def __init__(self, experiment: Experiment, loss: PlainLoss):
        program, whole = experiment.program, experiment.layout.replicated
        self._train, self._state = program.train, program.init()
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.0)
        params = program.init().params
        self._plain = plain_step(loss, optimizer, whole)
        self._plain_state = (params, jax.jit(optimizer.init, out_shardings=whole)(params))
        self._batch: Batch = {}

    def check(self, batches: list[Batch]) -> None:
        """Train both sides on these batches, and assert that their losses agree within 1e-4."""
        # The loop assigns each batch to the attribute that both steps read.
        for self._batch in batches:
            ours, reference = float(self.ours()[0]), float(self.reference()[0])
            assert np.isclose(ours, reference, rtol=1e-4), (ours, reference)

    def ours(self, count: int = 1) -> jax.Array:
        """Take `count` steps of jaxdist, each finished before the next; return the last metrics."""
        values = jnp.zeros(())
        for _ in range(count):
            self._state, values = self._train(self._state, self._batch)
            jax.block_until_ready((self._state, values))
        return values

    def reference(self, count: int = 1) -> jax.Array:
        """Take `count` of the hand-written steps; return the last loss and gradient norm."""
        values = jnp.zeros(())
        for _ in range(count):
            self._plain_state, values = self._plain(self._plain_state, self._batch)
            jax.block_until_ready((self._plain_state, values))
        return values


def loop_figure(tiny: Experiment, *, steps: int = 500, repeats: int = REPEATS) -> Figure:
    """Measure the seconds per step of the loop with its hooks, if the device has no work."""
    with tiny.loader.batches() as batches:
        fixed = next(batches)
    loops = LoopPair(tiny, tiny.program.train, fixed, steps)
    note = "log every 10 steps, a fixed batch, and a step so small that nothing hides the loop"
    with hooks(tiny) as each_step:
        ours = interleave(
            lambda: loops.ours(itertools.repeat(fixed), each_step), loops.bare, repeats=repeats
        )
    return beyond_figure("loop, per step", *ours, steps, note)


def loop_with_loader_figure(
    tiny: Experiment, *, steps: int = 100, repeats: int = REPEATS
) -> Figure:
    """Compare the loop, fed by the loader while the device is busy, with the bare calls.

    The figure is a ratio, since the difference of two noisy times in milliseconds would be too
    inexact.
    """
    with tiny.loader.batches() as batches, hooks(tiny) as each_step:
        loops = LoopPair(tiny, busy_step(tiny, BUSY_ITERATIONS), next(batches), steps)
        pair = interleave(lambda: loops.ours(batches, each_step), loops.bare, repeats=repeats)
    note = (
        f"{steps} steps, each of which keeps one core busy for milliseconds, as a device would; "
        "the reference is the jitted call on one batch"
    )
    return Figure.compare("loop + loader", *pair, LOADER_GOAL, note)


def beyond_figure(name: str, ours: Sample, bare: Sample, steps: int, note: str) -> Figure:
    """Compare the additional seconds per step of the loop (median of pairs) with the budget.

    >>> beyond_figure("loop", Sample((3.0, 5.0)), Sample((1.0, 3.0)), 100_000, "").ours
    2e-05
    """
    pairs = zip(ours.seconds, bare.seconds, strict=True)
    beyond = statistics.median(a - b for a, b in pairs) / steps
    return Figure(
        name,
        beyond,
        LOOP_BUDGET_SECONDS,
        "<= 1",
        note=f"beyond a bare jit call of {1e6 * bare.median / steps:.0f} us; {note}",
    )


class LoopPair:
    """Steps of one program, either in `run_loop` or by bare calls on a fixed batch."""

    def __init__(self, experiment: Experiment, train: StepFunction, batch: Batch, steps: int):
        self._train, self._batch, self._steps = train, batch, steps
        self._state = experiment.program.init()

    def ours(self, batches: Iterator[Batch], each_step: RunHooks) -> None:
        """Run the loop of `jaxdist train`, and wait for the state."""
        account = Account()
        train = account.first(Activity.COMPILE, self._train)
        waited = account.each(Activity.INPUT_WAIT, batches)
        state = run_loop(train, self._state, waited, each_step, start=1, stop=1 + self._steps)
        self._state = jax.block_until_ready(state)

    def bare(self) -> None:
        """Call the jitted step alone, and wait for the state."""
        for _ in range(self._steps):
            self._state, _ = self._train(self._state, self._batch)
        jax.block_until_ready(self._state)


def busy_step(experiment: Experiment, iterations: int) -> StepFunction:
    """Return the step followed by a chain of sines, which keeps the device busy without Python."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        state, values = experiment.program.train(state, batch)
        # Added to the metrics, the sines are not removed as dead code.
        zero = 0 * jax.lax.fori_loop(0, iterations, lambda _, x: jnp.sin(x), values[0])
        return state, values + zero[None]

    return jax.jit(step, donate_argnums=0)


@contextmanager
def hooks(experiment: Experiment) -> Iterator[RunHooks]:
    """Yield the hooks of `jaxdist train`, which write to a temporary directory."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        console = Console(file=io.StringIO())
        progress = Progress(_NEVER, 0, "examples", experiment.units_per_step, console)
        store = CheckpointStore(directory, keep=1, keep_best=False, on_event=console.print)
        progress = stack.enter_context(progress)
        writer = stack.enter_context(MetricsWriter(directory, resume_step=None))
        guard = Guard(experiment.program.metrics, stack.enter_context(store))
        log = Log(Cadence(10, _NEVER), guard, progress, writer)
        never = Save(Cadence(_NEVER, _NEVER), lambda *_: None)
        timed = GoodputHook(log.cadence, Account(), 1, writer, 0)
        yield RunHooks([guard, log, StopHook(Termination()), never, timed])
