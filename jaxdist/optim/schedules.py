"""Learning-rate schedules: a linear warm-up, and then a decay to a fraction of the peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal, cast

import jax
import optax
from jax.typing import ArrayLike
from pydantic import Field, model_validator

from jaxdist.config.schema import Config
from jaxdist.types import Scalar

Fraction = Annotated[float, Field(ge=0, le=1)]


class ScheduleConfig(Config):
    """A linear warm-up to the peak over `warmup_steps`, then a decay until the end of the run."""

    type: Literal["constant", "cosine", "linear", "poly"] = "cosine"
    """The shape of the decay after the warm-up. constant does not decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of steps in which the learning rate rises linearly from zero to the peak."""
    end_fraction: Fraction = 0.0
    """The learning rate at the end of the decay, as a fraction of the peak."""
    power: Annotated[float, Field(gt=0)] | None = None
    """The exponent of the decay of type poly; null means 1."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.type == "constant" and self.end_fraction:
            raise ValueError(
                "end_fraction has no effect with type: constant; leave end_fraction out, or choose "
                "a type that decays"
            )
        if self.type != "poly" and self.power is not None:
            raise ValueError(
                f"power has no effect with type: {self.type}; leave power out, or set type: poly"
            )
        return self


def build_schedule(config: ScheduleConfig, *, peak: float, total_steps: int) -> optax.Schedule:
    """Return a function from a step (0-based) to the learning rate of the step.

    >>> lr = build_schedule(ScheduleConfig(type="linear", warmup_steps=2), peak=1.0, total_steps=4)
    >>> [round(float(lr(step)), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]

    A run that is shorter than its warm-up has the same rates as the start of a longer run.
    """
    warmup, decay_steps = config.warmup_steps, total_steps - config.warmup_steps
    end = peak * config.end_fraction
    decay: optax.Schedule
    if config.type == "constant" or decay_steps <= 0:
        decay = optax.constant_schedule(peak)
    elif config.type == "cosine":
        decay = optax.cosine_decay_schedule(peak, decay_steps, alpha=config.end_fraction)
    else:
        power = config.power or 1.0
        decay = optax.polynomial_schedule(peak, end, power, decay_steps)
    if not warmup:
        return decay
    # Step i (0-based) has the rate peak * (i + 1) / warmup, so that the first step is not lost at a
    # rate of 0.
    # A ramp of one step has no slope: the rate of this step is the peak, with which `decay` also
    # begins.
    ramp = optax.linear_schedule(peak / warmup, peak, warmup - 1) if warmup > 1 else decay
    return optax.join_schedules([ramp, decay], [warmup])


class StepClock:
    """The number of skipped steps of a run, which a schedule adds to an optimizer's own count.

    An optimizer counts its updates. A schedule counts steps, since warm-up, decay, batch sizes and
    the end of a run are planned in steps. The difference is known only while an update is traced,
    and no optax transformation accepts the difference as an argument, so this object holds the
    difference.

    >>> clock = StepClock()
    >>> doubled = clock.by_steps(lambda step: 2 * step)
    >>> with clock.behind(3):
    ...     print(doubled(10))
    26
    """

    def __init__(self) -> None:
        self._skipped: Scalar | None = None

    @contextmanager
    def behind(self, skipped: Scalar | None) -> Iterator[None]:
        """Let schedules add `skipped` to their counts inside the context; None adds nothing."""
        before, self._skipped = self._skipped, skipped
        try:
            yield
        finally:
            self._skipped = before

    def by_steps(self, schedule: optax.Schedule) -> optax.Schedule:
        """Convert a schedule of steps to a schedule of updates, which an optimizer counts."""

        def of_updates(count: ArrayLike) -> jax.Array:
            # Without skips even 0 is not added, so that compiled programs stay the same. A result
            # that is a Python number is not converted to an array, whose dtype could widen updates.
            return cast(
                jax.Array, schedule(count if self._skipped is None else count + self._skipped)
            )

        return of_updates
