"""The time, memory and energy of a plan, part by part, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from jaxdist.columns import table
from jaxdist.cost.energy import Power
from jaxdist.experiment import ExperimentConfig
from jaxdist.inspect.rows import show_bytes
from jaxdist.inspect.times import seconds_table, show_seconds
from jaxdist.metrics.figure import new_figure, save_figure
from jaxdist.planner.model import Decoder
from jaxdist.planner.search import SPARE, Judged, Model
from jaxdist.planner.target import Target


def print_explained(
    number: int, one: Judged, model: Model, target: Target, console: Console
) -> None:
    """Print the parts of a plan's time and memory, and the changes that would make the plan fit.

    Args:
      number: the number of the plan.
      one: the plan, with its memory and time.
      model: the model for which the plan was made.
      target: the chips.
      console: the console that prints the tables.
    """
    console.print()
    console.print(f"Plan {number}: {escape(one.plan.words())}", soft_wrap=True)
    console.print(seconds_table("Time of a step", one.seconds.parts(), one.seconds.total))
    console.print()
    limit = one.limit_bytes
    sizes = table(f"Memory of each {target.device.name}", "", "bytes", f"of {show_bytes(limit)}")
    for name, size in one.memory.parts().items():
        sizes.add_row(name, show_bytes(size), f"{size / limit:.1%}")
    sizes.add_row("all", show_bytes(one.memory.total), f"{one.memory.total / limit:.1%}")
    console.print(sizes)
    if one.memory.host:
        console.print(
            f"The host's memory holds {show_bytes(one.memory.host)} of the state of each device; a "
            f"step copies {show_bytes(one.memory.copied)} over the host's link.",
            soft_wrap=True,
        )
    for line in remedies(one, model):
        console.print(line, soft_wrap=True)


def remedies(one: Judged, model: Model) -> list[str]:
    """Return sentences on the changes that would make a plan fit in memory.

    The list is empty if the plan fits.
    """
    if one.fits:
        return []
    over = one.memory.total - (1 - SPARE) * one.limit_bytes
    lines = [
        f"The plan does not fit: it needs {show_bytes(over)} more than the memory (of which "
        f"{SPARE:.0%} must stay free)."
    ]
    plan, kept = one.plan, one.memory
    examples = "sequences" if model.unit == "tokens" else "examples"
    rows, known = model.batch // (plan.replicas * plan.microbatches), isinstance(model, Decoder)
    state = kept.parameters + kept.optimizer + kept.gradients
    if plan.zero < 3 and plan.stage == 1 and state > over:
        # With a single microbatch, ZeRO 2 also holds gradients that are not split (see
        # `jaxdist.planner.memory`), so ZeRO 3 is the next remedy.
        further = 3 if plan.zero == 1 and plan.microbatches == 1 else plan.zero + 1
        lines.append(f"ZeRO {further} splits more of the {show_bytes(state)} of state.")
    if rows > 1 and kept.activations + kept.working > over:
        lines.append(
            f"Use more microbatches: each microbatch now has {rows} {examples} on a device."
        )
    if plan.remat not in ("full", None) and kept.activations > over:
        lines.append(
            f"remat full keeps less than the present {show_bytes(kept.activations)} of activations."
        )
    if len(lines) == 1:
        axis = "a larger axis tensor, or " if known else ""
        factor = one.memory.total / ((1 - SPARE) * one.limit_bytes)
        lines.append(f"Use {axis}{factor:.1f} times as many chips.")
    return lines


def joules_of(one: Judged, target: Target, power: Power) -> float:
    """Return the energy that all chips together draw in a step, in joules."""
    waits = one.seconds
    idle = waits.data + waits.slow + waits.tensor + waits.bubble + waits.context + waits.expert
    return power.watts(1 - idle / waits.total) * target.devices * waits.total


def energy_lines(one: Judged, model: Model, target: Target, config: ExperimentConfig) -> list[str]:
    """Return lines with the predicted energy and carbon of a million tokens and of the run.

    There is no line for the run if the config gives its length in epochs. If the power of the
    device is unknown, the only line reports that.
    """
    power = config.energy.power_of(target.device.name)
    if power is None:
        return [f"Energy: the power of {target.device.name} is not published; set energy.watts."]
    site, joules = config.energy.site, joules_of(one, target, power)
    million = joules / model.tokens * 1e6
    lines = [
        f"Energy, predicted from power ({power.source}; PUE {site.pue:g}, {site.grid:g} g/kWh): "
        f"{site.kwh(million):.3g} kWh and {site.grams(million):.3g} g CO2e for a million "
        f"{model.unit}."
    ]
    if model.steps:
        run = joules * model.steps
        days = one.seconds.total * model.steps / 86400
        lines.append(
            f"The run of {model.steps:,} steps: {days:.3g} days, {site.kwh(run):,.3g} kWh, "
            f"{site.grams(run):,.3g} g CO2e."
        )
    return lines


_TIMES = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))
"""The units of time for pictures, as pairs of seconds and a name. A picture uses the first unit
that is not longer than the step."""


def draw_plan(one: Judged, directory: Path) -> Path:
    """Draw a plan's time and memory as stacked bars, and return the path of `plan.svg`.

    A line marks the chip's memory. A part has the same color in every plan's picture, and the two
    bars have no color in common. The legends state the numbers, since a part may be too small to
    see.
    """
    # Matplotlib is imported here because the import is slow, as in `new_figure`.
    from matplotlib import colormaps

    figure = new_figure((8.0, 3.8))
    time_unit, time_name = next((t for t in _TIMES if one.seconds.total >= t[0]), _TIMES[-1])
    bars: tuple[tuple[str, Mapping[str, float], float, str, Callable[[float], str]], ...] = (
        (f"{time_name} of a step", one.seconds.parts(), time_unit, "tab10", show_seconds),
        ("GB taken of a chip's memory", one.memory.parts(), 1e9, "Set3", show_bytes),
    )
    both = figure.subplots(2)
    limit = f"memory of a chip, {show_bytes(one.limit_bytes)}"
    both[1].axvline(one.limit_bytes / 1e9, color="black", linestyle="--", label=limit)
    for axes, (label, parts, unit, colours, shown) in zip(both, bars, strict=True):
        left = 0.0
        for (name, size), colour in zip(parts.items(), colormaps[colours](range(12)), strict=False):
            if size:
                told = f"{name}, {shown(size)}"
                axes.barh([0], [size / unit], left=left, label=told, color=colour)
                left += size / unit
        axes.set_yticks([])
        axes.set_xlabel(f"{label}, {shown(left * unit)} in all")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)
    figure.suptitle(one.plan.words(), fontsize=9)
    return save_figure(figure, directory, "plan", formats=("svg",), what="the plan")[0]
