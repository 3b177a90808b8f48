"""Energy and carbon: the power of chips, and the conversion of joules to kWh and to grams of CO2.

A chip is estimated to draw `idle + (most - idle) u` watts, where u is the fraction of time in which
the chip is busy. The estimate is a straight line between two published points. The site's power
usage effectiveness (PUE) covers the power of hosts, network and cooling.

The figures of TPU v4 are from Jouppi et al. 2023 (arXiv 2304.01433, table 4: 90 W when idle, 192 W
at most, 170 W on average in MLPerf). The figures of GPUs are the board power in the SXM data
sheets. Google has published no power figures for v5e, v5p, v6e and tpu7x: for these chips the
config must set `energy.watts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Power:
    """The power of a chip.

    Attributes:
      most: the watts of a busy chip.
      idle: the watts of an idle chip, or None if they are unknown. With None an idle chip counts as
        drawing `most` watts.
      source: the publication of the figures.
    """

    most: float
    idle: float | None
    source: str

    def watts(self, utilisation: float) -> float:
        """Return the watts that a chip draws at a utilisation from 0 to 1.

        >>> Power(200.0, 100.0, "").watts(0.5), Power(700.0, None, "").watts(0.5)
        (150.0, 700.0)
        """
        idle = self.most if self.idle is None else self.idle
        return idle + (self.most - idle) * utilisation


POWERS: Mapping[str, Power] = MappingProxyType(
    {
        "v4": Power(192.0, 90.0, "arXiv 2304.01433, table 4"),
        "a100": Power(400.0, None, "data sheet, board power"),
        "h100": Power(700.0, None, "data sheet, board power"),
        "h200": Power(700.0, None, "data sheet, board power"),
    }
)
"""The power of chips by their names in `jaxdist.runtime.hardware.DEVICES`. No figures are published
for chips that are missing."""


@dataclass(frozen=True)
class Site:
    """The data center in which the chips run.

    Attributes:
      pue: the power of the site divided by the power of its chips, at least 1.
      grid: the grams of CO2 equivalent for each kWh.
    """

    pue: float
    grid: float

    def kwh(self, joules: float) -> float:
        """Return the kWh that the site draws while its chips draw `joules`.

        >>> Site(pue=1.5, grid=400.0).kwh(7.2e6)
        3.0
        """
        return joules / JOULES_PER_KWH * self.pue

    def grams(self, joules: float) -> float:
        """Return the grams of CO2 equivalent that the site emits while its chips draw `joules`.

        >>> Site(pue=1.5, grid=400.0).grams(7.2e6)
        1200.0
        """
        return self.kwh(joules) * self.grid
