"""Simulated schedules against the formulas of their papers, exactly."""

import pytest

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.derived import forward_only
from jaxdist.pipeline_schedules.dual_pipe_v import dual_pipe_v
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import breadth_first, interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.order import key, needed
from jaxdist.pipeline_schedules.schedule import TaskKind, v_shape
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1, zb_h2
from jaxdist.pipeline_schedules.zero_bubble.v import v_half, v_min, zb_v

TIMES = ((1, 1, 1), (3, 4, 2), (5, 2, 2))
"""F, I, W; whole numbers, so that sums are exact."""


def check_formulas(p, m, v, times):
    """Every schedule with a formula for these stages, microbatches and chunks per stage."""
    f, i, w = times
    b = i + w
    costs = Costs(f, i, w)

    def bubble_and_peaks(schedule):
        found = simulate(schedule, costs)
        return found.bubble, found.peak_activations

    ranks = range(p)
    assert bubble_and_peaks(gpipe(p, m)) == ((p - 1) * (f + b), (m,) * p)
    assert bubble_and_peaks(one_f_one_b(p, m)) == (
        (p - 1) * (f + b),
        tuple(min(m, p - rank) for rank in ranks),
    )
    if m >= p:
        assert bubble_and_peaks(zb_h1(p, m)) == ((p - 1) * (f + b - 2 * w), (p,) * p)
        # The times are those of a chunk: a stage's are v times as long, and its bubble 1/v of that.
        assert bubble_and_peaks(breadth_first(p, m, v)) == ((p - 1) * (f + b), (m,) * p)
    if m % p == 0:
        bubble, peaks = bubble_and_peaks(interleaved(p, m, v))
        assert bubble == (p - 1) * (f + b)
        assert peaks[0] * v == min(p * v + p - 1, m * v)
        assert max(peaks) == peaks[0]
    if m >= 2 * p - 1:
        assert bubble_and_peaks(zb_h2(p, m)) == ((p - 1) * (f + b - 3 * w), (2 * p - 1,) * p)
    if times == (1, 1, 1):
        check_v_formulas(p, m)


def check_v_formulas(p, m):
    """Those whose formula holds for equal times; bubbles are in tasks of one chunk."""
    one_f_one_b_bubble = 6 * (p - 1)
    if m >= 2 * p - 1:
        found = simulate(zb_v(p, m))
        assert (found.bubble, found.peak_activations) == (0, (p,) * p)
    if m >= 2 * p:
        found = simulate(dual_pipe_v(p, m))
        assert (found.bubble, found.peak_activations) == (p - 1, (p + 0.5,) * p)
    if m >= 2 * p and p > 1:
        half, least = simulate(v_half(p, m)), simulate(v_min(p, m))
        exact = 2 if p == 2 else 3 * p - (4 if p % 2 else 5)
        assert half.bubble == exact <= one_f_one_b_bubble / 2
        assert half.peak == ((p + 1) / 2 if p % 2 else p / 2 + 1)
        assert least.bubble == 4 * p - 5 <= one_f_one_b_bubble * 2 / 3
        assert least.peak <= p / 3 + 4 / 3 + 1e-9


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.every(3)
def test_formulas(p):
    for m in sorted({1, p, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p}):
        for times in TIMES:
            check_formulas(p, m, v=2, times=times)
    check_formulas(p, 4 * p, v=3, times=TIMES[1])


