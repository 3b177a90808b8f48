"""Which branches a schedule takes, and how long a program of its ticks is predicted to take."""

import random

import numpy as np
import pytest
from pipeline_tables import TABLES, greedy
from tick_programs import ticked

from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.lockstep import mismatch
from jaxdist.hlo.timeline import play
from jaxdist.parallel.pipeline.executor.branches import backward_kinds, lockstep
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.ticks import KINDS, NONE
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.schedule import TaskKind
from jaxdist.pipeline_schedules.simulate import simulate

LAYOUT = MeshLayout({"stage": 4}, (0, 1, 2, 3))


class Seconds:
    """A cycle is a second."""

    def cycles(self, count):
        return float(count)


def predicted(ticks, seconds, *, every=0, outside=0):
    """The timeline of a program whose branches take so many seconds, by kind of task."""
    branches = {
        "forward": (0, seconds[TaskKind.FORWARD]),
        "backward": (0, *(seconds[kind] for kind in backward_kinds(ticks))),
    }
    module = ticked(branches, ticks=ticks.ticks, every=every, outside=outside)
    taken = lockstep(ticks, [1] * ticks.chunks)
    assert mismatch(module, taken) is None
    return play(module, LAYOUT, Seconds(), lockstep=taken)


def by_hand(ticks, seconds):
    """Of each tick and stage, what its tasks take; one after another, no task is nothing."""
    found = np.zeros((ticks.ticks, ticks.stages))
    for tick, stage in np.ndindex(found.shape):
        for work in (ticks.forward, ticks.backward):
            kind, chunk = work.kind[tick, stage], work.chunk[tick, stage]
            left_out = ticks.activations == "recompute" and chunk == ticks.chunks - 1
            if kind != NONE and not (KINDS[kind] is TaskKind.FORWARD and left_out):
                found[tick, stage] += seconds[KINDS[kind]]
    return found


def drawn(seed):
    """A schedule: one by name, or what comes to hand on a random placement."""
    rng = random.Random(seed)
    stages = rng.randrange(2, 5)
    microbatches = stages * rng.randrange(2, 4)
    if rng.random() < 0.3:
        chunks = stages * rng.randrange(1, 3)
        placement = [*range(stages), *(rng.randrange(stages) for _ in range(chunks - stages))]
        schedule = greedy("drawn", placement, microbatches, split=rng.random() < 0.5)
    else:
        schedule = rng.choice(list(TABLES.values()))(stages, microbatches)
    return rng, schedule


@pytest.mark.parametrize("seed", range(30))
def test_a_drawn_schedule_takes_what_its_ticks_take_by_hand(seed):
    rng, schedule = drawn(seed)
    policy, paired = rng.choice(("recompute", "stash")), rng.choice((True, False))
    ticks = lower(schedule, activations=policy, paired=paired)
    seconds = {kind: rng.randrange(1, 20) for kind in KINDS}
    every, outside = rng.randrange(4), rng.randrange(9)
    found = predicted(ticks, seconds, every=every, outside=outside)
    each = by_hand(ticks, seconds)
    assert found.seconds == pytest.approx(2 * outside + every * ticks.ticks + each.max(1).sum())
    bubble = (each.max(1) - each.mean(1)).sum()
    assert found.entries["l"].waited_seconds == pytest.approx(bubble)
    if policy == "stash":
        assert each.max(1).sum() == pytest.approx(ticks.seconds(seconds))


@pytest.mark.parametrize("seed", range(30, 50))
def test_where_all_tasks_take_one_unit_the_bubble_is_the_schedules_own(seed):
    _, schedule = drawn(seed)
    timeline = simulate(schedule, Costs(full=1.0))
    ticks = lower(schedule, activations="stash", paired=False)
    found = predicted(ticks, dict.fromkeys(KINDS, 1))
    assert found.seconds == timeline.makespan
    waits = [timeline.makespan - busy for busy in timeline.busy]
    assert found.entries["l"].waited_seconds == pytest.approx(np.mean(waits))


def test_the_bubble_of_gpipe():
    """(p - 1) / (m + p - 1) of the step (Huang et al. 2019, arXiv 1811.06965, section 2.3)."""
    ticks = lower(gpipe(4, 12), activations="stash")
    found = predicted(ticks, {TaskKind.FORWARD: 1, TaskKind.FULL: 2})
    assert found.entries["l"].waited_seconds / found.seconds == pytest.approx(3 / 15)


def test_one_microbatch_keeps_one_stage_at_work():
    ticks = lower(gpipe(4, 1), activations="stash")
    found = predicted(ticks, {TaskKind.FORWARD: 1, TaskKind.FULL: 2})
    assert found.seconds == 4 * (1 + 2)
    assert found.entries["l"].waited_seconds / found.seconds == pytest.approx(3 / 4)


def test_one_stage_has_no_bubble():
    ticks = lower(gpipe(1, 6), activations="stash")
    found = predicted(ticks, {TaskKind.FORWARD: 1, TaskKind.FULL: 2})
    assert (found.seconds, found.entries["l"].waited_seconds) == (6 * 3, 0)


def test_every_conditional_of_a_tick_is_decided():
    ticks = lower(TABLES["zb_v"](2, 4), activations="stash")
    found = lockstep(ticks, [3, 3, 2, 3])
    assert found.ticks == ticks.ticks
    assert found.groups == 2
    first = found.decisions["forward/first"].taken
    assert first[ticks.forward.kind != NONE].sum() == ticks.microbatches
    last = found.decisions["backward/last"].taken & (ticks.backward.kind == 2)
    assert last.sum() == ticks.microbatches  # INPUT tasks of the last chunk
    assert found.decisions["backward"].branches == 3
    layers = found.decisions["forward/layer"].taken
    assert {*layers[ticks.forward.chunk == 2]} == {2 / 3}
    assert {*layers[ticks.forward.chunk == 3]} == {1}
    channels = {name for name in found.decisions if name.startswith(("outputs", "cotangents"))}
    offsets = [("outputs", c) for c in ticks.outputs] + [
        ("cotangents", c) for c in ticks.cotangents
    ]
    assert channels == {f"{name}_{channel.offset}" for name, channel in offsets}
