"""The meters of energy: counters of GPUs, counters of CPUs, and a model of the power.

A counter measures the energy that the devices of this host have drawn since the counter was opened,
including the energy for other users of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from jaxdist.cost.energy import Power
from jaxdist.errors import RunError

POWERCAP = Path("/sys/class/powercap")
Method = Literal["counter", "model"]


class Meter(Protocol):
    """A meter of the joules that devices have drawn since the meter was opened."""

    name: str
    """The name of the meter in reports."""
    method: Method

    def joules(self) -> float:
        """Return the joules since the meter was opened, never less than at the previous call."""
        ...


class Rapl:
    """The counters of Intel and AMD for CPU packages and their memory, in microjoules.

    A counter wraps at `max_energy_range_uj`, after minutes at full load, so `joules` must be called
    at shorter intervals. Only packages and memory count, since the counter of a package includes
    its cores.

    Args:
      root: the kernel's powercap folder.

    Raises:
      RunError: there are no counters, or this user may not read them.
    """

    method: Method = "counter"

    def __init__(self, root: Path = POWERCAP) -> None:
        zones = [zone for zone in sorted(root.glob("*-rapl:*")) if _counts(zone)]
        if not zones:
            raise RunError(
                f"{root} has no RAPL energy counter that this user may read: set energy.meter to "
                "model, or to none"
            )
        self._zones = zones
        self._ranges = [_number(zone / "max_energy_range_uj") for zone in zones]
        self._last = [_number(zone / "energy_uj") for zone in zones]
        self._total = 0
        self.name = f"RAPL ({', '.join((zone / 'name').read_text().strip() for zone in zones)})"

    def joules(self) -> float:
        """Return the joules since the meter was opened; see `Meter`."""
        now = [_number(zone / "energy_uj") for zone in self._zones]
        for was, is_, most in zip(self._last, now, self._ranges, strict=True):
            # If the value is smaller than before, the counter has wrapped, at most once between two
            # readings.
            self._total += is_ - was if is_ >= was else is_ + most - was
        self._last = now
        return 1e-6 * self._total


class Nvml:
    """The energy counters of this host's GPUs, in millijoules, updated about every 100 ms.

    Args:
      visible: the numbers of the GPUs to measure; None measures all GPUs.

    Raises:
      RunError: nvidia-ml-py is not installed, there is no driver, or the GPUs have no counter.
    """

    method: Method = "counter"

    def __init__(self, visible: Sequence[int] | None = None) -> None:
        try:
            import pynvml  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise RunError("nvidia-ml-py is not installed: pip install 'jaxdist[energy]'") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            numbers = range(pynvml.nvmlDeviceGetCount()) if visible is None else visible
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
            self._begun = self._counted()
        except pynvml.NVMLError as error:
            raise RunError(
                f"NVML cannot count energy here: {error}; set energy.meter to model, or to none"
            ) from error
        if not self._gpus:
            raise RunError("NVML finds no GPU: set energy.meter to rapl, model or none")
        self.name = f"NVML ({len(self._gpus)} GPUs)" if len(self._gpus) > 1 else "NVML (1 GPU)"

    def joules(self) -> float:
        """Return the joules since the meter was opened; see `Meter`."""
        return 1e-3 * (self._counted() - self._begun)

    def _counted(self) -> int:
        return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus)


class Modelled:
    """A model of energy: busy power times the time in steps, plus idle power times all other time.

    Args:
      power: the power of a device.
      devices: the number of devices on all hosts.
      seconds: the function that returns the seconds since the beginning, and the seconds in steps.
    """

    method: Method = "model"

    def __init__(
        self, power: Power, devices: int, seconds: Callable[[], tuple[float, float]]
    ) -> None:
        self._power, self._devices, self._seconds = power, devices, seconds
        self.name = f"{devices} x {power.most:g} W, {power.source}"

    def joules(self) -> float:
        """Return the joules since the beginning; see `Meter`."""
        wall, work = self._seconds()
        idle = self._power.watts(0.0) * (wall - work)
        return self._devices * (self._power.watts(1.0) * work + idle)


def visible_gpus(environment: Mapping[str, str]) -> list[int] | None:
    """Return the GPU numbers in CUDA_VISIBLE_DEVICES, or None if the variable has other contents.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}), visible_gpus({})
    ([2, 3], None)
    """
    parts = [part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else None


def open_meter(
    kind: str,
    platform: str,
    power: Power | None,
    devices: int,
    seconds: Callable[[], tuple[float, float]],
) -> Meter | str:
    """Open the meter that a config requests, or return the reason why there is no meter.

    The kind "auto" opens the counters of the platform or, if there are none, the model.

    Args:
      kind: the name of the meter, as in `EnergyConfig.meter`.
      platform: the platform of the computation: "cpu", "gpu" or "tpu".
      power: the power of a device, or None if it is unknown.
      devices: the number of devices on all hosts.
      seconds: the argument `seconds` of `Modelled`.

    Raises:
      RunError: the meter was requested by name and is not available.
    """
    if kind == "none":
        return "energy.meter is none"
    counters: dict[str, Callable[[], Meter]] = {
        "rapl": Rapl,
        "nvml": lambda: Nvml(visible_gpus(os.environ)),
    }
    if kind in counters:
        return counters[kind]()
    why = "a TPU has no energy counter that can be read"
    name = {"cpu": "rapl", "gpu": "nvml"}.get(platform)
    if kind == "auto" and name is not None:
        try:
            return counters[name]()
        except RunError:
            why = f"this user can read no {name} counters on this machine"
    if power is not None:
        return Modelled(power, devices, seconds)
    if kind == "model":
        raise RunError("the power of this device is not published: set energy.watts")
    return f"{why}, and the power of this device is not known (set energy.watts)"


def _counts(zone: Path) -> bool:
    """Return whether a zone is a package or memory, and has a counter that this user may read."""
    try:
        name = (zone / "name").read_text().strip()
        _number(zone / "energy_uj")
    except (OSError, ValueError):
        return False
    return name.startswith("package") or name == "dram"


def _number(path: Path) -> int:
    return int(path.read_text())
