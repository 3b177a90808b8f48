"""The calls of the user's hooks, with errors that name the hook that raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint.layout import step_directory
from jaxdist.config.importing import describe_exception
from jaxdist.errors import ConfigError, RunError
from jaxdist.metrics import goodput
from jaxdist.metrics.writer import FILE_NAME, read_metrics
from jaxdist.run.directory import RunDirectory
from jaxdist.run.hooks.contract import Hook, Outcome, Run, StepMetrics
from jaxdist.run.hooks.loop import LoopHook, Moment

CALLED_FIRST = ("step", "split", "time")
"""The keys of a record that are not metrics."""


def check_hooks(hooks: Sequence[object]) -> tuple[Hook, ...]:
    """Check that each object is a hook, and return all of them as a tuple.

    Raises:
      ConfigError: an object is not a hook.
    """
    checked = []
    for hook in hooks:
        if not isinstance(hook, Hook):
            hint = "an instance, not the class" if isinstance(hook, type) else "a jaxdist.Hook"
            raise ConfigError(f"{hook!r} is not a hook: pass {hint}")
        checked.append(hook)
    return tuple(checked)


class HookCalls(LoopHook):
    """A loop hook that calls the user's hooks of this process, each with a `Run` of its own.

    Args:
      stop: the function that is called with a reason if a hook asks the run to end.
      say: the function that prints a line for the user.
    """

    def __init__(
        self, hooks: Sequence[Hook], stop: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        first = jax.process_index() == 0
        self.hooks = tuple(hook for hook in hooks if hook.every_process or first)
        self._stop, self._say = stop, say
        self._runs: list[Run] = []
        self._step = 0

    def start(self, run: Run) -> None:
        """Call `start` of the hooks; a second call only replaces the `Run` that the hooks receive.

        Raises:
          RunError: a hook raises.
        """
        again, self._step = bool(self._runs), run.first_step
        asks = (partial(self._asked, type(hook).__name__) for hook in self.hooks)
        self._runs = [replace(run, stop=ask) for ask in asks]
        if not again:
            self._call("start")

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """Call `step` of each hook after a step."""
        self._step = step
        names = self._runs[0].experiment.program.metrics
        self._call("step", step, StepMetrics(names, values, step_seconds))

    def at(self, moment: Moment) -> None:
        """Call `evaluation` of each hook after an evaluation, and `save` after a save."""
        if moment.heldout is not None:
            self._call("evaluation", moment.step, dict(moment.heldout))
        if moment.lasting:
            checkpoints = RunDirectory(self._runs[0].directory).checkpoints
            self._call("save", moment.step, step_directory(checkpoints, moment.step))

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Call `record` of each hook with a record that was written to the metrics."""
        self._call("record", step, split, values)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Run a block, and call `end` of each hook if the block raises an error."""
        try:
            yield
        except BaseException as error:
            self.end(Outcome(self._step, error=error))
            raise

    def end(self, outcome: Outcome) -> None:
        """Call `end` of the hooks that were started.

        Raises:
          RunError: a hook raises, and no other error has ended the run.
        """
        if not self._runs:
            return
        if jax.process_index() == 0:
            outcome = _with_metrics(outcome, self._runs[0].directory)
        failed = None
        # `end` is called on every hook, even if another hook has raised an error, since every hook
        # may have resources to release.
        for hook, run in zip(self.hooks, self._runs, strict=True):
            try:
                self._call_one(hook, run, "end", outcome)
            except RunError as raised:
                failed = failed or raised
        if failed is not None and outcome.error is None:
            raise failed
        if failed is not None:
            self._say(f"error: {failed}")

    def _call(self, what: str, *given: Any) -> None:
        for hook, run in zip(self.hooks, self._runs, strict=True):
            self._call_one(hook, run, what, *given)

    def _call_one(self, hook: Hook, run: Run, what: str, *given: Any) -> None:
        try:
            getattr(hook, what)(run, *given)
        except Exception as error:
            raise RunError(
                f"hook {type(hook).__name__} raised in its {what}, at step {self._step}: "
                f"{describe_exception(error)}. Fix the hook or remove it; --resume continues from "
                "the newest checkpoint"
            ) from error

    def _asked(self, name: str, reason: str) -> None:
        self._stop(f"{name}: {reason}")


def _with_metrics(outcome: Outcome, directory: Path) -> Outcome:
    if not (directory / FILE_NAME).exists():
        return outcome
    records = read_metrics(directory)
    spent = goodput.joined_lives(records)
    return replace(
        outcome,
        metrics=last_of(records, "train"),
        heldout=last_of(records, "heldout"),
        goodput={} if spent is None else spent.as_json(),
    )


def last_of(records: Sequence[Mapping[str, Any]], split: str) -> dict[str, float]:
    """Return the numbers of the last record of a split, by name, or {} if the split has no record.

    >>> last_of([{"step": 3, "split": "train", "time": 1.5, "loss": 0.5}], "train")
    {'loss': 0.5}
    """
    found = next((record for record in reversed(records) if record["split"] == split), {})
    return {name: value for name, value in found.items() if name not in CALLED_FIRST}
