"""The check that a schedule can run, and the number of activations that a schedule keeps.

The error message of the check names the task, its stage and its position, which is the index of the
task in the stage's row.
"""

from __future__ import annotations

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.order import Dependency, Walk, places
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind

_SAME_WORK = {
    TaskKind.FORWARD: (),
    TaskKind.FULL: (TaskKind.INPUT, TaskKind.WEIGHT),
    TaskKind.INPUT: (TaskKind.FULL,),
    TaskKind.WEIGHT: (TaskKind.FULL,),
}


def check_schedule(schedule: Schedule) -> None:
    """Raise ConfigError if a schedule cannot run.

    These rules are checked, in this order:

    1. Every chunk is on a stage, and every stage has a chunk.
    2. Every task has a known chunk and microbatch, occurs once, and is on the stage of its chunk.
    3. No task is missing. A schedule without backward tasks is for evaluation.
    4. No stage waits forever.

    Raises:
      ConfigError: a rule is violated; the message describes the first violation.

    >>> rows = ((Task(TaskKind.FULL, 0, 0),),)
    >>> check_schedule(Schedule("half", microbatches=1, placement=(0,), rows=rows))
    Traceback (most recent call last):
    jaxdist.errors.ConfigError: schedule half: task 0F0 is missing: stage 0 must run the ...
    """
    _check_shape(schedule)
    for stage in range(schedule.stages):
        _check_row(schedule, stage)
    _check_complete(schedule)
    _check_order(schedule)


def _check_shape(schedule: Schedule) -> None:
    name, stages = schedule.name, schedule.stages
    if not stages or not schedule.chunks or schedule.microbatches < 1:
        raise ConfigError(
            f"schedule {name}: {stages} stages, {schedule.chunks} chunks, {schedule.microbatches} "
            "microbatches: use at least 1 stage, 1 chunk and 1 microbatch"
        )
    for chunk, stage in enumerate(schedule.placement):
        if not 0 <= stage < stages:
            raise ConfigError(
                f"schedule {name}: chunk {chunk} is on stage {stage}, but the stages are 0 to "
                f"{stages - 1}"
            )
    for stage in range(stages):
        if stage not in schedule.placement:
            raise ConfigError(
                f"schedule {name}: stage {stage} of {stages} holds no chunk: use fewer stages, or "
                "more chunks"
            )


def _check_row(schedule: Schedule, stage: int) -> None:
    """Check that every task of a stage is known, is on the right stage, and occurs once."""
    found: dict[Task, int] = {}
    for place, task in enumerate(schedule.rows[stage]):
        if task is None:
            continue
        where = f"schedule {schedule.name}: stage {stage}, position {place}: {task}"
        if not (0 <= task.chunk < schedule.chunks and 0 <= task.microbatch < schedule.microbatches):
            raise ConfigError(
                f"{where} is unknown: chunks are 0 to {schedule.chunks - 1}, microbatches 0 to "
                f"{schedule.microbatches - 1}"
            )
        home = schedule.placement[task.chunk]
        if home != stage:
            raise ConfigError(f"{where} belongs on stage {home}, which holds chunk {task.chunk}")
        for other in _same_work(task):
            if other in found:
                raise ConfigError(
                    f"{where} repeats {other} of position {found[other]}: each microbatch passes "
                    "each chunk once forward (F), and once backward (B, or I and W)"
                )
        found[task] = place


def _same_work(task: Task) -> list[Task]:
    """Return a task, and the tasks of other kinds that would repeat a part of its work."""
    others = _SAME_WORK[task.kind]
    return [task, *(Task(kind, task.chunk, task.microbatch) for kind in others)]


def _check_complete(schedule: Schedule) -> None:
    missing = missing_task(schedule)
    if missing:
        stage, task, microbatch = missing
        raise ConfigError(
            f"schedule {schedule.name}: task {task} is missing: stage {stage} must run the task "
            f"for microbatch {microbatch} of {schedule.microbatches}"
        )


def missing_task(schedule: Schedule) -> tuple[int, str, int] | None:
    """Return the first missing task as (stage, name, microbatch), or None if all tasks exist."""
    found = [frozenset(schedule.tasks(stage)) for stage in range(schedule.stages)]
    trained = any(task.kind is not TaskKind.FORWARD for row in found for task in row)
    for chunk, stage in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            task = _absent(found[stage], chunk, microbatch, trained)
            if task:
                return stage, task, microbatch
    return None


