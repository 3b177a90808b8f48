"""The energy of a run: each attempt writes records of the energy that it has drawn so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from jaxdist.cost.energy import Site
from jaxdist.metrics.energy.meters import Meter
from jaxdist.types import Json, JsonObject

SPLIT = "energy"
"""The split of the records of energy."""
UNITS = ("tokens", "examples")
"""The units in which a run may count its data. A record has the number of units, by the name of the
unit."""


@dataclass
class Tally:
    """The energy of an attempt of a run: the work of a process from its start to its last record.

    Attributes:
      unit: the unit of the data, a member of `UNITS`.
      units_per_step: the number of units in a step, over all devices; the number may change later.
      units: the number of units in the attempt's steps so far.
    """

    meter: Meter
    site: Site
    unit: str
    units_per_step: int
    clock: Callable[[], float] = time.monotonic
    units: int = 0

    def __post_init__(self) -> None:
        self._begun = self.clock()

    @property
    def described(self) -> str:
        """A description of the meter, its method, and the numbers of the site."""
        how = "counted by" if self.meter.method == "counter" else "modelled, not measured:"
        return f"{how} {self.meter.name}; PUE {self.site.pue:g}, {self.site.grid:g} g CO2e/kWh"

    def stepped(self) -> None:
        """Add the number of a step's tokens or examples to `units`."""
        self.units += self.units_per_step

    def values(self, life: int) -> dict[str, float]:
        """Return a record of the energy until now.

        Args:
          life: the number of the attempt of the run.
        """
        joules, seconds = self.meter.joules(), self.clock() - self._begun
        return {
            "life": life,
            "joules": joules,
            "seconds": seconds,
            self.unit: self.units,
            "watts": joules / seconds if seconds > 0 else 0.0,
            "kwh": self.site.kwh(joules),
            "grams_co2e": self.site.grams(joules),
        }


@dataclass(frozen=True)
class Energy:
    """The energy of a run: the sums over all of its attempts, including repeated steps.

    Attributes:
      joules: the energy that the devices have drawn.
      seconds: the time for which the energy was measured.
      unit: the unit of the data, a member of `UNITS`.
      units: the number of units of data; the units of repeated steps count each time.
      kwh: the energy that the site has drawn for the run, in kWh.
      grams: the carbon emissions of this energy, in grams of CO2 equivalent.
    """

    joules: float
    seconds: float
    unit: str
    units: float
    kwh: float
    grams: float

    @property
    def joules_per_million(self) -> float | None:
        """The joules per million tokens or examples, or None before the first step."""
        return 1e6 * self.joules / self.units if self.units else None

    def as_json(self) -> JsonObject:
        """Return the energy of the run as plain data for JSON."""
        return {
            "joules": self.joules,
            "seconds": self.seconds,
            self.unit: self.units,
            f"joules_per_million_{self.unit}": self.joules_per_million,
            "kwh": self.kwh,
            "grams_co2e": self.grams,
        }


def joined_energy(records: Iterable[Mapping[str, Json]]) -> Energy | None:
    """Return the energy of a run from the records of its attempts, or None without such records."""
    ours = (record for record in records if record["split"] == SPLIT)
    # A record has the energy of its attempt so far, so only the last record of each attempt counts.
    last = [[*group][-1] for _, group in groupby(ours, key=lambda record: record["life"])]
    if not last:
        return None

    def total(name: str) -> float:
        return sum(float(record[name]) for record in last)

    unit = next(name for name in UNITS if name in last[-1])
    sums = (total("seconds"), unit, total(unit), total("kwh"), total("grams_co2e"))
    return Energy(total("joules"), *sums)


def energy_table(energy: Energy) -> str:
    """Return the energy of a run as lines of at most 80 columns.

    >>> print(energy_table(Energy(7.2e3, 100.0, "tokens", 2e6, 0.002, 1.9)))
    energy 7.2 kJ (72.0 W), 3.6 kJ a million tokens
           2.0 Wh at the site, 1.9 g CO2e
    """
    watts = f" ({_scaled(energy.joules / energy.seconds, 'W')})" if energy.seconds else ""
    each = energy.joules_per_million
    rate = "" if each is None else f", {_scaled(each, 'J')} a million {energy.unit}"
    site, carbon = _scaled(1e3 * energy.kwh, "Wh"), _scaled(energy.grams, "g")
    drawn = _scaled(energy.joules, "J")
    return f"energy {drawn}{watts}{rate}\n       {site} at the site, {carbon} CO2e"


def _scaled(number: float, unit: str) -> str:
    """Return a number with three digits and a decimal prefix, as text.

    >>> _scaled(54_755.8, "g"), _scaled(0.0471, "g"), _scaled(0.0, "J")
    ('54.8 kg', '47.1 mg', '0.0 J')
    """
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m")):
        if number >= size:
            return f"{number / size:,.1f} {prefix}{unit}"
    return f"{number:.1f} {unit}"
