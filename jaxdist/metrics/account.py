"""An account of time: each moment belongs to exactly one kind, so that the kinds add up."""

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
    """The activities of a run that take time, as process 0 sees them."""

    STEP = "step"
    """Dispatching steps and exchanges between them, and waiting for them: the actual work."""
    INPUT_WAIT = "input_wait"
    """Waiting for the next batch, even where devices still compute the previous step."""
    EVALUATION = "evaluation"
    """Computing held-out means, including the compilation of the evaluation."""
    CHECKPOINT_BLOCKED = "checkpoint_blocked"
    """Waiting for a save: for its copy to the host, and for the previous save if it still runs."""
    SNAPSHOT = "snapshot"
    """Waiting for a copy of the state into the memory of hosts."""
    REPLICA_CHECK = "replica_check"
    """Comparing replicas of the state."""
    COMPILE = "compile"
    """Tracing a step, and the first call of each stage's step and of the digests of replicas. With
    several processes the time lasts until the end of the first step, which waits for the longest
    compilation."""
    START = "start"
    """Starting a process, until its first step, and preparing each stage's batches."""
    RECOVERY = "recovery"
    """Starting again from a checkpoint, including the load of the checkpoint."""
    LOST_WORK = "lost_work"
    """Doing work between the last checkpoint and a crash, which had to be repeated."""
    IDLE = "idle"
    """Doing nothing of the above: the end of a run, and the time between its processes."""


class Account:
    """Time by kind: an interval within another belongs only to the inner interval's kind.

    An account belongs to a single thread. Time is counted in integer nanoseconds, so that the kinds
    add up to the wall time exactly. A call costs 0.2 us; nothing waits for a device.

    Args:
      kind: the kind of the time outside of all intervals, until `switch` changes it.
      begun: the clock's value at the beginning of the account; None begins the account now.
      clock: a monotonic clock in nanoseconds.
      tell: function that is called with the new kind at each change.

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
        """Begin an interval within the innermost interval."""
        self._settle()
        self._stack.append(kind)
        self._told()

    def leave(self) -> None:
        """End the innermost interval."""
        assert len(self._stack) > 1, "nothing was entered"
        self._settle()
        self._stack.pop()
        self._told()

    def switch(self, kind: Activity) -> None:
        """Continue the innermost interval as another kind."""
        self._settle()
        self._stack[-1] = kind
        self._told()

    def spent(self) -> Mapping[Activity, int]:
        """Return nanoseconds by kind until now; their sum is the time since the account began."""
        self._settle()
        return dict(self._spent)

    @contextmanager
    def within(self, kind: Activity) -> Iterator[None]:
        """Count the time inside the `with` block as `kind`."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    def each(self, kind: Activity, items: Iterator[Item]) -> Iterator[Item]:
        """Iterate over `items`, and count the time of waiting for each item as `kind`."""
        while True:
            self.enter(kind)  # The context manager `within` would cost a microsecond more.
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
        """Return the same function, whose first call is an interval.

        Args:
          wait: function that is called with the first result, within the interval.
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
