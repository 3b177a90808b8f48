"""What each host of the lab runs: the steps of every plan in turn, and their predictions.

`python -m jaxdist.bench.planner.lab_host TASK`; the first host prints what was found.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint.multihost import get_barrier_sync_fn
from pydantic import TypeAdapter

from jaxdist.bench.collectives.program import compile_local, make_mesh, split
from jaxdist.collectives.contract import Operation
from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.collectives.operations import XLA
from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo.entries import Resource
from jaxdist.hlo.estimates import Effort
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.ledger import device_order, program_text
from jaxdist.hlo.lockstep import Lockstep
from jaxdist.hlo.parse import Module, parse
from jaxdist.hlo.records import Collective
from jaxdist.hlo.timeline import play
from jaxdist.inspect.program import ticks_of
from jaxdist.mesh import Device
from jaxdist.planner.plan import Plan
from jaxdist.planner.write import planned
from jaxdist.runtime.connection import connected
from jaxdist.runtime.hardware import DEVICES, Link
from jaxdist.runtime.processes import find_processes
from jaxdist.train.step import Program

FOUND = "found: "
SUMS = 20
"""All-reduces of one number, one after the other: the latency is their mean."""
PATIENCE_SECONDS = 900.0
"""The longest wait for a host that compiles."""
BULK_BYTES = 4 * 2**20
"""Of an all-reduce that says what a host's link carries."""


@dataclass(frozen=True)
class Task:
    """What all hosts do.

    Attributes:
      values: of the config, without the plans' settings.
      plans: of a step.
      bytes_per_second: of a host's link, one way.
      warmup, repeats: rounds that are not counted, and those that are.
    """

    values: dict[str, object]
    plans: tuple[Plan, ...]
    bytes_per_second: float
    warmup: int
    repeats: int


@dataclass(frozen=True)
class Timed:
    """One plan in one lab.

    Attributes:
      seconds: of a step, by round, of the slowest host.
      predicted: seconds of a step.
      waits: of these, for the network.
    """

    words: str
    seconds: tuple[float, ...]
    predicted: float
    waits: float


@dataclass(frozen=True)
class Found:
    """What one lab gave.

    Attributes:
      latency_seconds, bytes_per_second: of a host's link, as all-reduces found them.
      work_seconds: of the step that sends nothing.
    """

    latency_seconds: float
    bytes_per_second: float
    work_seconds: float
    timed: tuple[Timed, ...]


@dataclass(frozen=True)
class Rates:
    """The speeds of a host of the lab, for `jaxdist.hlo.timeline`.

    Attributes:
      link: between two hosts.
      slower: a host's work over that of the CPU in `jaxdist.runtime.hardware`.
    """

    link: Link
    slower: float = 1.0

    def cycles(self, count: int) -> float:
        """CPU programs have no estimates."""
        raise AssertionError("a CPU program with cycles")

    def transfer(self, collective: Collective) -> tuple[float, frozenset[Resource]]:
        """Seconds of a collective, by the cost model of XLA's collectives.

        XLA's programs for CPUs send each array of a combined collective by itself.
        """
        more = len(collective.dtypes) - 1
        whole, empty = (self._seconds(collective, scale) for scale in (1.0, 0.0))
        return whole + more * empty, frozenset({0})

    def _seconds(self, collective: Collective, scale: float) -> float:
        """Of a collective of one array, of so much of the bytes."""
        if collective.kind in ("collective-permute", "collective-broadcast"):
            wire = scale * collective.sent_bytes / self.link.bytes_per_second
            return self.link.latency_seconds + wire
        levels = [Level(collective.group_size, self.link)]
        kind = cast("Operation", collective.kind.replace("-", "_"))
        return predict_seconds(XLA, kind, scale * collective.payload_bytes, levels)

    def copy(self, size_bytes: int, *, host: bool) -> float:
        """Seconds of a copy."""
        return self.slower * size_bytes / DEVICES["cpu"].memory_bytes_per_second

    def work(self, effort: Effort) -> tuple[float, str]:
        """Seconds of FLOPs or of bytes, whichever take longer."""
        cpu = DEVICES["cpu"]
        compute = effort.flops / cpu.flops_per_second["float32"]
        memory = effort.bytes / cpu.memory_bytes_per_second
        return self.slower * max(compute, memory), effort.what


