"""Energy and carbon: the power of chips, and joules as kWh and grams of CO2 equivalent.

A chip draws `idle + (most - idle) u` watts, where u is the fraction of the time that it is busy: a
straight line between two published points, an estimate and not a measurement. Power drawn outside
the chips (hosts, network, cooling) is covered by the site's power usage effectiveness (PUE).

Sources. TPU v4: Jouppi et al. 2023 (arXiv 2304.01433, table 4: idle 90 W, most 192 W, at MLPerf's
busy 170 W on average). GPUs: the board power of the SXM data sheets. Google has published no power
figures for v5e, v5p, v6e and tpu7x: none is assumed here, the config must set it (`energy.watts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Power:
    """The power of a device.

    Attributes:
      most: watts when always busy.
      idle: watts when idle; None where it is unknown, and then `most` counts all the time.
      source: source of the figures.
    """

    most: float
    idle: float | None
    source: str

    def watts(self, utilisation: float) -> float:
        """Return the watts at a utilisation of 0 to 1.

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
"""Power by the short names in `jaxdist.runtime.hardware.DEVICES`; missing figures are
unpublished."""


@dataclass(frozen=True)
class Site:
    """The place where the energy is drawn.

    Attributes:
      pue: power of the site divided by that of its machines, at least 1.
      grid: grams of CO2 equivalent for each kWh.
    """

    pue: float
    grid: float

    def kwh(self, joules: float) -> float:
        """Return the energy of the site while its machines draw `joules`.

        >>> Site(pue=1.5, grid=400.0).kwh(7.2e6)
        3.0
        """
        return joules / JOULES_PER_KWH * self.pue

    def grams(self, joules: float) -> float:
        """Return the grams of CO2 equivalent.

        >>> Site(pue=1.5, grid=400.0).grams(7.2e6)
        1200.0
        """
        return self.kwh(joules) * self.grid
