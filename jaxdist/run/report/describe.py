"""The lines that a run prints before its first step."""

from __future__ import annotations

from functools import partial

import jax
from rich.console import Console
from rich.markup import escape

from jaxdist.config import Document
from jaxdist.experiment import Experiment
from jaxdist.experiment.config import at_setting
from jaxdist.experiment.flops import model_flops
from jaxdist.metrics.account import Account, Activity
from jaxdist.metrics.energy.meters import open_meter
from jaxdist.metrics.energy.tally import Tally
from jaxdist.metrics.rates import Efficiency
from jaxdist.run.directory import RunDirectory
from jaxdist.runtime.hardware import find_device
from jaxdist.trees import tree_size


def efficiency_of(experiment: Experiment) -> Efficiency | None:
    """Return the measure of MFU, or None if the devices' peak in the model's dtype is unknown.

    The peak of a CPU is always unknown.
    """
    device, config = experiment.layout.mesh.local_devices[0], experiment.config
    known = find_device(device.device_kind) if device.platform != "cpu" else None
    dtype = getattr(config.model, "compute_dtype", "float32")
    if known is None or dtype not in known.flops_per_second:
        return None
    return Efficiency(
        experiment.unit,
        model_flops(config, device) / experiment.units_per_step,
        experiment.layout.mesh.devices.size,
        known.flops_per_second[dtype],
    )


def tally_of(experiment: Experiment, document: Document, account: Account) -> Tally | str:
    """Return a tally of the run's energy that starts now, or the reason why there is no tally.

    Raises:
      ConfigError: the meter in the config is not available.
    """
    if jax.process_index() != 0:
        return "process 0 measures"
    config, mesh = experiment.config.energy, experiment.layout.mesh
    device = mesh.local_devices[0]
    known = find_device(device.device_kind)
    begun = account.spent()

    def seconds() -> tuple[float, float]:
        spent = account.spent()
        since = {kind: 1e-9 * (spent[kind] - begun[kind]) for kind in Activity}
        return sum(since.values()), since[Activity.STEP]

    power = config.power_of(None if known is None else known.name)
    with at_setting(document, "energy", "meter"):
        found = open_meter(config.meter, device.platform, power, mesh.devices.size, seconds)
    if isinstance(found, str):
        return found
    unit = "tokens" if experiment.unit == "tokens" else "examples"
    return Tally(found, config.site, unit, experiment.units_per_step)


def describe(
    experiment: Experiment, directory: RunDirectory, tally: Tally | str, console: Console
) -> None:
    """Print the run's data, model, derived settings, mesh and energy meter."""
    program, config = experiment.program, experiment.config
    devices = experiment.layout.mesh.devices
    shape = ", ".join(f"{axis}: {size}" for axis, size in experiment.layout.mesh.shape.items())
    kind = devices.flat[0].device_kind
    sizes = [stage.batch_size * experiment.units_per_example for stage in experiment.stages]
    amount = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    say = partial(console.print, soft_wrap=True)
    say(f"data   {experiment.dataset.description}")
    say(
        f"model  {config.model.type}, {tree_size(program.model.params):,} parameters; "
        f"{config.optim.type}, {experiment.total_steps:,} steps of "
        f"{amount} {experiment.unit}",
    )
    for line in experiment.explained:
        say(f"plan   {line}")
    for notice in experiment.notices:
        say(f"[bold yellow]warning:[/] {escape(notice)}")
    say(f"mesh   {{{shape}}} on {devices.size} x {kind}")
    if isinstance(tally, Tally):
        say(f"energy {tally.described}", markup=False)
    say(f"run    {directory.path}")
