"""The work and the time of the executor, compared with the usual SPMD pipeline.

The usual form is one scan over m + p - 1 ticks, which `jax.grad` differentiates. In each tick every
stage runs its layers; a stage without a microbatch computes with meaningless values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.core import child
from benchmarks.core.harness import Sample, interleave
from benchmarks.core.report import Figure, Sheet
from benchmarks.pipeline.program import (
    AXIS,
    PASSES,
    Local,
    ModelSize,
    PlacedStep,
    Tell,
    arguments,
    compile_step,
    executor,
    parts,
    stage_mesh,
)
from jaxdist.hlo import Ledger, ledger
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.model_fns import GradientsAndSums, ModelFns, Visit
from jaxdist.parallel.pipeline.executor.ticks import NONE, Activations, Ticks
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.schedule import TaskKind
from jaxdist.types import Params, PyTree

STAGES, ROUNDS = 4, (1, 2, 4)
"""The number of stages, and the numbers of microbatches per stage."""
SIZE = ModelSize(rows=256, features=512, layers=2)
COUNTED = ModelSize(rows=2, features=4, layers=1)
"""The size of the programs whose passes are counted while they run."""
PAIRS = 21
"""The number of timed pairs, which is large because four devices share fewer cores."""
WORK_GOAL, TIME_GOAL = "<= 1.05", "<= 0.667"


@dataclass(frozen=True)
class WorkCell:
    """The executor with 1F1B, and the usual form, at one number of microbatches.

    Attributes:
      activations, stages, microbatches: the policy and the size.
      flops, scan_flops, model_flops: the FLOPs of the busiest stage in the executor, in the usual
        form, and in the model.
      passes, scan_passes, model_passes: the passes of all stages, counted while both forms ran:
        forward, gradient of the input and gradient of the weights, which have the same FLOPs.
      seconds, scan_seconds: the times of pairs, or empty if they were not timed.
    """

    activations: Activations
    stages: int
    microbatches: int
    flops: float
    scan_flops: float
    model_flops: float
    passes: int
    scan_passes: int
    model_passes: int
    seconds: tuple[float, ...] = ()
    scan_seconds: tuple[float, ...] = ()


def usual_scan(model: ModelFns, stages: int, microbatches: int, activations: Activations) -> Local:
    """Return the usual form, which recomputes layers if the executor does."""
    last, right = stages - 1, [(s, s + 1) for s in range(stages - 1)]
    blocks = jax.checkpoint(model.blocks) if activations == "recompute" else model.blocks

    def loss(own: Params, shared: Params, rows: PyTree) -> tuple[jax.Array, PyTree]:
        here = lax.axis_index(AXIS)

        def tick(arrived: PyTree, number: jax.Array) -> tuple[PyTree, PyTree]:
            visit = Visit(rows[jnp.minimum(number, microbatches - 1)], here, None)
            x = jnp.where(here == 0, model.embed(shared, visit), arrived)
            y = blocks(own, x, visit)
            return lax.ppermute(y, AXIS, right), y

        ticks = jnp.arange(microbatches + last)
        outputs = lax.scan(tick, jnp.zeros_like(rows[0]), ticks)[1][last:]
        heads = jax.vmap(lambda y, row: model.head(shared, y, Visit(row, here, None)))
        total, sums = jax.tree.map(
            lambda each: jnp.where(here == last, each.sum(), 0), heads(outputs, rows)
        )
        return total, sums

    def local(chunks: Params, shared: Params, rows: PyTree) -> GradientsAndSums:
        (_, sums), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(chunks[0], shared, rows)
        return GradientsAndSums(grads[0][None], *lax.psum((grads[1], sums), AXIS))

    return local


def programs(
    size: ModelSize,
    stages: int,
    microbatches: int,
    activations: Activations,
    tell: Tell | None = None,
) -> tuple[Ticks, PlacedStep, PlacedStep]:
    """Compile 1F1B by the executor and the usual form, on the same arguments."""
    ticks = lower(one_f_one_b(stages, microbatches), activations=activations)
    model, given, mesh = parts(tell), arguments(size, stages, microbatches), stage_mesh(stages)
    forms = (executor(ticks, model), usual_scan(model, stages, microbatches, activations))
    ours, scan = (compile_step(form, mesh, given, ticks.placement) for form in forms)
    return ticks, ours, scan


def executed_flops(ticks: Ticks, found: Ledger) -> float:
    """Return the FLOPs of the busiest stage: its tasks, times the FLOPs of a task's branch.

    Each tick of the program has one conditional for forward and one for backward tasks.
    """
    tasks = [(work.kind != NONE).sum(axis=0).max() for work in (ticks.forward, ticks.backward)]
    assert tasks[0] == tasks[1], (ticks.name, tasks)
    assert found.flops_low == 0, "something is computed outside of the conditionals"
    return found.flops_high / ticks.ticks * float(tasks[0])


def cell(stages: int, microbatches: int, activations: Activations, *, timed: bool) -> WorkCell:
    """Compile both forms, count their work, and if `timed`, compare their results and time them."""
    ticks, ours, scan = programs(SIZE, stages, microbatches, activations)
    mesh = stage_mesh(stages)
    seconds, scan_seconds = Sample(()), Sample(())
    if timed:
        same(ours(), scan())
        seconds, scan_seconds = interleave(ours, scan, repeats=PAIRS)
    passes, scan_passes = counted(stages, microbatches, activations)
    return WorkCell(
        activations,
        stages,
        microbatches,
        flops=executed_flops(ticks, ledger(ours.step, mesh)),
        scan_flops=ledger(scan.step, mesh).flops_high,
        model_flops=SIZE.model_flops(activations, microbatches),
        passes=passes,
        scan_passes=scan_passes,
        model_passes=PASSES[activations] * stages * microbatches,
        seconds=seconds.seconds,
        scan_seconds=scan_seconds.seconds,
    )


def counted(stages: int, microbatches: int, activations: Activations) -> tuple[int, int]:
    """Return the number of passes that ran in a step of each form."""
    ran: list[TaskKind] = []
    _, *forms = programs(COUNTED, stages, microbatches, activations, ran.append)
    counts = []
    for form in forms:
        ran.clear()
        form()
        counts.append(len(ran))
    return counts[0], counts[1]


def same(ours: GradientsAndSums, scan: GradientsAndSums) -> None:
    """Assert that both forms have equal losses and gradients, up to rounding."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(scan), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def cells() -> Iterator[WorkCell]:
    """Yield the cell of each policy and number of microbatches; each policy's first is timed."""
    for activations in get_args(Activations):
        for rounds in ROUNDS:
            yield cell(STAGES, rounds * STAGES, activations, timed=rounds == 1)


