"""The runs of a batch-scaling study, and the means over them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.optim.batch_scaling import ScaleFromConfig, scale
from jaxdist.study.definition import Contender, contenders
from jaxdist.study.trial import Trial, TrialOutcome

RULE = "lamb"
LARGEST_WARMUP = 0.2
"""Share of the run that warms up at the largest batch, as in LAMB's table for BERT."""
TUNING_SEEDS = 3
FACTOR, EXTENSIONS = 2.0, 8
"""Between learning rates that are tried; how often a search may go beyond its first three."""
Runner = Callable[[Trial], TrialOutcome[Trial]]
T = TypeVar("T")


@dataclass(frozen=True)
class StudyPlan:
    """A study: every optimizer at every batch size, for the same number of epochs.

    Attributes:
      optimizers: by name.
      steps: ascending batch size to optimizer steps; the first is the base.
      seeds: of the runs that are reported.
      tuning_seeds: of the runs that choose learning rates, none of them in `seeds`.
      tune: search for a learning rate at every batch size, not at the base alone.
    """

    optimizers: Mapping[str, Contender]
    steps: Mapping[int, int]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    tune: bool

    @property
    def base(self) -> int:
        """The batch size that the rule begins from."""
        return min(self.steps)

    @property
    def warmup_fraction(self) -> float:
        """Share of the run that warms up at the base batch."""
        return LARGEST_WARMUP * self.base / max(self.steps)

    def scaled(self, learning_rate: float, batch_size: int) -> tuple[float, int]:
        """Return a learning rate of the base batch at another batch, and the steps of warm-up."""
        rule = ScaleFromConfig(
            batch_size=self.base,
            learning_rate=learning_rate,
            rule=RULE,
            warmup_fraction=self.warmup_fraction,
        )
        found = scale(rule, batch_size=batch_size, total_steps=self.steps[batch_size])
        return rounded(found.learning_rate.value), int(found.warmup_steps.value)


@dataclass(frozen=True)
class StudyCell:
    """The result of an optimizer at a batch size: one run a seed, all else equal.

    Attributes:
      tuned: its learning rate was searched for at this batch size, not given by the rule.
    """

    optimizer: str
    batch_size: int
    tuned: bool
    outcomes: tuple[TrialOutcome[Trial], ...]

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of all its runs."""
        return self.outcomes[0].trial.learning_rate

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return sum(outcome.diverged for outcome in self.outcomes)

    @property
    def values(self) -> list[float]:
        """The metric of each run; NaN for all when one diverged."""
        if self.diverged:
            return [math.nan] * len(self.outcomes)
        return [outcome.metrics[outcome.metric] for outcome in self.outcomes]

    @property
    def mean(self) -> float:
        """Mean metric; NaN when a run diverged."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Sample standard deviation of the metric; NaN of one run, or when one diverged."""
        if self.diverged or len(self.outcomes) < 2:
            return math.nan
        return statistics.stdev(self.values)


def parse_batches(text: str) -> tuple[int, ...]:
    """Return batch sizes, ascending.

    Raises:
      ConfigError: none, not whole numbers from 1 on, or one twice.

    >>> parse_batches("256, 64")
    (64, 256)
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError("--batches is empty; give sizes, e.g. --batches 64,256,1024")
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) > 0):
            raise ConfigError(
                f"--batches {word!r} is no batch size: give whole numbers from 1, such as 64,256"
            )
    sizes = sorted(map(int, words))
    for size in sizes:
        if sizes.count(size) > 1:
            raise ConfigError(f"--batches {size} is given {sizes.count(size)} times: give it once")
    return tuple(sizes)


def parse_optimizers(text: str) -> dict[str, Contender]:
    """Return the shipped optimizers of these names.

    Raises:
      ConfigError: no name, one that does not exist, or one twice.
    """
    names, known = [name.strip() for name in text.split(",") if name.strip()], contenders()
    if not names:
        raise ConfigError(f"--optimizers is empty; choose from {','.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"--optimizers {name!r}: {did_you_mean(name, known)}")
        if names.count(name) > 1:
            raise ConfigError(
                f"--optimizers {name!r} is given {names.count(name)} times: give it once"
            )
    return {name: known[name] for name in names}


def run_plan(plan: StudyPlan, run: Runner) -> Iterator[tuple[StudyCell, ...]]:
    """Yield all cells, those of one optimizer and batch size at a time: by the rule, then tuned.

    The rule's reference is the best learning rate at the base batch. Where a batch is tuned, the
    search there begins at the rule's rate.
    """
    references: dict[str, float] = {}
    for batch_size in plan.steps:
        for name in plan.optimizers:
            _, warmup_steps = plan.scaled(1.0, batch_size)
            at = partial(_runs, run, name, batch_size, warmup_steps)
            best = partial(_best_rate, partial(at, plan.tuning_seeds))
            if batch_size == plan.base:
                references[name] = best(plan.optimizers[name].start)
            by_rule, _ = plan.scaled(references[name], batch_size)
            cells = [StudyCell(name, batch_size, False, at(plan.seeds, by_rule))]
            if plan.tune:
                rate = by_rule if batch_size == plan.base else best(by_rule)
                cells.append(StudyCell(name, batch_size, True, at(plan.seeds, rate)))
            yield tuple(cells)


def _runs(
    run: Runner,
    name: str,
    batch_size: int,
    warmup_steps: int,
    seeds: Sequence[int],
    learning_rate: float,
) -> tuple[TrialOutcome[Trial], ...]:
    return tuple(run(Trial(name, batch_size, s, learning_rate, warmup_steps)) for s in seeds)


def _best_rate(runs: Callable[[float], tuple[TrialOutcome[Trial], ...]], start: float) -> float:
    return search(start, runs, _mean_score)[0].trial.learning_rate


def _mean_score(outcomes: Sequence[TrialOutcome[Trial]]) -> tuple[float, ...]:
    scores = zip(*(outcome.score for outcome in outcomes), strict=True)
    return tuple(sum(values) / len(outcomes) for values in scores)


def rounded(learning_rate: float) -> float:
    """Round a rate to six digits, so that equal rates compare equal."""
    return float(f"{learning_rate:.6g}")


def search(start: float, run: Callable[[float], T], score: Callable[[T], tuple[float, ...]]) -> T:
    """Return the result of the best of `start` x 1/2, 1, 2.

    While the best is the smallest or the largest, one more beyond it is tried, up to 8 of them, so
    that the best one lies inside what was tried. Of equally good ones the smallest rate wins.

    >>> search(1.0, lambda rate: rate, lambda rate: (-abs(rate - 16.0),))
    16.0
    """
    results = {i: run(rounded(start * FACTOR**i)) for i in (-1, 0, 1)}
    for _ in range(EXTENSIONS):
        best = max(sorted(results), key=lambda i: score(results[i]))
        beyond = {min(results): min(results) - 1, max(results): max(results) + 1}.get(best)
        if beyond is None:
            break
        results[beyond] = run(rounded(start * FACTOR**beyond))
    return results[max(sorted(results), key=lambda i: score(results[i]))]
