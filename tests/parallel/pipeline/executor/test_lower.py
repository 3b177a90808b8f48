import pytest
from pipeline_tables import TABLES, B, F, I, W, greedy

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.executor.lower import lower, typical_seconds
from jaxdist.parallel.pipeline.executor.ticks import KINDS, NONE
from jaxdist.parallel.pipeline.model.pipeline import lowered
from jaxdist.parallel.pipeline.planning.plan import PipelineConfig
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.derived import eager, forward_only
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.order import needs
from jaxdist.pipeline_schedules.schedule import (
    Schedule,
    Task,
    TaskKind,
    loop,
    v_shape,
)
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.v import zb_v

SCHEDULES = [
    *(build(4, 8) for build in TABLES.values()),
    gpipe(1, 3),
    one_f_one_b(4, 2),
    greedy("folded", (0, 0, 1, 1), 5),
    greedy("any", (2, 0, 1, 3, 0, 2), 5, split=True),
    forward_only(range(4), 6),
    forward_only(v_shape(2), 4),
]
CELLS = [
    pytest.param(table, policy, paired, id=f"{table.name}-{policy}-{paired}")
    for table in SCHEDULES
    for policy in ("recompute", "stash")
    for paired in (False, True)
]
SECONDS = {TaskKind.FORWARD: 1.0, TaskKind.FULL: 2.5, TaskKind.INPUT: 1.5, TaskKind.WEIGHT: 1.0}


def tasks_of(ticks, tick, stage):
    return [
        Task(
            KINDS[work.kind[tick, stage]],
            int(work.chunk[tick, stage]),
            int(work.microbatch[tick, stage]),
        )
        for work in (ticks.forward, ticks.backward)
        if work.kind[tick, stage] != NONE
    ]


class Buffers:
    """Buffers of labels, and when each label was needed: from being written to being last read."""

    def __init__(self):
        self.held, self.lives, self.moment = {}, {}, 0

    def write(self, stage, name, slot, label):
        assert slot != NONE
        self.held[stage, name, slot] = label
        self.lives[stage, name, label] = [self.moment, self.moment]

    def read(self, stage, name, slot, label):
        assert self.held.get((stage, name, slot)) == label
        self.lives[stage, name, label][1] = self.moment

    def most(self, name):
        """The most that had to be held at once, on any stage."""
        lives = [(stage, *life) for (stage, kind, _), life in self.lives.items() if kind == name]
        return max(
            (sum(s == t and a <= start <= b for t, a, b in lives) for s, start, _ in lives),
            default=0,
        )


def replay(table, ticks):
    """Runs the tables: every task finds what it needs where it looks."""
    buffers, last, stash = Buffers(), table.chunks - 1, ticks.activations == "stash"

    def row(work, tick, stage):
        return type(work)(*(int(column[tick, stage]) for column in work))

    def forward(stage, work, visit):
        if work.chunk > 0:
            buffers.read(stage, "inputs", work.input, visit)
        if stash and ticks.trains:
            buffers.write(stage, "residuals", work.residual, visit)
            if work.chunk == last:
                # Where the input was, as long as that has been: one value.
                begun = buffers.lives.get((stage, "inputs", visit), [buffers.moment])[0]
                buffers.write(stage, "inputs", work.input, visit)
                buffers.lives[stage, "inputs", visit][0] = begun

    def backward(stage, work, visit):
        if KINDS[work.kind] is W:
            return buffers.read(stage, "kept", work.kept, visit)
        if stash:
            buffers.read(stage, "residuals", work.residual, visit)
        if (work.chunk == last) if stash else (work.chunk > 0):
            buffers.read(stage, "inputs", work.input, visit)
        if work.chunk < last:
            buffers.read(stage, "gradients", work.gradient, visit)
        if KINDS[work.kind] is I:
            buffers.write(stage, "kept", work.kept, visit)
        return None

    for tick in range(ticks.ticks):
        arriving = []
        for works, task, channels, name, towards in (
            (ticks.forward, forward, ticks.outputs, "inputs", 1),
            (ticks.backward, backward, ticks.cotangents, "gradients", -1),
        ):
            sent = {}
            for stage in range(ticks.stages):
                work = row(works, tick, stage)
                if work.kind != NONE:
                    task(stage, work, (work.chunk, work.microbatch))
                    sent[stage] = (work.chunk + towards, work.microbatch)
            buffers.moment += 1
            arriving += [
                (
                    stage,
                    name,
                    channel.slot[tick, stage],
                    sent[(stage - channel.offset) % ticks.stages],
                )
                for channel in channels
                for stage in range(ticks.stages)
                if channel.slot[tick, stage] != NONE
            ]
        for arrival in arriving:
            buffers.write(*arrival)
        buffers.moment += 1
    return buffers


