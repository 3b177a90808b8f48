"""The runs of a study, their outcomes, and the journal that stores outcomes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from jaxdist.errors import RunError, os_errors_as
from jaxdist.types import Json, JsonObject


@dataclass(frozen=True)
class Trial:
    """The settings that vary between runs; all other settings come from the study's config.

    Attributes:
      optimizer: the name of the optimizer.
      batch_size: the batch size of the run.
      seed: the seed of the run.
      learning_rate: the peak of the learning rate, which is reached after `warmup_steps` steps.
      warmup_steps: the number of warm-up steps.
    """

    optimizer: str
    batch_size: int
    seed: int
    learning_rate: float
    warmup_steps: int

    def __str__(self) -> str:
        rate = f"learning rate {self.learning_rate:g}"
        return f"{self.optimizer}, batch {self.batch_size}, {rate}, seed {self.seed}"


@dataclass(frozen=True)
class VariantTrial:
    """A run in a comparison of variants, identified by the name of a variant and a seed."""

    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


TrialT = TypeVar("TrialT", Trial, VariantTrial)


@dataclass(frozen=True)
class TrialOutcome(Generic[TrialT]):
    """The outcome of a trial: its held-out metrics, and whether it diverged.

    Attributes:
      trial: the trial that had this outcome.
      steps: the number of planned optimizer steps.
      metrics: the means of metrics over the held-out split, including "loss".
      diverged: whether the loss was not finite in a step, which ends the run, or in the evaluation.
      seconds: the wall time including compilation, in seconds.
    """

    trial: TrialT
    steps: int
    metrics: Mapping[str, float]
    diverged: bool
    seconds: float

    @property
    def metric(self) -> str:
        """The metric to compare, which is "accuracy" if the loss reports it, otherwise "loss"."""
        return "accuracy" if "accuracy" in self.metrics else "loss"

    @property
    def score(self) -> tuple[float, ...]:
        """The score of the run; a larger score is better.

        Scores are compared first by the accuracy, if there is one, and then by the negated loss.
        All numbers of the score are minus infinity if the run diverged.
        """
        if self.diverged:
            return (-math.inf, -math.inf)
        loss = self.metrics["loss"]
        return (self.metrics.get("accuracy", -loss), -loss)

    def as_json(self) -> JsonObject:
        """Return the outcome as JSON values, in which None replaces numbers that are not finite."""
        metrics = {name: finite(value) for name, value in self.metrics.items()}
        rest = {"steps": self.steps, "diverged": self.diverged, "seconds": self.seconds}
        return {**asdict(self.trial), **rest, "metrics": metrics}


def metrics_of(outcomes: Sequence[TrialOutcome[TrialT]], metric: str) -> list[float]:
    """Return a metric of each run; all values are NaN if any run diverged."""
    diverged = any(outcome.diverged for outcome in outcomes)
    return [math.nan if diverged else outcome.metrics[metric] for outcome in outcomes]


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, or NaN if it is undefined or a value is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def with_spread(mean: str, spread: float, places: int) -> str:
    """Return a mean as text, with its spread unless the spread is NaN.

    >>> with_spread("1.25", 0.5, 2), with_spread("1.25", math.nan, 2)
    ('1.25 ± 0.50', '1.25')
    """
    return mean if math.isnan(spread) else f"{mean} ± {spread:.{places}f}"


def finite(value: float) -> float | None:
    """Return a number as a JSON value, which is None if the number is not finite."""
    return value if math.isfinite(value) else None


def outcome_from_json(kind: type[TrialT], record: Mapping[str, Json]) -> TrialOutcome[TrialT]:
    """Return the outcome that `TrialOutcome.as_json` has converted to JSON values.

    Args:
      kind: the class of the outcome's trial.
      record: the JSON values.
    """
    metrics = {k: math.nan if v is None else v for k, v in record["metrics"].items()}
    trial = kind(**{name: record[name] for name in kind.__dataclass_fields__})
    return TrialOutcome(trial, record["steps"], metrics, record["diverged"], record["seconds"])


def trial_key(settings: Mapping[str, Json]) -> str:
    """Return a key for settings, which is the first 16 hexadecimal digits of their hash."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class OutcomeJournal(Generic[TrialT]):
    """A file that stores outcomes by key, so that an interrupted study can continue.

    The file has a line of JSON for each outcome. Each line is written at once, so that a killed
    study loses at most its current run.

    Args:
      path: the path of the file. The file and its directory are created if they do not exist.
      kind: the class of the journal's trials.

    Raises:
      RunError: the file cannot be written, or a complete line is not an outcome.
    """

    def __init__(self, path: Path, kind: type[TrialT]) -> None:
        self.path, self._kind = path, kind
        with self._errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
            content = path.read_bytes()
        lines = content.split(b"\n")
        # The text after the last newline is empty, or is a line that a kill has cut off.
        self._found = dict(self._parse(n, line) for n, line in enumerate(lines[:-1], start=1))
        # Without an incomplete last line, the next outcome starts on a new line.
        os.truncate(path, len(content) - len(lines[-1]))

    def get(self, key: str) -> TrialOutcome[TrialT] | None:
        """Return the stored outcome with the given key, or None if no outcome has the key."""
        return self._found.get(key)

    def add(self, key: str, outcome: TrialOutcome[TrialT]) -> None:
        """Store the outcome of a finished run under a key.

        Raises:
          RunError: the line cannot be written.
        """
        self._found[key] = outcome
        with self._errors(), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **outcome.as_json()}, allow_nan=False) + "\n")

    def _errors(self) -> AbstractContextManager[None]:
        failed = f"cannot write the study's runs to {self.path}"
        return os_errors_as(RunError, failed, "choose another path")

    def _parse(self, number: int, line: bytes) -> tuple[str, TrialOutcome[TrialT]]:
        try:
            record = json.loads(line)
            return record["key"], outcome_from_json(self._kind, record)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.path}:{number} is not a run of a study: {line[:60]!r}; remove the line, or "
                "remove the file to repeat all runs"
            ) from error
