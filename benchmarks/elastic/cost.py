"""The cost of being able to resume a run: snapshots in memory, and status reports."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import jax

from benchmarks.core.fours import ratio_of
from benchmarks.core.harness import WARMUP, Sample, interleave
from benchmarks.core.report import Figure
from jaxdist.checkpoint.snapshots import KEEP, Snapshots
from jaxdist.config.shipped import shipped
from jaxdist.experiment import Experiment, build, load
from jaxdist.heartbeat.run_folder import MEMORY
from jaxdist.heartbeat.status import Publisher
from jaxdist.metrics.account import Account, Activity
from jaxdist.models.loss import Batch
from jaxdist.run.hooks.loop import LoopHook, Moment, RunHooks
from jaxdist.train.loop import run_loop
from jaxdist.train.state import TrainState

CONFIG = "gpt/quickstart"
EVERY, STEPS, PAIRS = 10, 10, 60
LIMIT = 1.02
CALLS, BEATS_SECONDS = 20_000, 4.0


@dataclass
class Take(LoopHook):
    """A hook that takes snapshots in the middle of a turn, so that later steps hide the writing."""

    memory: Snapshots

    def due(self, step: int) -> bool:
        return step % EVERY == EVERY // 2

    def at(self, moment: Moment) -> None:
        self.memory.take(moment.step, moment.state, {})


@dataclass
class Steps:
    """A run whose steps are taken a few at a time."""

    experiment: Experiment
    batches: Iterator[Batch]
    state: TrainState = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        self.state = self.experiment.program.init()

    def some(self, *hooks: LoopHook) -> None:
        """Take STEPS more steps with these hooks, and wait for the last step."""
        train = self.experiment.stages[0].program.train
        stop = self.taken + STEPS
        given = {"start": self.taken, "stop": stop}
        self.state = run_loop(train, self.state, self.batches, RunHooks(hooks), **given)
        jax.block_until_ready(self.state)
        self.taken = stop


def figures(pairs: int = PAIRS) -> list[Figure]:
    """Compare snapshots and status reports with a step of the quickstart on one device."""
    _, config = load(shipped()[CONFIG])
    experiment = build(config, devices=jax.devices()[:1])
    with ExitStack() as stack:
        parent = MEMORY if MEMORY.is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        batches = stack.enter_context(experiment.stages[0].loader.batches(0))
        steps = Steps(experiment, batches)
        memory = stack.enter_context(Snapshots(folder / "snapshots", 0, 1, print))
        cpu: dict[bool, list[float]] = {True: [], False: []}

        def some(taking: bool) -> None:
            before = time.process_time()
            steps.some(*([Take(memory)] if taking else []))
            # Writing must end in this turn, since the next turn may be without snapshots.
            memory.wait()
            cpu[taking].append((time.process_time() - before) / STEPS)

        with_them, without = (
            Sample(tuple(seconds / STEPS for seconds in sample.seconds))
            for sample in interleave(lambda: some(True), lambda: some(False), repeats=pairs)
        )
        spent = Sample(tuple(cpu[True][WARMUP:])), Sample(tuple(cpu[False][WARMUP:]))
        held = sum(path.stat().st_size for path in memory.folder.glob("step_*"))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(steps.state))
        return [
            compared(f"step with a snapshot each {EVERY}", with_them, without,
                     f"{CONFIG} on one device beside itself without, {STEPS} steps at a time, the "
                     "copies written to their end"),
            compared("the same, of CPU", *spent,
                     "which a machine that others use too tells better"),
            Figure("bytes of snapshots", held, KEEP * size, "<= 1.01", "B",
                   f"on disk in memory, over {KEEP} times the state's own {size:,} bytes"),
            told_figure(folder / "status", without.median),
        ]  # fmt: skip


def compared(name: str, ours: Sample, reference: Sample, note: str) -> Figure:
    """Return the figure of two samples, with the interval of their ratio in the note."""
    ratio = ratio_of(ours, reference)
    return Figure(
        name, ours.median, reference.median, f"<= {LIMIT:g}", "s",
        f"{note}; {ratio.against(LIMIT)}", ours.iqr, reference.iqr, ratio.median,
    )  # fmt: skip


def told_figure(path: Path, step_seconds: float) -> Figure:
    """Compare the time of status reports (main thread and heartbeats) with the time of a step."""
    with Publisher(path, 0) as publisher:
        account = Account(Activity.STEP, tell=publisher.phase)
        quiet = Account(Activity.STEP)

        def said(account: Account, publisher: Publisher | None) -> None:
            for step in range(CALLS):
                account.enter(Activity.INPUT_WAIT)
                account.leave()
                if publisher is not None:
                    publisher.wait()
                    publisher.step(step)

        told, silent = interleave(lambda: said(account, publisher), lambda: said(quiet, None))
        before, begun = time.process_time(), time.perf_counter()
        time.sleep(BEATS_SECONDS)
        beats = (time.process_time() - before) / (time.perf_counter() - begun)
    main = (told.median - silent.median) / CALLS
    return Figure(
        "what a process says of itself", main + beats * step_seconds, step_seconds, "<= 0.005",
        "s", f"{1e6 * main:.1f} us a step of the main thread, and {beats:.2%} of a core for signs "
        "of life; beside a step of the quickstart",
    )  # fmt: skip