measure = child.apart(cells, "the executor beside the usual scan", devices=STAGES, compiles=False)
"""A function that returns every cell, measured in a process with a device for each stage."""


def figures(cells: Sequence[WorkCell]) -> list[Figure]:
    """Return the largest ratios of work to the model's work, and of times to the scan's times."""

    def at(one: WorkCell) -> str:
        return f"the worst of {len(cells)} is {one.microbatches} microbatches, {one.activations}"

    return [
        Figure.worst(
            "executed FLOPs over the model's", cells, lambda one: (one.flops, one.model_flops),
            WORK_GOAL, "",
            lambda one: f"the busiest of {one.stages} stages, from the compiled program; "
            f"{at(one)}, where the usual scan has {one.scan_flops / one.model_flops:.3f}",
        ),
        Figure.worst(
            "executed passes over the model's", cells, lambda one: (one.passes, one.model_passes),
            WORK_GOAL, "",
            lambda one: f"forward, and of both gradients, counted on all {one.stages} stages while "
            f"they ran; {at(one)}, where the usual scan runs {one.scan_passes}",
        ),
        *(_time(one) for one in cells if one.seconds),
    ]  # fmt: skip


def _time(one: WorkCell) -> Figure:
    note = (
        f"{one.microbatches} microbatches, {one.stages} stages that share this machine's cores: "
        "what is not computed is time saved. On accelerators each stage has a device of its own, "
        "which in the bubble waits here and computes there: the time is the same"
    )
    samples = (Sample(one.seconds), Sample(one.scan_seconds))
    title = f"step time over the usual scan's, {one.activations}"
    return Figure.compare(title, *samples, TIME_GOAL, note)


listing = Sheet[WorkCell](
    "executed over model work: the executor with 1F1B, and the usual scan",
    {
        "activations": "activations",
        "m": "microbatches",
        "FLOPs": lambda one: f"{one.flops / one.model_flops:.3f}",
        "passes": lambda one: f"{one.passes / one.model_passes:.3f}",
        "scan's FLOPs": lambda one: f"{one.scan_flops / one.model_flops:.3f}",
        "its passes": lambda one: f"{one.scan_passes / one.model_passes:.3f}",
        "(m+p-1)/m": lambda one: f"{(one.microbatches + one.stages - 1) / one.microbatches:.3f}",
    },
)
"""The listing of every cell, with the ratio of its work to the model's work."""
