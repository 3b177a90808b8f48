"""The speed of a run, and short texts for speeds, times and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """The figures from which the MFU of a run (model FLOPs utilization) is computed.

    Attributes:
      unit: the unit of the data, "tokens" or "examples".
      flops_per_unit: the FLOPs of the model for a unit, forward and backward, without
        recomputation.
      devices: the number of devices that take part.
      flops_per_second: the peak of a device in the dtype of the model's products, in FLOPs per
        second.
    """

    unit: str
    flops_per_unit: float
    devices: int
    flops_per_second: float

    def of(self, units: int, seconds: float) -> dict[str, float]:
        """Return the rate per device, and the MFU, of a step that processes `units` units.

        MFU is the rate of the model's FLOPs divided by the devices' peak, as in PaLM (arXiv
        2204.02311, appendix B), where recomputation does not count.

        Args:
          units: the number of tokens or examples in the step, over all devices.
          seconds: the time of the step, in seconds.

        >>> Efficiency("tokens", 6e9, devices=4, flops_per_second=2e14).of(100_000, 1.5)
        {'tokens_per_second_per_device': 16666.666666666668, 'mfu': 0.5}
        """
        rate = units / seconds / self.devices if seconds > 0 else math.inf
        return {
            f"{self.unit}_per_second_per_device": rate,
            "mfu": rate * self.flops_per_unit / self.flops_per_second,
        }


class SmoothedStepTime:
    """The smoothed time of a step in seconds: first a plain mean, later an exponential mean.

    The time of the first step, which includes compilation, is dropped when the second step is
    added.

    >>> time = SmoothedStepTime(weight=0.5)
    >>> for seconds in (9.0, 0.2, 0.4):
    ...     time.add(seconds)
    >>> round(time.seconds, 3)
    0.3
    """

    def __init__(self, weight: float = 0.05) -> None:
        self.count = 0
        self.seconds = math.nan
        self._weight = weight

    def add(self, seconds: float) -> None:
        """Add the wall time of a step to the smoothed time."""
        self.count += 1
        if self.count <= 2:
            self.seconds = seconds
        else:
            share = max(self._weight, 1 / (self.count - 1))
            self.seconds += (seconds - self.seconds) * share


def format_rate(per_second: float) -> str:
    """Return a rate as text of at most seven characters.

    >>> format_rate(412_331.4), format_rate(41_233_140.0), format_rate(3.2)
    ('412,331', '41.2M', '3.2')
    """
    if not math.isfinite(per_second):
        return "?"
    for limit, scale, suffix in ((1e6, 1, ""), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        if per_second < limit:
            value = per_second / scale
            return f"{value:,.0f}" if not suffix and value >= 100 else f"{value:.1f}{suffix}"
    return f"{per_second:.1e}"


def format_step_time(seconds: float) -> str:
    """Return a step time as text, in a readable unit.

    >>> format_step_time(0.0382), format_step_time(0.00042), format_step_time(12.34)
    ('38 ms/step', '0.42 ms/step', '12.3 s/step')
    """
    if not math.isfinite(seconds):
        return "? ms/step"
    if seconds >= 10:
        return f"{seconds:.1f} s/step"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms/step" if milliseconds >= 10 else f"{milliseconds:.2g} ms/step"


def format_duration(seconds: float) -> str:
    """Return a duration as text: in minutes and seconds, with hours, or in days and hours.

    >>> format_duration(68), format_duration(3 * 3600 + 62), format_duration(90_000 * 4)
    ('1:08', '3:01:02', '4d 4h')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_loss(value: float) -> str:
    """Return a loss as text: three decimals, or an exponent if it is very small or very large.

    >>> format_loss(1.8342), format_loss(0.00042), format_loss(123456.0), format_loss(float("nan"))
    ('1.834', '4.2e-04', '1.2e+05', 'nan')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.3f}" if 1e-2 <= abs(value) < 1e4 else f"{value:.1e}"
