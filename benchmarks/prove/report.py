"""The bench `jaxdist bench prove`: planted faults that are reported, and false alarms."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

import jax

from benchmarks.core.report import Figure, Report, Sheet
from benchmarks.prove.draws import Outcome, outcomes
from benchmarks.prove.mutations import Planted, mutations
from jaxdist.experiment import build, load
from jaxdist.proofs.types.check import check_types
from jaxdist.trees import flatten_with_names

FAULTS = 120
DRAWS = 500
SEED = 0
CONFIG = "configs/gpt/70b.yaml"
PLAN = ("mesh.data=8", "parallel.reduce.type=ring", "parallel.zero.stage=3")


def bench(programs: int = DRAWS, faults: int = FAULTS) -> Report:
    """Plant faults, draw correct plans, and check the types of 80 layers; an hour on two cores.

    Args:
      programs: the number of correct plans, which take seconds each.
      faults: the number of faults, which take ten seconds each. A bench that was stopped resumes
        after the last plan and the last fault.
    """
    found = [_said(one) for one in mutations(faults, SEED)]
    drawn = (one for one in outcomes(itertools.count(SEED)) if not one.refused)
    draws = [*itertools.islice(drawn, programs)]
    figures = [types_figure(), alarms_figure(draws), *faults_figures(found)]
    return Report("prove", figures, [faults_listing(found)])


def _said(one: Planted) -> Planted:
    print(
        f"{one.fault.family}, {one.plan}: {one.types or one.numbers or 'not found'}",
        file=sys.stderr,
    )
    return one


def types_figure() -> Figure:
    """Time the check of types of 80 layers at full size; the program is traced but not run."""
    document, config = load(CONFIG, PLAN)
    program = build(config, document, devices=jax.devices()[:8]).program
    shapes = program.state_shapes, program.batch
    closed, out = jax.make_jaxpr(program.train, return_shape=True)(*shapes)
    begun = time.perf_counter()
    found = check_types(closed, [name for name, _ in flatten_with_names(out)])
    spent = time.perf_counter() - begun
    proved = f"{len(found.proved)} of {len(found.outputs)} leaves proved; traced before"
    return Figure("types, 80 layers", spent, 2.0, "<= 1", "s", proved)


def alarms_figure(draws: Sequence[Outcome]) -> Figure:
    """Count the correct plans for which an error is reported."""
    alarms = [one.seed for one in draws if one.alarms]
    leaves, proved = sum(one.leaves for one in draws), sum(one.proved for one in draws)
    note = f"seeds with an alarm: {alarms}; {proved} of {leaves} leaves of shard_maps are proved"
    return Figure("right plans called wrong", len(alarms), len(draws), "<= 0", "", note)


def faults_figures(found: Sequence[Planted]) -> list[Figure]:
    """Count the faults that are reported at a spoiled leaf or value, in all and by part."""
    named = {
        "planted faults reported": [one for one in found if one.found],
        "by types": [one for one in found if one.types],
        "by numbers, of the rest": [one for one in found if one.numbers],
    }
    goals = {"planted faults reported": ">= 0.95"}
    return [
        Figure(name, len(ones), len(found), goals.get(name, ""), "") for name, ones in named.items()
    ]


faults_listing = Sheet[Planted](
    "Planted faults",
    {
        "family": lambda one: one.fault.family,
        "plan": "plan",
        "in": lambda one: one.fault.file,
        "types": "types",
        "numbers": "numbers",
    },
)
"""The listing of the leaf or value that each part reported; if both are empty, the fault was not
found."""