def _absent(row: frozenset[Task], chunk: int, microbatch: int, trained: bool) -> str:
    def there(kind: TaskKind) -> bool:
        return Task(kind, chunk, microbatch) in row

    if not there(TaskKind.FORWARD):
        return str(Task(TaskKind.FORWARD, chunk, microbatch))
    if not trained or there(TaskKind.FULL):
        return ""
    halves = [Task(kind, chunk, microbatch) for kind in (TaskKind.INPUT, TaskKind.WEIGHT)]
    lacking = [str(task) for task in halves if task not in row]
    if len(lacking) == 2:
        return f"{Task(TaskKind.FULL, chunk, microbatch)} (or {lacking[0]} and {lacking[1]})"
    return lacking[0] if lacking else ""


def _check_order(schedule: Schedule) -> None:
    walk = Walk(schedule)
    # `walk.blocked` is final only when the walk has ended.
    for _ in walk:
        pass
    if not walk.blocked:
        return
    circle = _circle(schedule, walk.blocked)
    stage = circle[0]
    place, missing = walk.blocked[stage]
    task = schedule.rows[stage][place]
    later, home = _find(schedule, missing)
    if home == stage:
        reason = (
            f"comes after it, at position {places(schedule.rows[stage])[later]}: swap the two tasks"
        )
    else:
        reason = f"is never run: {_chain(schedule, walk.blocked, circle)}"
    raise ConfigError(
        f"schedule {schedule.name}: stage {stage}, position {place}: {task} needs {later}, which "
        f"{reason}"
    )


def _find(schedule: Schedule, missing: Dependency) -> tuple[Task, int]:
    """Return the task that a blocked stage waits for, and the stage that runs this task."""
    backward, chunk, microbatch = missing
    stage = schedule.placement[chunk]
    row = set(schedule.tasks(stage))
    kinds = (TaskKind.FULL, TaskKind.INPUT) if backward else (TaskKind.FORWARD,)
    # The task exists, because `_check_complete` raises an error if a task is missing.
    task = next(t for t in (Task(kind, chunk, microbatch) for kind in kinds) if t in row)
    return task, stage


def _circle(schedule: Schedule, blocked: dict[int, tuple[int, Dependency]]) -> list[int]:
    """Return the stages of a deadlock: each stage waits for the next stage, in a circle."""
    # Every blocked stage waits for another blocked stage, so this walk must return to a stage that
    # is already in `trail`.
    trail = [min(blocked)]
    while True:
        missing = blocked[trail[-1]][1]
        stage = schedule.placement[missing[1]]
        if stage in trail:
            return trail[trail.index(stage) :]
        trail.append(stage)


def _chain(
    schedule: Schedule, blocked: dict[int, tuple[int, Dependency]], circle: list[int]
) -> str:
    links = []
    for stage in circle:
        place, missing = blocked[stage]
        task, home = _find(schedule, missing)
        links.append(
            f"stage {stage} waits at position {place} ({schedule.rows[stage][place]}) for {task}, "
            f"at position {places(schedule.rows[home])[task]} of stage {home}"
        )
    return "; ".join(links)


def ring_sizes(schedule: Schedule) -> tuple[int, ...]:
    """Return the smallest size of a ring buffer for the activations of each chunk.

    The activation of microbatch b is in slot b mod size, from its FORWARD task to the end of its
    FULL or WEIGHT task. A schedule without backward tasks keeps no activations, and has size 1.

    >>> from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
    >>> ring_sizes(one_f_one_b(stages=4, microbatches=8))
    (4, 3, 2, 1)
    """
    sizes = []
    for chunk, stage in enumerate(schedule.placement):
        together = _live([task for task in schedule.tasks(stage) if task.chunk == chunk])
        size = max((len(live) for live in together), default=1) or 1
        # Two live microbatches may have the same index modulo the number of slots, so more slots
        # than live microbatches may be necessary.
        while any(len({b % size for b in live}) < len(live) for live in together):
            size += 1
        sizes.append(size)
    return tuple(sizes)


def _live(tasks: list[Task]) -> set[frozenset[int]]:
    """Return the sets of live microbatches, each at the moment after a task of a chunk."""
    if all(task.kind is TaskKind.FORWARD for task in tasks):
        return set()
    live, found = set[int](), set[frozenset[int]]()
    for task in tasks:
        if task.kind is TaskKind.FORWARD:
            live.add(task.microbatch)
        elif task.kind is not TaskKind.INPUT:
            live.discard(task.microbatch)
        found.add(frozenset(live))
    return found
