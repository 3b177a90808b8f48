"""Energy and carbon: power of chips, and what joules are in kWh and in grams of CO2 equivalent.

A chip draws `idle + (most - idle) u` watts, where u is the share of the time that it is at work: a
straight line between two published points, an estimate and never a measurement. What is drawn
beside the chips (hosts, network, cooling) is the site's power usage effectiveness (PUE).

Sources. TPU v4: Jouppi et al. 2023 (arXiv 2304.01433, table 4: idle 90 W, most 192 W, at MLPerf's
work 170 W on average). GPUs: the board power of the SXM data sheets. Google has published no power
of v5e, v5p, v6e and tpu7x: none is made up here, the config must give it (`energy.watts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Power:
    """What one device draws.

    Attributes:
      most: watts at work all the time.
      idle: watts at no work; None where no figure is known, and then `most` counts all the time.
      source: where the figures are from.
    """

    most: float
    idle: float | None
    source: str

    def watts(self, utilisation: float) -> float:
        """While it is at work for so much of the time, 0 to 1.

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
"""By the short name of `jaxdist.runtime.hardware.DEVICES`; those not here are not published."""


@dataclass(frozen=True)
class Site:
    """Where the energy is drawn.

    Attributes:
      pue: what the site draws over what its machines draw, at least 1.
      grid: grams of CO2 equivalent for each kWh.
    """

    pue: float
    grid: float

    def kwh(self, joules: float) -> float:
        """What the site draws while its machines draw so much.

        >>> Site(pue=1.5, grid=400.0).kwh(7.2e6)
        3.0
        """
        return joules / JOULES_PER_KWH * self.pue

    def grams(self, joules: float) -> float:
        """Of CO2 equivalent.

        >>> Site(pue=1.5, grid=400.0).grams(7.2e6)
        1200.0
        """
        return self.kwh(joules) * self.grid