@dataclass(frozen=True)
class Step:
    """A compiled step of a plan, with all that its prediction needs."""

    program: Program
    compiled: jax.stages.Compiled
    module: Module
    layout: MeshLayout
    ticks: Lockstep | None

    def predicted(self, rates: Rates) -> tuple[float, float]:
        """Seconds, and those of them that wait for the network."""
        found = play(self.module, self.layout, rates, lockstep=self.ticks)
        waits = sum(e.waited_seconds for e in found.entries.values() if e.basis == "links")
        return found.seconds, waits

    def turn(self) -> Callable[[], None]:
        """Takes a step; a state of its own goes from one to the next."""
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
    """A batch of tokens; the same on all hosts."""
    whole = np.random.default_rng(0).integers(0, 64, like.shape).astype(like.dtype)
    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def step_of(values: Mapping[str, object], plan: Plan, devices: Sequence[Device]) -> Step:
    """A plan's step, compiled."""
    document = Document(planned(dict(values), plan))
    experiment = build(validate(document, ExperimentConfig), document, devices=list(devices))
    program, mesh = experiment.program, experiment.layout.mesh
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    module = parse(program_text(compiled))
    order = device_order(compiled, mesh) or tuple(range(module.devices))
    return Step(program, compiled, module, MeshLayout(dict(mesh.shape), order), ticks_of(program))


def measure(task: Task) -> Found:
    """Time all plans, interleaved, and predict them; the same on each host."""
    steps = [step_of(task.values, plan, jax.devices()) for plan in task.plans]
    alone = _alone(task)
    _meet("compiled")
    turns = [step.turn() for step in steps]
    probes = [alone.turn(), _sum(1, SUMS), _sum(BULK_BYTES // 4, 1)]
    _meet("begun")
    seconds = _rounds([*turns, *probes], task)
    work, one, bulk = (float(np.median(own)) for own in seconds[-3:])
    link = _link(one / SUMS, bulk, task.bytes_per_second)
    rates = Rates(link)
    rates = dataclasses.replace(rates, slower=work / alone.predicted(rates)[0])
    timed = []
    for plan, step, own in zip(task.plans, steps, seconds, strict=False):
        predicted, waits = step.predicted(rates)
        timed.append(Timed(plan.words(), tuple(map(float, own)), predicted, waits))
    return Found(link.latency_seconds, link.bytes_per_second, work, tuple(timed))


def _meet(where: str) -> None:
    """Who compiles first waits: collectives give up on a host that is half a minute late."""
    get_barrier_sync_fn()(key=where, timeout_ms=int(PATIENCE_SECONDS * 1e3))


def _alone(task: Task) -> Step:
    """The step of one host's share of the batch, which sends nothing: what a host's work takes."""
    values = json.loads(json.dumps(task.values))
    values["train"]["batch_size"] //= jax.process_count()
    return step_of(values, Plan(zero=0), jax.local_devices())


def _sum(size: int, times: int) -> Callable[[], None]:
    """All-reduces of so many numbers among all hosts, one after the other."""
    mesh = make_mesh(jax.devices(), (jax.device_count(),), ("data",))
    mine = np.ones(size, np.float32)
    x = jax.make_array_from_process_local_data(split(mesh), mine, (size * mesh.size,))
    run = compile_local(partial(jax.lax.pmean, axis_name="data"), mesh, x)

    def take() -> None:
        y = x
        for _ in range(times):
            y = run(y)
        jax.block_until_ready(y)

    return take


def _link(one_seconds: float, bulk_seconds: float, most: float) -> Link:
    """A host's link, from all-reduces of one number and of `BULK_BYTES`.

    Args:
      most: bytes per second of the shaped link; a machine that is short of cores carries fewer.
    """
    count = jax.device_count()
    steps = predict_seconds(XLA, "all_reduce", 0, [Level(count, Link(1.0, 1.0))])
    sent = XLA.traffic("all_reduce", BULK_BYTES, count).sent_bytes
    carried = sent / max(bulk_seconds - one_seconds, 1e-9)
    return Link(one_seconds / steps, min(most, carried))


def _rounds(turns: Sequence[Callable[[], None]], task: Task) -> np.ndarray:
    """Seconds by turn and round, of the slowest host; each turn once a round."""
    count = task.warmup + task.repeats
    found = np.zeros((len(turns), count), np.float64)
    for index in range(count):
        for place in range(len(turns)):
            which = (index + place) % len(turns)
            multihost_utils.sync_global_devices("ready")
            begun = time.perf_counter()
            turns[which]()
            found[which, index] = time.perf_counter() - begun
            multihost_utils.sync_global_devices("done")
    everywhere = np.asarray(multihost_utils.process_allgather(found.astype(np.float32)))
    return everywhere.reshape(-1, *found.shape)[..., task.warmup :].max(0)


def main(arguments: Sequence[str]) -> None:
    """Join the other hosts, run the task, and print what was found (the first host does)."""

    def report(error: BaseException) -> int:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1

    task = TypeAdapter(Task).validate_json(arguments[0])
    with connected(find_processes(os.environ), report):
        found = measure(task)
        if jax.process_index() == 0:
            # In one piece, on a line of its own: gloo prints too, on all hosts.
            sys.stdout.write(f"\n{FOUND}{json.dumps(asdict(found))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
