"""What each host of the lab runs: every contender's steps in turn, torch's between ours.

`python -m benchmarks.compression.host TASK`; the first host prints what was measured.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from pydantic import TypeAdapter

from benchmarks.collectives.lab import device_sent_bytes
from benchmarks.collectives.program import compile_local, make_mesh, split
from benchmarks.compression.step import (
    LEARNING_RATE,
    WIDTHS,
    Contender,
    Training,
    first_params,
)
from jaxdist.compression import PerParameter, Quantize, compressed_all_reduce, init_state
from jaxdist.errors import RunError
from jaxdist.mesh import MeshConfig, Split, axis_names, build_mesh
from jaxdist.runtime.connection import connected
from jaxdist.runtime.processes import find_processes
from jaxdist.types import PyTree

PEER = Path(__file__).with_name("peer")
FOUND = "measured: "
ONE_NUMBER = "one number"
"""The contender whose step is an all-reduce of four bytes."""
CODING, CODED = "coding alone", PerParameter(otherwise=Quantize())
"""The contender whose step is a reduction among one device: all but what travels."""
Turn = Callable[[int], tuple[float, float]]
"""Takes so many steps; seconds of all of them, and the last loss, both of this host."""


@dataclass(frozen=True)
class Task:
    """What all hosts do.

    Attributes:
      sites, hosts_per_site: of the lab.
      contenders: ours.
      peers: torch's kinds, empty without `torch`.
      torch: a Python that has torch; None leaves it out.
      rows: of the batch of one host.
      steps: of one turn.
      warmup, repeats: rounds that are not counted, and those that are.
    """

    sites: int
    hosts_per_site: int
    contenders: tuple[Contender, ...]
    peers: tuple[str, ...]
    torch: str | None
    rows: int
    steps: int
    warmup: int
    repeats: int


@dataclass(frozen=True)
class Timed:
    """One contender in one lab.

    Attributes:
      seconds: of a step, by round, of the slowest host.
      sent_bytes: of a step: what the busiest host sent, with the headers of its packets.
      loss: before the last step, the mean of all hosts'.
    """

    name: str
    seconds: tuple[float, ...]
    sent_bytes: float
    loss: float


def measure(task: Task) -> list[Timed]:
    """Time all contenders, interleaved; the same on each host."""
    mesh = build_mesh(MeshConfig(data=Split(dcn=task.sites, ici=task.hosts_per_site)))
    names = axis_names(mesh, "data")
    axes = (names[0], names[-1])
    turns = {c.name: ours(Training(c, mesh, axes, task.rows)) for c in task.contenders}
    turns[ONE_NUMBER] = ours(sums_of_one_number(mesh))
    turns[CODING] = ours(coding_alone())
    with peers(task) as theirs:
        return rounds({**turns, **theirs}, task)


def sums_of_one_number(mesh: Mesh) -> Callable[[int], float]:
    """All-reduces of one float32 among all hosts, one after the other: what latency is."""
    one = jax.make_array_from_process_local_data(split(mesh), np.ones(1, np.float32), (mesh.size,))
    run = compile_local(partial(jax.lax.pmean, axis_name=mesh.axis_names), mesh, one)

    def turn(times: int) -> float:
        x = one
        for _ in range(times):
            x = run(x)
        return float(np.asarray(x.addressable_shards[0].data)[0])

    return turn


def coding_alone() -> Callable[[int], float]:
    """Reductions of the gradients on this host's own device, one after the other."""
    mesh = make_mesh(jax.local_devices(), (1,), ("data",))
    grads = jax.tree.map(lambda x: jax.device_put(x[None], split(mesh)), first_params())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), grads)
    state = jax.tree.map(lambda x: jax.device_put(x, split(mesh)), init_state(like, 1, codec=CODED))

    def reduce(tree: PyTree) -> PyTree:
        grads, state = tree
        own = jax.tree.map(lambda g: g[0], grads)
        found = compressed_all_reduce(own, state, "data", codec=CODED)
        return jax.tree.map(lambda g: g[None], found.grads), found.state

    run = compile_local(reduce, mesh, (grads, state), donate=True)

    def turn(times: int) -> float:
        nonlocal grads, state
        for _ in range(times):
            grads, state = run((grads, state))
        jax.block_until_ready(grads)
        return 0.0

    return turn


def ours(training: Callable[[int], float]) -> Turn:
    """A turn of one of our contenders."""

    def turn(steps: int) -> tuple[float, float]:
        start = time.perf_counter()
        loss = training(steps)
        return time.perf_counter() - start, loss

    return turn


@contextmanager
def peers(task: Task) -> Iterator[dict[str, Turn]]:
    """Torch's contenders on this host, in one process beside this one; at rest between turns.

    Raises:
      RunError: it ends early.
    """
    if task.torch is None:
        yield {}
        return
    arguments = [json.dumps(WIDTHS), str(task.rows), str(LEARNING_RATE)]
    process = subprocess.Popen(
        [task.torch, str(PEER), *arguments],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def answer() -> dict[str, float]:
        if line := stdout.readline():
            return json.loads(line)
        raise RunError(f"torch's process ended with exit code {process.wait()}; see above")

    def turn(kind: str) -> Turn:
        def take(steps: int) -> tuple[float, float]:
            print(kind, steps, file=stdin, flush=True)
            found = answer()
            return found["seconds"], found["loss"]

        return take

    try:
        answer()
        yield {f"torch {kind}": turn(kind) for kind in task.peers}
    finally:
        process.kill()
        process.wait()


def rounds(turns: Mapping[str, Turn], task: Task) -> list[Timed]:
    """Each contender once a round, the first one changing."""
    names, count = list(turns), task.warmup + task.repeats
    found = np.zeros((3, len(names), count), np.float64)
    for index in range(count):
        for place in range(len(names)):
            which = (index + place) % len(names)
            multihost_utils.sync_global_devices("ready")
            before = sent_bytes()
            seconds, loss = turns[names[which]](task.steps)
            sent = sent_bytes() - before
            multihost_utils.sync_global_devices("done")
            found[:, which, index] = seconds / task.steps, sent / task.steps, loss
    everywhere = np.asarray(multihost_utils.process_allgather(found.astype(np.float32)))
    everywhere = everywhere.reshape(-1, *found.shape)[..., task.warmup :]
    slowest, busiest = everywhere[:, 0].max(0), everywhere[:, 1].max(0)
    last = everywhere[:, 2, :, -1].mean(0)
    return [
        Timed(name, tuple(map(float, slowest[i])), float(np.median(busiest[i])), float(last[i]))
        for i, name in enumerate(names)
    ]


def sent_bytes() -> int:
    """Of this host so far."""
    return device_sent_bytes(Path("/proc/self/net/dev").read_text(encoding="ascii"), "eth0")


def main(arguments: Sequence[str]) -> None:
    """Join the other hosts, run the task, and print what was measured (the first host does)."""

    def report(error: BaseException) -> int:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1

    task = TypeAdapter(Task).validate_json(arguments[0])
    with connected(find_processes(os.environ), report):
        found = measure(task)
        if bad := [one.name for one in found if not math.isfinite(one.loss)]:
            raise RunError(f"the loss of {', '.join(bad)} is not finite")
        if jax.process_index() == 0:
            # In one piece, on a line of its own: gloo prints too, on all hosts.
            sys.stdout.write(f"\n{FOUND}{json.dumps([asdict(one) for one in found])}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
