"""The account of a process's time: each moment belongs to exactly one activity."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Activity(StrEnum):
    """An activity that takes time of a run, as process 0 sees it."""

    STEP = "step"
    """The training itself: steps and the exchanges between steps, from dispatch until the end."""
    INPUT_WAIT = "input_wait"
    """Waiting for the next batch, even if the devices still compute the previous step."""
    EVALUATION = "evaluation"
    """Computing held-out means, including the compilation of the evaluation."""
    CHECKPOINT_BLOCKED = "checkpoint_blocked"
    """Waiting for a save: for the copy to the host, and for an unfinished previous save."""
    SNAPSHOT = "snapshot"
    """Waiting for a copy of the state into the memory of hosts."""
    REPLICA_CHECK = "replica_check"
    """Comparing replicas of the state."""
    COMPILE = "compile"
    """Tracing and compiling.

    This is the time of tracing a step, of the first step of each train stage, and of the first
    comparison of replicas.

    With several processes, the time includes the first step, because this step waits for the
    process that compiles longest.
    """
    START = "start"
    """Starting a process, until its first step, and preparing the batches of each train stage."""
    RECOVERY = "recovery"
    """Starting from a saved state, including the load of the state."""
    LOST_WORK = "lost_work"
    """Work after the last save before a crash, which had to be repeated."""
    IDLE = "idle"
    """All other time: the end of a run, and the time between its processes."""


class Account:
    """The time that each activity of a process has taken.

    Time belongs to the innermost interval that contains it, and not to the outer intervals.

    Only a single thread may use an account. Time is counted in integer nanoseconds, so that the
    activities add up to the wall time exactly. A call takes 0.2 us and does not wait for a device.

    Args:
      kind: the activity of the time outside of all intervals, until `switch` changes it.
      begun: the value of the clock from which the account counts; None counts from now.
      clock: a monotonic clock in nanoseconds.
      tell: the function that is called at each change with the activity that begins, or None.

    >>> moments = iter([0, 3, 10, 14])
    >>> account = Account(Activity.START, clock=lambda: next(moments))
    >>> account.enter(Activity.STEP)
    >>> account.leave()
    >>> {kind.value: spent for kind, spent in account.spent().items() if spent}
    {'step': 7, 'start': 7}
    """

    def __init__(
        self,
        kind: Activity = Activity.IDLE,
        *,
        begun: int | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        tell: Callable[[Activity], None] | None = None,
    ) -> None:
        self._clock, self._tell = clock, tell
        self._since = clock() if begun is None else begun
        self._stack = [kind]
        self._spent = dict.fromkeys(Activity, 0)

    def enter(self, kind: Activity) -> None:
        """Begin an interval of an activity inside the innermost interval."""
        self._settle()
        self._stack.append(kind)
        self._told()

    def leave(self) -> None:
        """End the innermost interval of the account."""
        assert len(self._stack) > 1, "nothing was entered"
        self._settle()
        self._stack.pop()
        self._told()

    def switch(self, kind: Activity) -> None:
        """Change the activity of the account's innermost interval from now on."""
        self._settle()
        self._stack[-1] = kind
        self._told()

    def spent(self) -> Mapping[Activity, int]:
        """Return the nanoseconds of each activity until now, which add up to the account's age."""
        self._settle()
        return dict(self._spent)

    @contextmanager
    def within(self, kind: Activity) -> Iterator[None]:
        """Count the time inside the `with` block as the activity `kind`."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    def each(self, kind: Activity, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items; the time of the wait for each item counts as the activity `kind`."""
        while True:
            self.enter(kind)  # `with self.within(kind)` would cost a microsecond more per item.
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.leave()
            yield item

    def first(
        self,
        kind: Activity,
        function: Callable[Given, Result],
        wait: Callable[[Result], object] | None = None,
    ) -> Callable[Given, Result]:
        """Return `function` in a form whose first call counts as the activity `kind`.

        Args:
          wait: a function that is called with the result of the first call, or None. The time of
            this function counts too.
        """
        called = False

        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            nonlocal called
            if called:
                return function(*args, **kwargs)
            called = True
            with self.within(kind):
                result = function(*args, **kwargs)
                if wait is not None:
                    wait(result)
                return result

        return call

    def _told(self) -> None:
        if self._tell is not None:
            self._tell(self._stack[-1])

    def _settle(self) -> None:
        now = self._clock()
        self._spent[self._stack[-1]] += now - self._since
        self._since = now
