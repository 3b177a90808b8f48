"""A table that compares the speed and cost of the best plan on each of several targets."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from jaxdist.columns import table
from jaxdist.cost.energy import POWERS, Power
from jaxdist.experiment import ExperimentConfig
from jaxdist.inspect.rows import show_bytes
from jaxdist.inspect.times import show_seconds
from jaxdist.planner.explain import joules_of
from jaxdist.planner.result import Result, first_numbers
from jaxdist.planner.target import Target

OWN_WATTS = (
    "energy.watts describes a single type of chip, and is not used for several targets: use --on "
    "once."
)


def print_comparison(results: Sequence[Result], config: ExperimentConfig, console: Console) -> None:
    """Print a row for each target, and a line with the reason for each target without a plan.

    Args:
      results: the results of the targets, the fastest target first.
      config: the config, whose section `energy` gives the energy of a billion tokens.
      console: the console that prints the rows.
    """
    kwh = [energy_kwh(one, results, config) if one.top else None for one in results]
    columns = ["chips", "plan", "step", "MFU", "memory", "chip-hours"]
    columns += ["kWh"] if any(found is not None for found in kwh) else []
    made = table("The best plan of each", "target", *columns)
    for one, first, energy in zip(results, first_numbers(results), kwh, strict=True):
        if not one.top:
            continue
        row = [one.target.words, f"{one.target.chips:,}", str(first), *_figures(one)]
        if "kWh" in columns:
            row.append("" if energy is None else _show(energy))
        made.add_row(*map(escape, row))
    console.print(made)
    console.print(f"chip-hours and kWh of a billion {results[0].model.unit}", style="dim")
    if config.energy.watts is not None and len(_kinds(results)) > 1:
        console.print(OWN_WATTS, style="dim", soft_wrap=True)
    for one in results:
        if not one.top:
            console.print(escape(f"{one.target.words}: {one.why_not()}"), soft_wrap=True)


def _figures(one: Result) -> list[str]:
    """Return the step time, MFU, memory and chip-hours of a target's first plan, as text.

    The values are from the compiled program if there is one, or else from formulas. The first text
    is "refused" if the compiler refuses the plan.
    """
    if one.refused:
        return ["refused", "", "", ""]
    first = one.top[0]
    memory = one.confirmed[0].peak_bytes if one.confirmed else first.memory.total
    mfu = first.mfu(one.model, one.target, masked=False) * first.seconds.total / one.seconds
    return [
        show_seconds(one.seconds), f"{mfu:.1%}", show_bytes(memory), _show(one.chip_hours)
    ]  # fmt: skip


def _show(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def energy_kwh(one: Result, results: Sequence[Result], config: ExperimentConfig) -> float | None:
    """Return the energy that the site draws for a billion tokens with the first plan, in kWh.

    The result is None if the power of the device is unknown, or if the compiler refuses the plan.

    Args:
      one: the result of a target.
      results: the results of all targets. The power in the config is used only if all targets have
        the same kind of chip.
      config: the config, whose section `energy` describes the site.
    """
    power = _power_of(one.target, results, config)
    if power is None or one.refused:
        return None
    joules = joules_of(one.top[0], one.target, power)
    return config.energy.site.kwh(joules / one.model.tokens * 1e9)


def _power_of(target: Target, results: Sequence[Result], config: ExperimentConfig) -> Power | None:
    # The power in the config (`energy.watts`) belongs to a single kind of chip, so it is not used
    # if the results are for several kinds.
    if len(_kinds(results)) > 1:
        return POWERS.get(target.device.name)
    return config.energy.power_of(target.device.name)


def _kinds(results: Sequence[Result]) -> set[str]:
    return {one.target.device.name for one in results}
