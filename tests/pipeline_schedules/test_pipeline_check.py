"""The laws of a schedule, each broken once."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.check import check_schedule, ring_sizes
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import breadth_first, interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.order import Walk, needed, needs
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1, zb_h2


def rows(*texts: str) -> tuple[tuple[Task | None, ...], ...]:
    """Rows of tasks, written as "0F0 . 0B0"."""
    return tuple(
        tuple(
            None if cell == "." else Task(TaskKind(cell[1]), int(cell[0]), int(cell[2]))
            for cell in text.split()
        )
        for text in texts
    )


def schedule(*texts: str, microbatches=1, placement=(0, 1)) -> Schedule:
    return Schedule("mine", microbatches, placement, rows(*texts))


def test_a_right_one_passes():
    check_schedule(schedule("0F0 . . 0B0", ". 1F0 1I0 1W0"))
    check_schedule(schedule("0F0", "1F0"))


BROKEN = {
    "nothing": ({"microbatches": 0}, r"mine: 2 stages, 2 chunks, 0 microbatches"),
    "chunk off the stages": ({"placement": (0, 2)}, r"chunk 1 is on stage 2, .* 0 to 1"),
    "idle stage": ({"placement": (0, 0)}, r"stage 1 of 2 holds no chunk"),
    "unknown chunk": (
        ["0F0 0B0", "1F0 1B0 2F0"],
        r"stage 1, position 2: 2F0 is unknown: .* 0 to 1",
    ),
    "unknown microbatch": (["0F0 0B0 0F3", "1F0 1B0"], r"stage 0, position 2: 0F3 is unknown"),
    "wrong stage": (["0F0 1F0 0B0", "1B0"], r"stage 0, position 1: 1F0 belongs on stage 1"),
    "twice": (["0F0 0B0 . 0B0", "1F0 1B0"], r"stage 0, position 3: 0B0 repeats 0B0 of position 1"),
    "whole and half": (
        ["0F0 0B0 0W0", "1F0 1B0"],
        r"stage 0, position 2: 0W0 repeats 0B0 of position 1",
    ),
    "half and whole": (
        ["0F0 0I0 0B0", "1F0 1B0"],
        r"stage 0, position 2: 0B0 repeats 0I0 of position 1",
    ),
    "no forward": (["0B0", "1F0 1B0"], r"task 0F0 is missing: stage 0 .* microbatch 0 of 1"),
    "no backward": (["0F0", "1F0 1B0"], r"task 0B0 \(or 0I0 and 0W0\) is missing: stage 0"),
    "no weight half": (["0F0 0I0", "1F0 1B0"], r"task 0W0 is missing: stage 0"),
    "no input half": (["0F0 0W0", "1F0 1B0"], r"task 0I0 is missing: stage 0"),
    "own order": (
        ["0F0 0B0", "1B0 1F0"],
        r"stage 1, position 0: 1B0 needs 1F0, which comes after it, at position 1",
    ),
    "weight before input": (
        ["0F0 0W0 0I0", "1F0 1B0"],
        r"stage 0, position 1: 0W0 needs 0I0, which comes after it, at position 2",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_first_violation_is_named(case):
    change, message = BROKEN[case]
    right = schedule("0F0 0B0", "1F0 1B0")
    wrong = replace(right, **change) if isinstance(change, dict) else schedule(*change)
    with pytest.raises(ConfigError, match=message):
        check_schedule(wrong)


def test_deadlock_names_the_circle():
    wrong = schedule("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", microbatches=2)
    message = (
        r"stage 0, position 1: 0B0 needs 1B0, which is never run: "
        r"stage 0 waits at position 1 \(0B0\) for 1B0, at position 2 of stage 1; "
        r"stage 1 waits at position 0 \(1F1\) for 0F1, at position 2 of stage 0$"
    )
    with pytest.raises(ConfigError, match=message):
        check_schedule(wrong)


def test_needs_are_those_of_the_contract():
    for kind in TaskKind:
        for chunk in range(3):
            task = Task(kind, chunk, 5)
            ours = {(back, c, b) for back, c, b in needed(task, 3)}
            theirs = {
                (n.kind is not TaskKind.FORWARD, n.chunk, n.microbatch) for n in needs(task, 3)
            }
            assert ours == theirs


@pytest.mark.parametrize("build", [one_f_one_b, gpipe, zb_h1, zb_h2])
def test_ring_buffers(build):
    """As many slots as activations live at once: microbatches come in order."""
    made = build(4, 8)
    sizes = ring_sizes(made)
    assert sizes == simulate(made).peak_activations


def test_walk_meets_every_need():
    made = interleaved(4, 8, 2)
    done = set()
    for _, task in Walk(made):
        for back, chunk, microbatch in needed(task, made.chunks):
            kind = TaskKind.FULL if back else TaskKind.FORWARD
            assert Task(kind, chunk, microbatch) in done
        done.add(task)
    assert len(done) == sum(map(len, made.rows))


MADE = [
    gpipe(3, 4),
    one_f_one_b(3, 4),
    interleaved(2, 4, 2),
    breadth_first(2, 3, 2),
    zb_h1(3, 4),
    zb_h2(2, 4),
]


@settings(max_examples=200)
@given(st.sampled_from(MADE), st.data())
def test_mutations_are_caught(made, data):
    """A task dropped, doubled, or put before one that it needs."""
    stage = data.draw(st.integers(0, made.stages - 1), label="stage")
    row = list(made.rows[stage])
    place = data.draw(st.integers(0, len(row) - 1), label="place")
    how = data.draw(st.sampled_from(["drop", "double", "swap", "foreign"]), label="how")
    task = row[place]
    if how == "drop":
        del row[place]
    elif how == "double":
        row.insert(data.draw(st.integers(0, len(row)), label="to"), task)
    elif how == "foreign":
        row[place] = replace(task, microbatch=made.microbatches)
    else:
        mine = {other: at for at, other in enumerate(row)}
        before = [mine[need] for need in needs(task, made.chunks) if need in mine]
        if not before:
            return
        at = before[0]
        row[at], row[place] = row[place], row[at]
    broken = replace(made, rows=(*made.rows[:stage], tuple(row), *made.rows[stage + 1 :]))
    with pytest.raises(ConfigError, match=str(task.chunk)):
        check_schedule(broken)


@settings(max_examples=100)
@given(st.sampled_from(MADE), st.data())
def test_any_order_is_judged_rightly(made, data):
    """After a swap of any two tasks of a stage: refused exactly if a need comes later for ever.

    The judge is another one: rounds over all stages, each doing one task at most.
    """
    stage = data.draw(st.integers(0, made.stages - 1))
    row = list(made.rows[stage])
    one, two = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[one], row[two] = row[two], row[one]
    swapped = replace(made, rows=(*made.rows[:stage], tuple(row), *made.rows[stage + 1 :]))
    left, done = [list(r) for r in swapped.rows], set()
    while True:
        ready = [
            r
            for r in left
            if r and all(any(n in done for n in kinds) for kinds in wants(r[0], made))
        ]
        if not ready:
            break
        done |= {r.pop(0) for r in ready}
    if any(left):
        with pytest.raises(ConfigError, match="needs"):
            check_schedule(swapped)
    else:
        check_schedule(swapped)


def wants(task, made):
    """The needs of a task, alternatives together."""
    groups: dict[tuple[bool, int], list[Task]] = {}
    for need in needs(task, made.chunks):
        groups.setdefault((need.kind is TaskKind.FORWARD, need.chunk), []).append(need)
    return groups.values()
