"""The function that each host of the lab runs: every plan's steps, and their predictions."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from orbax.checkpoint.multihost import get_barrier_sync_fn

from benchmarks.core.hosts import clocked, in_rounds
from benchmarks.planner.lab_rates import Curve, Rates, curves_of, probe, sizes_of, sorts_of
from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo.account import account
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.ledger import device_order, program_text
from jaxdist.hlo.lockstep import Lockstep
from jaxdist.hlo.parse import Module, parse
from jaxdist.hlo.records import Collective
from jaxdist.hlo.timeline import play
from jaxdist.inspect.program import branch_ticks
from jaxdist.mesh import Device
from jaxdist.planner.plan import Plan
from jaxdist.planner.write import planned
from jaxdist.train.step import Program

PATIENCE_SECONDS = 900.0
"""The longest wait for a host that compiles."""


@dataclass(frozen=True)
class Task:
    """The task that every host runs.

    Attributes:
      values: the values of the config, without the plans' settings.
      plans: the plans whose steps are timed.
      warmup, repeats: the number of rounds that are not counted, and of counted rounds.
    """

    values: dict[str, object]
    plans: tuple[Plan, ...]
    warmup: int
    repeats: int


@dataclass(frozen=True)
class Timed:
    """The times of one plan in one lab.

    Attributes:
      words: the plan in words.
      seconds: by round, the time of a step on the slowest host.
      predicted: the predicted seconds of a step.
      waits: the part of `predicted` that waits for the network.
    """

    words: str
    seconds: tuple[float, ...]
    predicted: float
    waits: float


@dataclass(frozen=True)
class Found:
    """The results of one lab.

    Attributes:
      curves: the time by payload of each sort of collective in the plans' programs.
      work_seconds: the time of the step that sends nothing.
      timed: the times of each plan.
    """

    curves: tuple[Curve, ...]
    work_seconds: float
    timed: tuple[Timed, ...]


@dataclass(frozen=True)
class Step:
    """A compiled step of a plan, with the data for its prediction."""

    program: Program
    compiled: jax.stages.Compiled
    module: Module
    layout: MeshLayout
    ticks: Lockstep | None

    def predicted(self, rates: Rates, hosts_per_core: float = 1.0) -> tuple[float, float]:
        """Return the predicted seconds of a step, and the part of them that waits for the network.

        A host that waits in a pipeline's bubble leaves its share of a core to the other hosts. A
        step therefore takes the time of all work on shared cores, or the time of its longest path
        on unshared cores, whichever is longer.

        Args:
          rates: the measured speeds.
          hosts_per_core: the hosts that shared a core when `rates` were measured, at least 1.
        """
        found = play(self.module, self.layout, rates, lockstep=self.ticks)
        waits, bubble = (
            sum(e.waited_seconds for e in found.entries.values() if e.basis == basis)
            for basis in ("links", "schedule")
        )
        own_core = dataclasses.replace(rates, slower=rates.slower / hosts_per_core)
        path = play(self.module, self.layout, own_core, lockstep=self.ticks)
        return max(found.seconds - bubble, path.seconds), waits

    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives of the program."""
        return account(self.module, self.layout).collectives

    def turn(self) -> Callable[[], None]:
        """Return a function that takes the next step, on its own training state, at each call."""
        state, batch = (
            self.program.init(),
            {name: _drawn(shape) for name, shape in self.program.batch.items()},
        )

        def take() -> None:
            nonlocal state
            state, metrics = self.compiled(state, batch)
            jax.block_until_ready((state, metrics))

        return take


def _drawn(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a batch of tokens, the same on all hosts."""
    whole = np.random.default_rng(0).integers(0, 64, like.shape).astype(like.dtype)
    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def step_of(values: Mapping[str, object], plan: Plan, devices: Sequence[Device]) -> Step:
    """Compile a plan's step."""
    document = Document(planned(dict(values), plan))
    experiment = build(validate(document, ExperimentConfig), document, devices=list(devices))
    program, mesh = experiment.program, experiment.layout.mesh
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    module = parse(program_text(compiled))
    order = device_order(compiled, mesh) or tuple(range(module.devices))
    return Step(
        program, compiled, module, MeshLayout(dict(mesh.shape), order), branch_ticks(program)
    )


def measure(task: Task) -> list[Found]:
    """Time all plans, interleaved, and predict them; every host returns the same result."""
    steps = [step_of(task.values, plan, jax.devices()) for plan in task.plans]
    alone = _alone(task)
    _meet("compiled")
    sorts = sorts_of(one for step in steps for one in step.collectives())
    turns = [step.turn() for step in steps]
    probes = [probe(sort, size) for sort in sorts for size in sizes_of(sort)]
    _meet("begun")
    own = {str(at): clocked(turn) for at, turn in enumerate([*turns, alone.turn(), *probes])}
    found = in_rounds(own, warmup=task.warmup, repeats=task.repeats)
    work, *sent = (float(np.median(one.seconds)) for one in found[len(turns) :])
    rates = Rates(curves_of(sorts, sent))
    rates = dataclasses.replace(rates, slower=work / alone.predicted(rates)[0])
    timed = []
    for plan, step, one in zip(task.plans, steps, found, strict=False):
        predicted, waits = step.predicted(rates, max(1.0, jax.process_count() / _cores()))
        timed.append(Timed(plan.words(), one.seconds, predicted, waits))
    return [Found(tuple(rates.curves.values()), work, tuple(timed))]


def _meet(where: str) -> None:
    """Wait for all hosts, since collectives fail if a host is late by half a minute."""
    get_barrier_sync_fn()(key=where, timeout_ms=int(PATIENCE_SECONDS * 1e3))


def _cores() -> int:
    """Return the number of this machine's cores, which all hosts share."""
    return len(os.sched_getaffinity(0))


def _alone(task: Task) -> Step:
    """Compile the step of one host's share of the batch, which sends nothing."""
    values = json.loads(json.dumps(task.values))
    values["train"]["batch_size"] //= jax.process_count()
    return step_of(values, Plan(zero=0), jax.local_devices())
