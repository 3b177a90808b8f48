"""Every moment belongs to exactly one kind, whatever happens within what."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.metrics.account import Account, Activity
from jaxdist.runtime import lifetime


class Clock:
    """Nanoseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


EVENTS = st.one_of(
    st.tuples(st.just("pass"), st.integers(0, 10**12)),
    st.tuples(st.just("enter"), st.sampled_from(Activity)),
    st.tuples(st.just("switch"), st.sampled_from(Activity)),
    st.tuples(st.just("leave"), st.none()),
    st.tuples(st.just("look"), st.none()),
)


@settings(max_examples=200)
@given(st.lists(EVENTS, max_size=40), st.sampled_from(Activity), st.integers(0, 10**9))
def test_kinds_add_up_to_the_wall_time_exactly(events, first, age):
    clock = Clock()
    account = Account(first, begun=clock.now - age, clock=clock)
    stack, expected = [first], Counter({first: age})
    for event, value in events:
        match event:
            case "pass":
                clock.now += value
                expected[stack[-1]] += value
            case "enter":
                account.enter(value)
                stack.append(value)
            case "switch":
                account.switch(value)
                stack[-1] = value
            case "leave" if len(stack) > 1:
                account.leave()
                stack.pop()
            case "look":
                account.spent()
    spent = account.spent()
    assert sum(spent.values()) == clock.now + age
    assert spent == {kind: expected[kind] for kind in Activity}


def test_an_interval_ends_where_it_is_left_by_an_error():
    clock = Clock()
    account = Account(clock=clock)

    def fails() -> None:
        with account.within(Activity.EVALUATION):
            clock.now += 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    clock.now += 4
    spent = account.spent()
    assert (spent[Activity.EVALUATION], spent[Activity.IDLE]) == (3, 4)


def test_waiting_for_items_and_not_what_is_done_with_them():
    clock = Clock()
    account = Account(Activity.STEP, clock=clock)

    def slow():
        for item in range(3):
            clock.now += 10
            yield item

    for _ in account.each(Activity.INPUT_WAIT, slow()):
        clock.now += 1
    spent = account.spent()
    assert (spent[Activity.INPUT_WAIT], spent[Activity.STEP]) == (30, 3)


def test_the_first_call_alone_is_the_compilation():
    clock = Clock()
    account = Account(Activity.STEP, clock=clock)

    def step(seconds: int) -> int:
        clock.now += seconds
        return seconds

    called = account.first(Activity.COMPILE, step)
    assert [called(100), called(1), called(2)] == [100, 1, 2]
    spent = account.spent()
    assert (spent[Activity.COMPILE], spent[Activity.STEP]) == (100, 3)


def test_what_the_first_call_waits_for_is_the_compilation_too():
    clock = Clock()
    account = Account(Activity.STEP, clock=clock)

    def wait(seconds: int) -> None:
        clock.now += seconds

    called = account.first(Activity.COMPILE, lambda: 7, wait)
    assert [called(), called()] == [7, 7]
    spent = account.spent()
    assert (spent[Activity.COMPILE], spent[Activity.STEP]) == (7, 0)


def test_a_process_began_before_this_line(tmp_path):
    first, second = lifetime.begun(), lifetime.begun()
    assert first < time.perf_counter_ns()
    assert abs(first - second) < 1e9
    strange = tmp_path / "stat"
    before = time.perf_counter_ns()
    assert lifetime.begun(strange) >= before  # not there: from now on
    strange.write_text("1 (a) b) R 1")
    assert lifetime.begun(strange) >= before
