"""The section `energy` of a config: the meter, and the numbers for electricity and carbon."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config
from jaxdist.cost.energy import POWERS, Power, Site


class EnergyConfig(Config):
    """The meter of a run's energy, and the efficiency and carbon intensity of its site."""

    meter: Literal["auto", "nvml", "rapl", "model", "none"] = "auto"
    """The meter of energy: the counters of GPUs (nvml) or of CPUs (rapl), the published power of
    the chip (model), or none. auto takes the counters of the devices that compute. Without readable
    counters, auto takes the model if the power is known, and otherwise none."""
    watts: PositiveFloat | None = None
    """The power of a busy device, in watts, which replaces the published power. The setting is
    necessary for v5e, v5p and v6e, for which Google publishes no power."""
    idle_watts: Annotated[float, Field(ge=0)] | None = None
    """The power of an idle device, in watts, which may be set only together with `watts`; null
    takes `watts` for idle time too."""
    pue: Annotated[float, Field(ge=1)] = 1.0
    """The power usage effectiveness: the power of the whole site divided by the power of its
    machines."""
    grid: Annotated[float, Field(ge=0)] = 475.0
    """The carbon intensity of the electricity, in grams of CO2 equivalent per kWh; 475 is the mean
    of the world in 2019 (IEA), 26 is the value for hydropower, and 995 is the value for coal
    (codecarbon)."""

    @model_validator(mode="after")
    def _check_watts(self) -> EnergyConfig:
        if self.idle_watts is not None and (self.watts is None or self.idle_watts > self.watts):
            raise ValueError(
                "idle_watts works only with watts, and must not exceed watts: set both, in watts"
            )
        return self

    @property
    def site(self) -> Site:
        """The site of the run, with its power usage effectiveness and carbon intensity."""
        return Site(self.pue, self.grid)

    def power_of(self, device: str | None) -> Power | None:
        """Return the power of a device: `watts`, or else its published power.

        The result is None if neither `watts` nor a published power is known.

        Args:
          device: the name of a device of `jaxdist.runtime.hardware`, or None for another device.

        >>> EnergyConfig(watts=250).power_of("v5p").most, EnergyConfig().power_of("v5p")
        (250.0, None)
        """
        if self.watts is not None:
            return Power(self.watts, self.idle_watts, "energy.watts of the config")
        return None if device is None else POWERS.get(device)
