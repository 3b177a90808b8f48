"""The section `energy` of a config: the meter, and the figures for electricity and carbon."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config
from jaxdist.cost.energy import POWERS, Power, Site


class EnergyConfig(Config):
    """The meter of a run's energy, and the carbon intensity of its site."""

    meter: Literal["auto", "nvml", "rapl", "model", "none"] = "auto"
    """Meter: counters of GPUs (nvml) or of CPUs (rapl), the published power of the chip (model), or
    none; auto takes the counters of the devices that compute, else the model, else none."""
    watts: PositiveFloat | None = None
    """Power of a busy device, where it is unknown (v5e, v5p, v6e: Google publishes none) or you
    know it better."""
    idle_watts: Annotated[float, Field(ge=0)] | None = None
    """Power of an idle device, given only with `watts`; null takes `watts` for idle time too."""
    pue: Annotated[float, Field(ge=1)] = 1.0
    """Power usage effectiveness: power of the whole site divided by that of its machines."""
    grid: Annotated[float, Field(ge=0)] = 475.0
    """Grams of CO2 equivalent per kWh; 475 is the mean of the world in 2019 (IEA), hydro 26, coal
    995 (codecarbon)."""

    @model_validator(mode="after")
    def _check_watts(self) -> EnergyConfig:
        if self.idle_watts is not None and (self.watts is None or self.idle_watts > self.watts):
            raise ValueError("idle_watts needs watts, and is at most as large")
        return self

    @property
    def site(self) -> Site:
        """The site of the run."""
        return Site(self.pue, self.grid)

    def power_of(self, device: str | None) -> Power | None:
        """Return the power of a device of `jaxdist.runtime.hardware`, or None if it is unknown.

        >>> EnergyConfig(watts=250).power_of("v5p").most, EnergyConfig().power_of("v5p")
        (250.0, None)
        """
        if self.watts is not None:
            return Power(self.watts, self.idle_watts, "energy.watts of the config")
        return None if device is None else POWERS.get(device)