@pytest.mark.parametrize(("table", "policy", "paired"), CELLS)
def test_every_value_is_where_it_is_looked_for_and_no_fewer_slots_would_do(table, policy, paired):
    ticks = lower(table, activations=policy, paired=paired)
    buffers = replay(table, ticks)
    for name in ("inputs", "gradients", "residuals", "kept"):
        assert getattr(ticks.slots, name) == buffers.most(name), name


@pytest.mark.parametrize(("table", "policy", "paired"), CELLS)
def test_each_stage_keeps_its_order(table, policy, paired):
    ticks = lower(table, activations=policy, paired=paired)
    for stage in range(ticks.stages):
        by_tick = [tasks_of(ticks, tick, stage) for tick in range(ticks.ticks)]
        assert max(map(len, by_tick)) <= 1 + paired
        assert tuple(task for found in by_tick for task in found) == table.tasks(stage)


@pytest.mark.parametrize(("table", "policy", "paired"), CELLS)
def test_no_task_could_run_earlier(table, policy, paired):
    """So the ticks are as few as the order allows: by induction over the ticks."""
    ticks = lower(table, activations=policy, paired=paired)
    at = {
        task: tick
        for tick in range(ticks.ticks)
        for stage in range(ticks.stages)
        for task in tasks_of(ticks, tick, stage)
    }
    for stage in range(ticks.stages):
        before = None
        for task in table.tasks(stage):
            tick = at[task]
            late = any(at.get(need) == tick - 1 for need in needs(task, table.chunks))
            after = before is not None and at[before] >= tick - 1
            if paired and after and before.kind is F and task.kind is not F:
                after = at[before] == tick
            assert tick == 0 or late or after, (task, tick)
            before = task


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 2), (4, 8), (4, 32), (8, 64)])
def test_the_time_of_ticks_is_that_of_the_formula(stages, microbatches):
    """(m + p - 1)(F + B): GPipe as it is, 1F1B where forwards run ahead."""
    ideal = (microbatches + stages - 1) * (SECONDS[F] + SECONDS[B])
    classic = one_f_one_b(stages, microbatches)
    assert lower(gpipe(stages, microbatches), paired=False).seconds(SECONDS) == ideal
    hurried = lower(eager(classic), paired=True)
    assert hurried.seconds(SECONDS) == ideal
    assert hurried.ticks == microbatches + 2 * (stages - 1)
    assert lower(classic, paired=False).ticks == 2 * (microbatches + stages - 1)


@pytest.mark.parametrize("name", sorted({*TABLES} - {"1f1b", "dual_pipe_v"}))
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 6), (4, 8), (4, 20)])
def test_lock_step_costs_nothing(name, stages, microbatches):
    """The time of the ticks is that of stages which wait for their own messages alone."""
    table, seconds = TABLES[name](stages, microbatches), typical_seconds("stash")
    free = simulate(table, Costs()).makespan
    assert lower(table, activations="stash").seconds(seconds) == free


def test_lock_step_costs_where_forward_and_backward_take_turns():
    """Where one stage goes forward its neighbour goes backward, and the longer one counts."""
    seconds = typical_seconds("stash")
    classic = lower(one_f_one_b(4, 8), activations="stash").seconds(seconds)
    hurried = lower(TABLES["eager"](4, 8), activations="stash").seconds(seconds)
    assert (classic, hurried) == (40, 33)


