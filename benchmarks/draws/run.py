"""The comparison of a draw with a run on a single device, and the check of the draw's checkpoint.

A *draw* is a config chosen at random, with two plans. The second plan loads the checkpoint of the
first plan, and must get the same state.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from benchmarks.draws.draw import Draw, draw
from benchmarks.draws.model import Sections
from jaxdist.errors import JaxdistError, first_line
from jaxdist.experiment import Experiment
from jaxdist.parity.cells import plan_cuts
from jaxdist.parity.run import built, in_full_precision, in_half_precision, single_device
from jaxdist.parity.states import FULL, HALF, NUDGES, nudged, reloaded, replicas_apart
from jaxdist.parity.trace import (
    Differences,
    FirstSteps,
    half_limit_of,
    limit_of,
    norms_at_least,
    trace_differences,
)
from jaxdist.train.state import TrainState
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject, Leaf


@dataclass(frozen=True)
class DrawOutcome:
    """The outcome of the comparison of a draw with a single device.

    Attributes:
      seed: the seed of the draw.
      verdict: "equal" or "differs" if the draw was trained, "refused" if jaxdist refuses the
        config, or "failed" for any other error.
      differences: the differences from a single device, or None if nothing was trained.
      limit: the limits on the differences, or None if nothing was trained.
      checkpoint: "equal" or "differs" for a checkpoint that the second plan loaded, "refused" if
        the second plan cannot be built, or "" if nothing was loaded.
      replicas: the largest difference between replicas of a tensor after the last step, relative to
        the tensor's largest element, or None if nothing was trained.
      reason: the reason why the draw was refused or failed, or the names of tensors that differ.
      seconds: the time of the comparison, in seconds.
      sections: the config that was trained.
      reader: the config that loaded the checkpoint.
    """

    seed: int
    verdict: str
    differences: Differences | None = None
    limit: Differences | None = None
    checkpoint: str = ""
    replicas: float | None = None
    reason: str = ""
    seconds: float = 0.0
    sections: Sections = field(default_factory=dict)
    reader: Sections = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether the draw equals a single device, or is refused by jaxdist."""
        return self.verdict in ("equal", "refused")


def judge_draw(seed: int) -> DrawOutcome:
    """Compare the draw of a seed with a single device, and return the outcome.

    The function trains with the draw's first plan and on a single device, saves a checkpoint of the
    first plan, and loads the checkpoint with the second plan. An error is not raised, but becomes
    part of the outcome.
    """
    drawn, begun = draw(seed), time.perf_counter()
    found: JsonObject = {}
    try:
        found = _compare(drawn)
    # Any error, even a defect of jaxdist, is the outcome of a draw and must not stop later draws.
    except Exception as error:
        found = {"verdict": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
    jax.clear_caches()  # Compiled programs would fill the child's memory, and are not used again.
    seconds = round(time.perf_counter() - begun, 1)
    return DrawOutcome(seed, **found, seconds=seconds, sections=drawn.sections, reader=drawn.reader)


def _compare(drawn: Draw) -> JsonObject:
    """Train and compare a draw, and return the fields of `DrawOutcome` for the results.

    Raises:
      Exception: any error of the draw. A config that jaxdist refuses raises no error: the result
        has the verdict "refused".
    """
    plain = single_device(drawn.sections)
    reference = built(plain, traced=False)
    try:
        steps = FirstSteps(built(drawn.sections, traced=False))
        _ = steps.compiled
    except JaxdistError as error:
        return {"verdict": "refused", "reason": _reason(error)}
    single = FirstSteps(reference)
    initial = single.begin()
    half = in_half_precision(drawn.sections)
    begins = initial, *(nudged(initial, HALF if half else FULL, seed) for seed in NUDGES)
    expected, *moved = (single.run(begun)[0] for begun in begins)
    if half:
        wide = FirstSteps(built(in_full_precision(plain), traced=False))
        moved.append(wide.run(wide.begin())[0])
    found, state = steps.run(initial)
    experiment = steps.experiment
    cuts = plan_cuts(drawn.sections)
    limit = half_limit_of(cuts) if half else limit_of(cuts, experiment.units_per_step)
    off = trace_differences(
        found, expected, norms_at_least(expected, limit, *moved, times=2 if half else 1)
    )
    apart, name = replicas_apart(state)
    judged = {"verdict": "equal", "differences": off, "limit": limit, "replicas": apart}
    if not off.within(limit):
        judged["verdict"] = "differs"
    if apart:
        return {
            **judged,
            "verdict": "differs",
            "reason": f"replicas of {name} are {apart:.1e} apart",
        }
    try:
        # The second plan only loads a state, so its step need not be traced.
        reader = built(drawn.reader, traced=False)
    except JaxdistError as error:
        return {**judged, "checkpoint": "refused", "reason": _reason(error)}
    unlike = _unlike(experiment, state, reader)
    if unlike:
        return {**judged, "verdict": "differs", "checkpoint": "differs", "reason": unlike}
    return {**judged, "checkpoint": "equal"}


def _reason(error: JaxdistError) -> str:
    """Return the text of an error by which jaxdist refuses a config.

    Raises:
      BaseException: the cause of the error, if the cause is not a `JaxdistError`. The config is
        then not refused, but jaxdist has reported one of its defects as an error in the user's
        code.
    """
    cause = error.__cause__
    while cause is not None:
        if not isinstance(cause, JaxdistError):
            raise cause
        cause = cause.__cause__
    return " ".join(str(error).split())


def _unlike(writer: Experiment, state: TrainState, reader: Experiment) -> str:
    """Return a sentence with the names of tensors that a second plan did not load as saved.

    The result is empty if all tensors were loaded as saved.

    Args:
      writer: the experiment whose state is saved.
      state: the state to save.
      reader: the experiment that loads the checkpoint.
    """
    saved, target = writer.program, reader.program
    loaded = reloaded(saved, state, target)
    # The residuals of compression depend on the plan. Another plan does not load them, so they are
    # not compared.
    ours, theirs = (
        replace(program.home.used(held), exchange=())
        for program, held in ((target, loaded), (saved, state))
    )
    pairs = zip(flatten_with_names(ours), jax.tree.leaves(theirs), strict=True)
    unlike = [name for (name, ours), theirs in pairs if not _same(ours, theirs)]
    return f"{len(unlike)} tensors were not loaded as saved: {', '.join(unlike)}" if unlike else ""


def _same(ours: Leaf, theirs: Leaf) -> bool:
    # Bytes are compared, since NaN does not equal itself and -0.0 equals 0.0.
    one, other = np.asarray(ours), np.asarray(theirs)
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )
