"""The bench `jaxdist bench prove`: planted faults that are reported, and false alarms."""

from __future__ import annotations

import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jax

from benchmarks.core.report import Figure, Report, Sheet
from benchmarks.prove.draws import Outcome, outcomes
from benchmarks.prove.known import Known, reports, trainers
from benchmarks.prove.mutations import Planted, mutations
from benchmarks.prove.pieces import kept
from jaxdist.errors import JaxdistError
from jaxdist.experiment import build, load
from jaxdist.proofs.types.check import check_types
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject

FAULTS = 120
DRAWS = 500
SEED = 0
CONFIG = "configs/gpt/70b.yaml"
PLAN = ("mesh.data=8", "parallel.reduce.type=ring", "parallel.zero.stage=3")
PROOFS = {"the quickstart": ("configs/gpt/quickstart.yaml", 60.0), "70B": (CONFIG, 180.0)}
"""The configs whose proofs are timed, with the limit in seconds, by name."""
TIMES = 3
"""The number of times that each of `PROOFS` is timed."""


def bench(programs: int = DRAWS, faults: int = FAULTS) -> Report:
    """Prove steps with known mistakes, plant faults, draw correct plans, and time proofs.

    This takes 20 minutes of CPU time. A bench that was stopped resumes after the last step, plan,
    fault or timed proof.

    Args:
      programs: the number of correct plans, which take a second each.
      faults: the number of faults, which take a few seconds each.
    """
    known = [*reports()], [*trainers()]
    found = [_said(one) for one in mutations(faults, SEED)]
    drawn = (one for one in outcomes(itertools.count(SEED)) if not one.refused)
    draws = [*itertools.islice(drawn, programs)]
    figures = [types_figure(), *time_figures(), *known_figures(*known)]
    figures += [alarms_figure(draws), *faults_figures(found)]
    return Report("prove", figures, [known_listing([*known[0], *known[1]]), faults_listing(found)])


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


def time_figures() -> Iterator[Figure]:
    """Time `jaxdist prove` with whole configs, in seconds of CPU time of the process.

    CPU seconds are at least the time that the command takes on an idle machine with one core, and
    do not depend on other work of the machine.
    """
    for name, (config, limit) in PROOFS.items():
        runs = [*kept("times", [(config, index) for index in range(TIMES)], _timed)]
        spent = statistics.median(run["cpu_seconds"] for run in runs)
        clock = ", ".join(f"{run['seconds']:.0f}" for run in runs)
        note = f"{runs[0]['verdict']}; CPU time; {clock} s on the clock"
        yield Figure(f"proof of {name}, CPU time", spent, limit, "<= 1", "s", note)


def _timed(case: tuple[str, int]) -> JsonObject:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxdist", "prove", case[0], "--devices", "8"]
        begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command += [f"run.directory={folder}/run"]
        found = subprocess.run(command, check=False, capture_output=True, text=True)
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    verdict = found.stdout.rpartition("\n")[0].rpartition("\n")[2].partition(":")[0]
    if verdict not in ("proved", "undecided", "wrong"):
        raise JaxdistError(
            f"jaxdist prove {case[0]} ended without a verdict: {found.stderr[-2000:]}"
        )
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": spent, "verdict": verdict}


def known_figures(reported: Sequence[Known], trained: Sequence[Known]) -> list[Figure]:
    """Count the public reports and the trainers' faults that are found.

    A trainer without a fault is right if it is proved.
    """
    right, planted = ([one for one in trained if bool(one.fault) == has] for has in (False, True))
    named = {
        "public reports found": ([one.verdict == "wrong" for one in reported]),
        "faults in two trainers found": ([one.verdict == "wrong" for one in planted]),
        "trainers without a fault proved": ([one.verdict == "proved" for one in right]),
    }
    return [Figure(name, sum(f), len(f), ">= 1", "") for name, f in named.items()]


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


known_listing = Sheet[Known](
    "Public reports and trainers",
    {
        "of": "of",
        "fault": "fault",
        "verdict": "verdict",
        "types": lambda one: " ".join(one.types),
        "numbers": lambda one: ", ".join(one.numbers),
    },
)
"""The listing of the lines that types named and of the values that differ."""
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
"""The listing of the leaf or value that each part of the proof reported. If both parts reported
nothing, the fault was not found."""