@pytest.mark.parametrize("microbatches", [4, 8, 64])
@pytest.mark.parametrize("policy", ["recompute", "stash"])
def test_slots_are_those_of_what_is_under_way(policy, microbatches):
    stages = 4
    name = "inputs" if policy == "recompute" else "residuals"

    def held(table, paired=None):
        return getattr(lower(table, activations=policy, paired=paired).slots, name)

    classic = one_f_one_b(stages, microbatches)
    assert held(classic) == stages
    assert held(gpipe(stages, microbatches)) == microbatches
    # The first stage, which holds most, computes its input from the microbatch itself.
    most = 2 * stages - 1 if policy == "stash" else 2 * (stages - 1) - 1
    assert held(eager(classic), paired=True) == min(microbatches, most)
    assert lower(classic).slots.gradients == 1


@pytest.mark.parametrize(
    ("table", "outputs", "cotangents"),
    [
        (one_f_one_b(4, 4), {1}, {-1}),
        (interleaved(4, 4, 2), {1}, {-1}),
        (zb_v(4, 8), {-1, 0, 1}, {-1, 0, 1}),
        (gpipe(1, 3), set(), set()),
        (greedy("folded", (0, 0, 1, 1), 3), {0, 1}, {0, 1}),
        (forward_only(range(4), 4), {1}, set()),
    ],
)
def test_values_go_along_as_few_channels_as_the_placement_has(table, outputs, cotangents):
    ticks = lower(table)
    assert {channel.offset for channel in ticks.outputs} == outputs
    assert {channel.offset for channel in ticks.cotangents} == cotangents


def test_a_lane_is_rare_where_most_ticks_do_not_use_it():
    channels = [
        channel for name in ("gpipe", "eager") for channel in lower(TABLES[name](4, 16)).outputs
    ]
    assert [channel.rare for channel in channels] == [True, False]
    assert [int(channel.used.sum()) for channel in channels] == [16 + 4 - 2] * 2


def test_only_stages_that_receive_are_sent_to():
    (right,) = lower(TABLES["1f1b"](3, 4)).outputs
    (round_,) = lower(TABLES["interleaved"](3, 3)).outputs
    assert right.pairs == ((0, 1), (1, 2))
    assert round_.pairs == ((2, 0), (0, 1), (1, 2))


def test_what_takes_less_time_is_chosen():
    classic, seconds = one_f_one_b(4, 8), typical_seconds("recompute")
    for table in (classic, eager(classic)):
        best = min(lower(table, paired=way).seconds(seconds) for way in (False, True))
        assert lower(table).seconds(seconds) == best
    assert lower(classic).ticks == lower(classic, paired=False).ticks
    assert lower(eager(classic)).ticks == lower(eager(classic), paired=True).ticks


def test_a_table_that_cannot_go_on_is_refused():
    rows = [[Task(F, 0, 0), Task(B, 0, 1), Task(F, 0, 1), Task(B, 0, 0)]]
    rows += [[Task(F, 1, 0), Task(F, 1, 1), Task(B, 1, 0), Task(B, 1, 1)]]
    with pytest.raises(
        ConfigError,
        match=r"schedule crossed: stage 0, position 1: 0B1 needs 0F1, which comes after it, at "
        r"position 2: swap the two tasks",
    ):
        lower(Schedule("crossed", 2, (0, 1), tuple(map(tuple, rows))))


def test_eager_keeps_the_tasks_and_the_order_of_forwards():
    table = interleaved(2, 4, 2)
    hurried = eager(table)
    for stage in range(2):
        assert sorted(hurried.tasks(stage)) == sorted(table.tasks(stage))
        for kind in (F, B):
            assert [t for t in hurried.tasks(stage) if t.kind is kind] == [
                t for t in table.tasks(stage) if t.kind is kind
            ]
    assert loop(2, 4) == hurried.placement


def test_a_schedule_that_cannot_run_ahead_names_the_setting():
    """A draw found it: four stages of v_half with 11 microbatches would wait for each other."""
    given = {"schedule": {"type": "v_half"}, "activations": "stash"}
    config = PipelineConfig.model_validate({**given, "ahead": True})
    schedule = config.schedule.build(4, 11)
    with pytest.raises(ConfigError, match=r"parallel\.pipeline\.ahead: with 11 microbatches"):
        lowered(config, schedule)
    lowered(PipelineConfig.model_validate(given), schedule)
