"""The bench of ZeRO: memory, bytes and FLOPs of each stage against formulas and plain sharding."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from benchmarks.core.report import Figure, Report, Sheet, lacking
from benchmarks.zero import paper as zero_paper
from benchmarks.zero import plot as zero_plot
from benchmarks.zero import program as zero_program
from benchmarks.zero import race as zero_race
from benchmarks.zero.paper import PaperRow
from benchmarks.zero.program import FLOAT32, ZeroRow, bound_bytes, formula_bytes
from jaxdist.runtime.environment import versions

STATE_GOALS = ("<= 1.10", "<= 1.10", "<= 1.10", "<= 1.20")
"""The goals for memory by stage."""
AUTO_GOAL, SENT_GOAL = "<= 1.00", "<= 1.02"
FLOPS_GOALS = {"none": "<= 1.03", "full": "<= 1.36"}
PAPER_GOALS = {1: "<= 1.08", 2: "<= 1.08", 3: "<= 1.20"}
"""The goals for the paper's memory by stage; stage 0 must be refused by the compiler."""
REFUSED_GOAL = ">= 1"
BYTES_NOTE = (
    "bytes a parameter that further layers add, less their inputs kept by full remat: "
    "a layer's activations, one gathered layer, logits and embedding cancel"
)


def bench(plot: str | os.PathLike[str] | None = None) -> Report:
    """Compare compiled steps with formulas, the paper's figure 1 and torch.

    Args:
      plot: a directory for the picture of figure 1, as SVG; None draws none.
    """
    rows = zero_program.measure("cpu")
    figures = [*state_figures(rows), *auto_figures(rows), *sent_figures(rows)]
    figures += flops_figures(rows)
    paper: list[PaperRow] = []
    if reason := lacking("libtpu"):
        figures.append(Figure.skipped("tpu programs", reason))
    else:
        tpu = zero_program.measure("tpu")
        paper = zero_paper.measure()
        figures += [*sent_figures(tpu), *paper_figures(paper)]
        rows += tpu
    if plot is not None and paper:
        zero_plot.plot_memory(paper, plot)
    race = zero_race.bench()
    listings = [listing(rows), *([paper_listing(paper)] if paper else []), *race.listings]
    return Report("zero", [*figures, *race.figures], listings)


def state_figures(rows: Sequence[ZeroRow]) -> list[Figure]:
    """Compare the memory per parameter of each stage with the formula, by number of devices."""
    return [
        Figure(
            f"held a parameter, stage {row.stage}, {row.devices} devices",
            row.bytes_per_param,
            formula_bytes(FLOAT32, row.stage, row.devices),
            STATE_GOALS[row.stage],
            "B",
            BYTES_NOTE if not index else "",
        )
        for index, row in enumerate(row for row in rows if row.form == "explicit")
        if row.bytes_per_param is not None
    ]


def auto_figures(rows: Sequence[ZeroRow]) -> list[Figure]:
    """Compare the peak with the peak of plain sharding constraints, at the worst stage."""
    measured = [row for row in rows if row.bytes_per_param is not None]
    auto = {(row.devices, row.stage): row.peak_bytes for row in measured if row.form == "auto"}
    figures, note = [], "the whole peak; the worst of {} stages is {}"

    def pair(row: ZeroRow) -> tuple[float, float]:
        return row.peak_bytes, auto[row.devices, row.stage]

    for count in sorted({row.devices for row in rows}):
        name = f"peak over plain sharding constraints, {count} devices"
        found = [row for row in measured if row.devices == count]
        figures.append(_worst(name, found, pair, AUTO_GOAL, note=note))
    return figures


def sent_figures(rows: Sequence[ZeroRow]) -> list[Figure]:
    """Compare the bytes sent with the bound, at the stage with the worst ratio."""
    figures = []
    for platform, count in sorted({(row.platform, row.devices) for row in rows}):
        name = f"bytes sent, {platform}, {count} devices"
        found = [row for row in rows if row.devices == count]
        figures.append(_worst(name, found, lambda row: (row.sent_bytes, _bound(row)), SENT_GOAL))
    return figures


def flops_figures(rows: Sequence[ZeroRow]) -> list[Figure]:
    """Compare the FLOPs of the program and of the model, at the stage with the worst ratio."""
    figures = []
    for remat, goal in FLOPS_GOALS.items():
        name, found = f"FLOPs, remat {remat}", [row for row in rows if row.remat == remat]
        figures.append(_worst(name, found, lambda row: (row.flops, row.ideal_flops), goal, "FLOP"))
    return figures


def _worst(
    name: str,
    rows: Sequence[ZeroRow],
    pair: Callable[[ZeroRow], tuple[float, float]],
    goal: str,
    unit: str = "B",
    note: str = "the worst of {} programs is stage {}",
) -> Figure:
    """Return the explicit program with the largest ratio of the two numbers of `pair`."""
    explicit = [row for row in rows if row.form == "explicit"]

    def said(row: ZeroRow) -> str:
        return note.format(len(explicit), row.stage)

    return Figure.worst(name, explicit, pair, goal, unit, said)


def paper_figures(rows: Sequence[PaperRow]) -> list[Figure]:
    """Compare the peaks of figure 1 with the formula, or with a device's memory if refused."""
    figures = []
    for row in rows:
        if row.form != "explicit":
            continue
        name = f"{row.params / 1e9:.2f}B on 64 v5p, stage {row.stage}"
        ours, note = row.peak_bytes / 1e9, f"all that the step takes; {zero_paper.WINDOW} tokens"
        reference, goal = row.formula_bytes / 1e9, PAPER_GOALS.get(row.stage, "<= 0")
        if row.memory_bytes is not None:
            note = "refused by the compiler; the reference is what a program may have"
            reference = row.memory_bytes / 1e9
            goal = REFUSED_GOAL if row.stage == 0 else "<= 1"
        figures.append(Figure(name, ours, reference, goal, "GB", note))
    return figures


def _bound(row: ZeroRow) -> float:
    return bound_bytes(4 * row.params, row.stage, row.devices)


listing = Sheet[ZeroRow](
    "compiled steps: bytes a parameter held, by formula and in the whole peak; bytes sent "
    "over the bound; FLOPs over the model's",
    {
        "on": lambda row: f"{row.platform} {row.devices}",
        "stage": "stage",
        "form": "form",
        "remat": "remat",
        "held": lambda row: row.bytes_per_param and f"{row.bytes_per_param:.2f}",
        "formula": lambda row: f"{formula_bytes(FLOAT32, row.stage, row.devices):.2f}",
        "peak": lambda row: f"{row.peak_bytes / row.params:.2f}",
        "sent": lambda row: f"{row.sent_bytes / _bound(row):.3f}",
        "FLOPs": lambda row: f"{row.flops / row.ideal_flops:.3f}",
    },
)
"""The listing of every program; the form auto has only sharding constraints."""

paper_listing = Sheet[PaperRow](
    lambda rows: (
        f"{rows[0].params / 1e9:.2f} billion parameters on 64 chips of v5p, "
        f"libtpu {versions(['libtpu'])['libtpu']}"
    ),
    {
        "stage": "stage",
        "form": "form",
        "formula": (lambda row: row.formula_bytes / 1e9, "GB"),
        "peak": (lambda row: row.peak_bytes / 1e9, "GB"),
        "ratio": lambda row: f"{row.peak_bytes / row.formula_bytes:.3f}",
        "compiler": lambda row: "refused: out of memory" if row.refused else "compiled",
    },
)
"""The listing of the paper's figure 1; a step needs temporary memory in addition to the state."""
