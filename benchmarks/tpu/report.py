"""The bench `jaxdist bench tpu`: predicted steps of pods, compared with published results.

No TPU is used: libtpu compiles, and its estimates are added up (`jaxdist.cost.step_time`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.core.report import Figure, Listing, Report, Sheet, lacking
from benchmarks.tpu import kernels, mixtures, shared
from benchmarks.tpu.cases import CASES, Case
from benchmarks.tpu.program import Step, measure
from jaxdist.errors import JaxdistError, RunError, did_you_mean
from jaxdist.runtime.environment import versions

ESTIMATE_SECONDS = 5.0
"""The goal for the time to predict a program of 80 layers."""


PREDICTED = "predicted s"
"""The unit of predicted times; recorded figures in "s" vary from machine to machine."""


PARTS: Mapping[str, Callable[[], Sequence[Figure]]] = {
    "products": lambda: kernels.figures(kernels.measure()),
    "context": shared.figures,
    "experts": mixtures.figures,
}
"""The parts of the bench by name, without the part `steps`, which also has listings."""


def bench(part: Sequence[str] = ()) -> Report:
    """Compile the cases of the named parts, or of all, one after another, in minutes each.

    Args:
      part: the names of parts.

    Raises:
      JaxdistError: no part has this name.
    """
    known = (*PARTS, "steps")
    if unknown := [name for name in part if name not in known]:
        raise JaxdistError(
            f"bench tpu has no part {unknown[0]!r}: {did_you_mean(unknown[0], known)}"
        )
    if reason := lacking("libtpu"):
        return Report("tpu", [Figure.skipped("programs", reason)])
    chosen = part or known
    figures = [figure for name in PARTS if name in chosen for figure in PARTS[name]()]
    if "steps" not in chosen:
        return Report("tpu", figures)
    found: list[tuple[Case, Step]] = []
    for case in CASES:
        try:
            step = measure(case)
        except RunError as error:
            figures.append(Figure.skipped(label(case), str(error)))
            continue
        found.append((case, step))
        print(f"{label(case)}: {step.seconds:.3g} s", file=sys.stderr)
    fit = [one for one in found if one[1].fits]
    return Report("tpu", [*figures, *step_figures(found)], [listing(fit), parts(fit)])


def label(case: Case) -> str:
    """Return the name of a case with its chips."""
    return f"{case.name}, {case.topology}"


def step_figures(found: Sequence[tuple[Case, Step]]) -> list[Figure]:
    """Compare predictions with the cases' goals, and return the error of published MFUs."""
    figures: list[Figure] = []
    errors: list[float] = []
    for case, step in found:
        if not step.fits:
            reason = f"refused by the compiler: {step.refusal}"
            figures.append(Figure.skipped(label(case), reason))
            continue
        name = label(case)
        if case.most_seconds:
            goal = "<= 1"
            figures.append(
                Figure(f"step, {name}", step.seconds, case.most_seconds, goal, PREDICTED)
            )
        if case.most_peak_gb:
            peak = step.peak_bytes / 1e9
            figures.append(Figure(f"memory, {name}", peak, case.most_peak_gb, "<= 1", "GB"))
        if case.least_mfu:
            figures.append(Figure(f"MFU, {name}", step.mfu_causal, case.least_mfu, ">= 1", ""))
        if case.published_mfu:
            goal = ">= 0.95" if case.name.startswith(("128B", "16B")) else ""
            note = "MFU with attention counted whole, over MaxText's as published"
            figures.append(Figure(f"MFU, {name}", step.mfu, case.published_mfu, goal, "", note))
            errors.append(abs(step.mfu / case.published_mfu - 1))
    if errors:
        note = "median of |predicted / published - 1| over the published rows"
        error = statistics.median(errors)
        figures.append(Figure("error of the prediction", error, 0.15, "<= 1", "", note))
    if slow := [step.estimate_seconds for case, step in found if step.fits and "70B" in case.name]:
        name = "the prediction itself, 80 layers"
        figures.append(Figure(name, max(slow), ESTIMATE_SECONDS, "<= 1"))
    return figures


listing = Sheet[tuple[Case, Step]](
    lambda found: f"Predicted steps (libtpu {versions(['libtpu'])['libtpu']})",
    {
        "step": lambda one: one[0].name,
        "chips": lambda one: one[0].topology,
        "mesh": lambda one: one[1].mesh,
        "predicted": (lambda one: one[1].seconds, "s"),
        "MFU causal": lambda one: one[1].mfu_causal,
        "MFU whole": lambda one: one[1].mfu,
        "peak": (lambda one: one[1].peak_bytes / 1e9, "GB"),
    },
)
"""The listing of every step: chips, mesh, seconds, MFU by both definitions, memory."""


def parts(found: Sequence[tuple[Case, Step]]) -> Listing:
    """List the seconds of each part of each step."""
    rows = [
        (label(case), name, seconds, seconds / step.seconds)
        for case, step in found
        for name, seconds in step.parts.items()
    ]
    return Listing("Where the step goes", {"step": "", "part": "", "": "s", "share": ""}, rows)
