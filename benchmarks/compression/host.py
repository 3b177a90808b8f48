"""The function that each host of the lab runs, which times jaxdist's and torch's contenders."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives.program import compile_local, make_mesh, split
from benchmarks.compression.step import (
    LEARNING_RATE,
    WIDTHS,
    Contender,
    Training,
    first_params,
)
from benchmarks.core.hosts import Timed, Turn, clocked, in_rounds
from benchmarks.core.lab import Lab
from jaxdist.compression import PerParameter, Quantize, compressed_all_reduce, init_state
from jaxdist.errors import RunError
from jaxdist.mesh import MeshConfig, Split, axis_names, build_mesh
from jaxdist.types import PyTree

PEER = Path(__file__).with_name("peer")
ONE_NUMBER = "one number"
"""The name of the contender whose step is an all-reduce of four bytes."""
CODING, CODED = "coding alone", PerParameter(otherwise=Quantize())
"""A contender that reduces over a single device: it encodes and decodes, but sends nothing."""


@dataclass(frozen=True)
class Task:
    """The task that every host runs.

    Attributes:
      hosts: the lab.
      contenders: the contenders of jaxdist.
      peers: the kinds of torch's contenders, or empty without `torch`.
      torch: a Python that has torch, or None to measure without torch.
      rows: the rows of one host's batch.
      steps: the steps of one turn.
      warmup, repeats: the number of rounds that are not counted, and of counted rounds.
    """

    hosts: Lab
    contenders: tuple[Contender, ...]
    peers: tuple[str, ...]
    torch: str | None
    rows: int
    steps: int
    warmup: int
    repeats: int


def measure(task: Task) -> list[Timed]:
    """Time all contenders, interleaved; every host returns the same times.

    Raises:
      RunError: a loss is not finite.
    """
    mesh = build_mesh(MeshConfig(data=Split(dcn=task.hosts.sites, ici=task.hosts.hosts_per_site)))
    names = axis_names(mesh, "data")
    axes = (names[0], names[-1])
    own = {c.name: Training(c, mesh, axes, task.rows) for c in task.contenders}
    own |= {ONE_NUMBER: sums_of_one_number(mesh), CODING: coding_alone()}
    turns = {name: clocked(partial(steps, task.steps)) for name, steps in own.items()}
    with peers(task) as theirs:
        given = {"warmup": task.warmup, "repeats": task.repeats, "steps": task.steps}
        found = in_rounds({**turns, **theirs}, **given)
    if bad := [one.name for one in found if not math.isfinite(one.loss)]:
        raise RunError(f"the loss of {', '.join(bad)} is not finite")
    return found


def sums_of_one_number(mesh: Mesh) -> Callable[[int], float]:
    """Return a turn of all-reduces of one float32 among all hosts, which measures latency."""
    one = jax.make_array_from_process_local_data(split(mesh), np.ones(1, np.float32), (mesh.size,))
    run = compile_local(partial(jax.lax.pmean, axis_name=mesh.axis_names), mesh, one)

    def turn(times: int) -> float:
        x = one
        for _ in range(times):
            x = run(x)
        return float(np.asarray(x.addressable_shards[0].data)[0])

    return turn


def coding_alone() -> Callable[[int], float]:
    """Return a turn of reductions of the gradients over this host's device alone."""
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


@contextmanager
def peers(task: Task) -> Iterator[dict[str, Turn]]:
    """Start torch's contenders in another process of this host, which waits between turns.

    Raises:
      RunError: the process ends early.
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
        def take() -> tuple[float, float]:
            print(kind, task.steps, file=stdin, flush=True)
            found = answer()
            return found["seconds"], found["loss"]

        return take

    try:
        answer()
        yield {f"torch {kind}": turn(kind) for kind in task.peers}
    finally:
        process.kill()
        process.wait()
