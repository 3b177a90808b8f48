"""The order of the runs of a batch-scaling study, and the means over its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.optim.batch_scaling import ScaleFromConfig, scale
from jaxdist.study.definition import Contender, contenders
from jaxdist.study.trial import Trial, TrialOutcome, deviation, metrics_of

RULE = "lamb"
LARGEST_WARMUP = 0.2
"""The fraction of warm-up in a run at the largest batch size, as in LAMB's table for BERT."""
TUNING_SEEDS = 3
"""The number of runs, each with another seed, by whose mean a search compares learning rates."""
FACTOR, EXTENSIONS = 2.0, 8
"""FACTOR: the ratio of successive learning rates in a search. EXTENSIONS: the number of rates that
a search may try after its first three rates.
"""
Runner = Callable[[Trial], TrialOutcome[Trial]]


@dataclass(frozen=True)
class StudyPlan:
    """A plan to train every optimizer at every batch size, for the same number of epochs.

    Attributes:
      optimizers: the optimizers by name.
      steps: the number of optimizer steps by batch size. The batch sizes are in ascending order,
        and the smallest is the base.
      seeds: the seeds of the reported runs.
      tuning_seeds: the seeds of the runs that choose learning rates, which are not in `seeds`.
      tune: whether the learning rate is tuned at every batch size, and not only at the base.
    """

    optimizers: Mapping[str, Contender]
    steps: Mapping[int, int]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    tune: bool

    @property
    def base(self) -> int:
        """The smallest batch size, from which the rule scales the learning rate."""
        return min(self.steps)

    @property
    def warmup_fraction(self) -> float:
        """The fraction of a run that is warm-up at the base batch size."""
        return LARGEST_WARMUP * self.base / max(self.steps)

    def scaled(self, learning_rate: float, batch_size: int) -> tuple[float, int]:
        """Return the learning rate and the number of warm-up steps at a batch size, by `RULE`.

        Args:
          learning_rate: the learning rate at the base batch size.
          batch_size: the batch size for which the rule is applied.
        """
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
    """The result of an optimizer at a batch size.

    Attributes:
      optimizer: the name of the optimizer.
      batch_size: the batch size with which the optimizer was used.
      tuned: whether a search at this batch size found the learning rate. If false, the rule scaled
        the best rate of the base batch size.
      outcomes: the runs, one for each seed.
    """

    optimizer: str
    batch_size: int
    tuned: bool
    outcomes: tuple[TrialOutcome[Trial], ...]

    @property
    def learning_rate(self) -> float:
        """The peak learning rate, which is the same for all runs of the cell."""
        return self.outcomes[0].trial.learning_rate

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return sum(outcome.diverged for outcome in self.outcomes)

    @property
    def values(self) -> list[float]:
        """The metric of each run; all values are NaN if any run diverged."""
        return metrics_of(self.outcomes, self.outcomes[0].metric)

    @property
    def mean(self) -> float:
        """The mean of the metric, or NaN if any run diverged."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """The sample standard deviation of the metric.

        The deviation is NaN for a single run, and if any run diverged.
        """
        return deviation(self.values)


def parse_batches(text: str) -> tuple[int, ...]:
    """Return the batch sizes in a text, in ascending order.

    Raises:
      ConfigError: the text has no size or has a size twice, or a size is not a positive whole
        number.

    >>> parse_batches("256, 64")
    (64, 256)
    """
    words = _words("--batches", text, "write batch sizes, such as --batches 64,256,1024")
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) > 0):
            raise ConfigError(
                f"--batches {word!r} is not a batch size: write whole numbers from 1, such as "
                "64,256"
            )
    return tuple(sorted(map(int, words)))


def parse_optimizers(text: str) -> dict[str, Contender]:
    """Return the shipped optimizers that a text names, by name.

    Raises:
      ConfigError: the text has no name, an unknown name, or a name twice.
    """
    known = contenders()
    names = _words("--optimizers", text, f"choose from {','.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"--optimizers {name!r}: {did_you_mean(name, known)}")
    return {name: known[name] for name in names}


def _words(option: str, text: str, remedy: str) -> list[str]:
    """Return the words of an option, which are separated by commas and all different.

    Raises:
      ConfigError: the text has no word, or has a word twice.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{option} is empty; {remedy}")
    for word in words:
        if words.count(word) > 1:
            raise ConfigError(f"{option} names {word} {words.count(word)} times: name it once")
    return words


def run_plan(plan: StudyPlan, run: Runner) -> Iterator[tuple[StudyCell, ...]]:
    """Run a plan, and yield the cells of each batch size and optimizer.

    The first cell has the learning rate that the rule gives, and the second cell, if the plan tunes
    learning rates, has the tuned rate. The rule scales the best learning rate at the base batch
    size. At other batch sizes, the search starts from the scaled rate.

    Args:
      plan: the plan whose cells are run.
      run: a function that runs a trial.
    """

    def outcomes(
        name: str, batch_size: int, learning_rate: float, seeds: Sequence[int]
    ) -> tuple[TrialOutcome[Trial], ...]:
        _, warmup_steps = plan.scaled(1.0, batch_size)
        return tuple(run(Trial(name, batch_size, s, learning_rate, warmup_steps)) for s in seeds)

    def best(name: str, batch_size: int, start: float) -> float:
        def score(rate: float) -> tuple[float, ...]:
            found = outcomes(name, batch_size, rate, plan.tuning_seeds)
            scores = zip(*(outcome.score for outcome in found), strict=True)
            return tuple(sum(values) / len(found) for values in scores)

        return search_rate(start, score)

    # The base batch size comes first, since its best rate is the reference for all other sizes.
    references: dict[str, float] = {}
    for batch_size in plan.steps:
        for name, contender in plan.optimizers.items():
            if batch_size == plan.base:
                references[name] = best(name, batch_size, contender.start)
            rate, _ = plan.scaled(references[name], batch_size)
            cells = [
                StudyCell(name, batch_size, False, outcomes(name, batch_size, rate, plan.seeds))
            ]
            if plan.tune:
                rate = rate if batch_size == plan.base else best(name, batch_size, rate)
                tuned = outcomes(name, batch_size, rate, plan.seeds)
                cells.append(StudyCell(name, batch_size, True, tuned))
            yield tuple(cells)


def rounded(learning_rate: float) -> float:
    """Return a learning rate rounded to six digits, which removes differences by rounding."""
    return float(f"{learning_rate:.6g}")


def search_rate(start: float, score: Callable[[float], tuple[float, ...]]) -> float:
    """Return the learning rate with the best score.

    The search first tries `start` x 1/2, 1 and 2. While the best rate is the smallest or the
    largest of the tried rates, the search tries the next rate in that direction, up to 8 times.
    Among equally good rates, the smallest is chosen.

    Args:
      start: the initial learning rate.
      score: a function from a learning rate to its score; a larger score is better. Each rate is
        scored once.

    >>> search_rate(1.0, lambda rate: (-abs(rate - 16.0),))
    16.0
    """
    rates = {i: rounded(start * FACTOR**i) for i in (-1, 0, 1)}
    scores = {i: score(rate) for i, rate in rates.items()}
    for _ in range(EXTENSIONS):
        best = max(sorted(scores), key=scores.__getitem__)
        beyond = {min(scores): min(scores) - 1, max(scores): max(scores) + 1}.get(best)
        if beyond is None:
            break
        rates[beyond] = rounded(start * FACTOR**beyond)
        scores[beyond] = score(rates[beyond])
    return rates[max(sorted(scores), key=scores.__getitem__)]