@pytest.mark.parametrize(("p", "m"), [(16, 48), (32, 64)])
@pytest.mark.every(2)
def test_formulas_of_large_pipelines(p, m):
    check_formulas(p, m, v=2, times=TIMES[0])


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 33))
def test_formulas_of_all_sizes(p):
    """Every number of stages; microbatches to 256, close together where the formulas begin."""
    few = {*range(1, 2 * p + 2, max(1, p // 4)), p, 2 * p - 1, 2 * p}
    for m in sorted(few | {64, 100, 128, 256 // p * p, 256}):
        for times in TIMES if m <= 64 else TIMES[:1]:
            check_formulas(p, m, v=2, times=times)


def test_published_bubbles():
    """arXiv 2401.10241 table 5: 28.3B parameters, 32 stages, 96 microbatches, times in ms."""
    costs = Costs(10.419, 10.207, 7.715, transfer=0.408)
    found = [
        round(simulate(build(32, 96), costs).bubble_fraction, 4)
        for build in (one_f_one_b, zb_h1, zb_h2)
    ]
    assert found == [0.2646, 0.1421, 0.0641]


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("pair", [3, 2, 2.5])
def test_dual_pipe_v_with_pairs_as_one_task(p, pair):
    """DeepSeek-V3 table 2: (p - 1) (F&B + B - 3 W), where F&B is the time of a pair."""
    m = 3 * p
    schedule = dual_pipe_v(p, m)
    groups = [paired(row, p, stage) for stage, row in enumerate(schedule.rows)]
    makespan, busy = run_groups(groups, schedule.chunks, pair)
    assert makespan - min(busy) == (p - 1) * (pair + 2 - 3)


def paired(row, p, stage):
    """Tasks of a row, FORWARD and FULL side by side in one; but not the last stage's first two."""
    groups, apart = [], stage == p - 1
    for task in row:
        if (
            groups
            and task.kind is TaskKind.FULL
            and groups[-1][-1].kind is TaskKind.FORWARD
            and not apart
        ):
            groups[-1].append(task)
        else:
            apart = apart and task.kind is not TaskKind.FULL
            groups.append([task])
    return groups


def run_groups(groups, chunks, pair):
    """The end of everything, and each stage's work, with unit tasks and pairs of time `pair`."""
    ends, free, busy = {}, [0.0] * len(groups), [0.0] * len(groups)
    left = [list(reversed(row)) for row in groups]
    while any(left):
        moved = False
        for stage, row in enumerate(left):
            while row:
                group = row[-1]
                inside = {key(task) for task in group}
                needs = [k for task in group for k in needed(task, chunks) if k not in inside]
                if any(k not in ends for k in needs):
                    break
                time = pair if len(group) == 2 else 2 if group[0].kind is TaskKind.FULL else 1
                free[stage] = max([free[stage], *(ends[k] for k in needs)]) + time
                busy[stage] += time
                ends |= {key(t): free[stage] for t in group if t.kind is not TaskKind.WEIGHT}
                moved = bool(row.pop())
        assert moved
    return max(free), busy


def test_messages_travel_while_stages_work():
    found = simulate(gpipe(2, 2), Costs(forward=2, backward_input=2, backward_weight=2, transfer=5))
    ends = {str(span.task): (span.start, span.end) for row in found.spans for span in row}
    assert ends["1F0"] == (7, 9)
    assert ends["1F1"] == (9, 11)
    assert ends["0B0"] == (20, 24)
    assert ends["0B1"] == (24, 28)
    assert found.makespan == 28
    assert (found.messages, found.sent, found.received) == (4, (2, 2), (2, 2))


def test_chunks_of_one_stage_send_no_message():
    """The V turns on the last stage: 2 p - 2 boundaries between stages, each passed both ways."""
    for p in (1, 2, 4):
        assert simulate(v_min(p, 5)).messages == 2 * 5 * (2 * p - 2)
    found = simulate(v_min(4, 5))
    assert found.sent == (10, 20, 20, 10)


def test_uneven_chunks_and_full_time():
    costs = Costs(forward=[1, 2, 3], full=[2, 4, 6.5])
    found = simulate(gpipe(3, 1), costs)
    assert found.makespan == 1 + 2 + 3 + 2 + 4 + 6.5
    assert found.busy == (3, 6, 9.5)
    assert found.bubble == found.makespan - 9.5
    with_sizes = simulate(gpipe(3, 4), Costs(activation=[1, 2, 0.5]))
    assert with_sizes.peak_activations == (4, 8, 2)


def test_activations_between_the_halves():
    """Freed by INPUT but for the part kept; ZB-H1's last stage holds back all weight halves."""
    whole, third = (simulate(zb_h1(4, 8), Costs(kept=kept)) for kept in (1.0, 0.25))
    assert whole.peak_activations == (4, 4, 4, 4)
    assert third.peak_activations == (4, 3.25, 2.5, 1.75)


def test_period_and_makespan():
    """ZB-H2 is a parallelogram: a stage begins its next step before the others end theirs."""
    found = simulate(zb_h2(4, 8))
    assert (found.period, found.makespan) == (24, 27)
    assert found.bubble_fraction == 0
    assert found.flushed_bubble_fraction == pytest.approx(3 / 27)
    square = simulate(one_f_one_b(4, 8))
    assert square.period == square.makespan == 33
    assert square.bubble_fraction == square.flushed_bubble_fraction == pytest.approx(9 / 33)


def test_forward_only():
    """One chunk per stage: p - 1 units of waiting; chunks in rounds cost no more."""
    for placement in ((0, 1, 2, 3), (0, 1, 2, 3) * 2):
        found = simulate(forward_only(placement, 8))
        assert found.makespan == 8 * len(placement) / 4 + 3
    found = simulate(forward_only(v_shape(4), 8))
    assert found.peak_activations == (0.5,) * 4
    assert found.makespan == 16 + 6


def test_costs_of_other_lengths():
    with pytest.raises(ConfigError, match=r"backward_input has 2 times for 3 chunks"):
        simulate(gpipe(3, 1), Costs(backward_input=[1, 2]))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_times(value):
    with pytest.raises(ConfigError, match=rf"transfer of chunk 1 is {value}"):
        simulate(gpipe(2, 1), Costs(transfer=[0, value]))
