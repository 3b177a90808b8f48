"""Writing a stage's row down: tasks of one kind and chunk come in the order of microbatches."""

from __future__ import annotations

from collections import Counter

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.schedule import Kind, Task


class Row:
    """A stage's tasks, to which the next microbatch of a kind and chunk is added.

    >>> row = Row()
    >>> row.add((Kind.FORWARD, 2), times=2)
    >>> row.add((Kind.FORWARD, 2), (Kind.FULL, 2))
    >>> [str(task) for task in row.tasks]
    ['2F0', '2F1', '2F2', '2B0']
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.count: Counter[tuple[Kind, int]] = Counter()

    def add(self, *pattern: tuple[Kind, int], times: int = 1) -> None:
        """The next microbatch of each (kind, chunk), one after another; all that `times` times."""
        for _ in range(times):
            for kind, chunk in pattern:
                self.tasks.append(Task(kind, chunk, self.count[kind, chunk]))
                self.count[kind, chunk] += 1


def refuse_small(name: str, stages: int, microbatches: int) -> None:
    """Raises ConfigError unless there is at least one stage and one microbatch."""
    if stages < 1 or microbatches < 1:
        raise ConfigError(
            f"schedule {name}: {stages} stages and {microbatches} microbatches: give at least one "
            "of each"
        )


def refuse_fewer(name: str, stages: int, microbatches: int, least: int, instead: str) -> None:
    """Raises ConfigError where a schedule has too few microbatches for its stages."""
    refuse_small(name, stages, microbatches)
    if microbatches < least:
        raise ConfigError(
            f"schedule {name}: {stages} stages need at least {least} microbatches, got "
            f"{microbatches}: use {least} or more, or fewer stages, or {instead}"
        )
