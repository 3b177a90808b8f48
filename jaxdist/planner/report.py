"""`jaxdist plan`: the best plans of a config on each target, as tables, JSON and a config."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdist.columns import table
from jaxdist.config import Document
from jaxdist.config.importing import foreign_code
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, load
from jaxdist.inspect.rows import show_bytes
from jaxdist.inspect.times import show_seconds
from jaxdist.metrics.report import write_json
from jaxdist.planner.compare import energy_kwh, print_comparison
from jaxdist.planner.confirm import Confirmed, confirm, lay_out
from jaxdist.planner.explain import draw_plan, energy_lines, print_explained
from jaxdist.planner.model import Decoder
from jaxdist.planner.result import Result, first_numbers, in_order, numbered
from jaxdist.planner.search import Judged, Model, best, model_of, search
from jaxdist.planner.target import Target, parse_targets
from jaxdist.planner.write import write_config
from jaxdist.types import JsonObject

ANALYTIC_ONLY = (
    "The ranking uses only formulas: programs for a GPU cannot be compiled without the GPU, and "
    "its compiler estimates no time."
)

ROUGH = (
    "The ranking is rough, and covers only the data axis: the formulas describe the layers of gpt, "
    "but for other models they use only what the trace of a step shows. For TPUs, --memory and "
    "--compile ask the compiler."
)

TOGETHER = 2
"""The number of programs that are compiled at the same time. XLA uses all cores only while it
generates code; meanwhile the other program is traced, optimized or read."""


@dataclass(frozen=True)
class Asked:
    """The options of `jaxdist plan`.

    Attributes:
      on: the targets to search, which are TPU slices or hosts of GPUs.
      slices: the number of slices of each target whose text does not state a number.
      top: the number of plans to print for each target.
      explain: the number of the plan to explain, or None to explain none. Plans that are not
        printed have numbers too, after the printed plans.
      compiled: whether to compile the printed plans.
      write: a file for the config with the best plan, or None to write none.
      plot: a directory for the picture of the explained plan, or None to draw none.
      json_file: a file for the results as JSON, or None to write none.
      laid_out: whether to ask the compiler only for the memory of the printed plans.
    """

    on: Sequence[str]
    slices: int = 1
    top: int = 5
    explain: int | None = None
    compiled: bool = False
    write: Path | None = None
    plot: Path | None = None
    json_file: Path | None = None
    laid_out: bool = False


def plan(
    path: Path, overrides: Sequence[str], asked: Asked, *, console: Console
) -> tuple[Result, ...]:
    """Search plans for each target, print the best plans, and return the results.

    If the options ask for it, the function also compiles the best plans and writes files.

    Args:
      path: the configuration file, to which `overrides` are applied.
      asked: the options of the command.
      console: the console for the tables.

    Returns:
      A result for each target, the fastest target first.

    Raises:
      JaxdistError: the config or an option is invalid, no plan fits on any target, or a file cannot
        be written.
    """
    document, config = load(path, overrides)
    for text in foreign_code(document.values):
        console.print(f"code   {text}", soft_wrap=True, markup=False)
    targets = parse_targets(asked.on, asked.slices)
    model = model_of(config, document)
    for target in targets:
        if (asked.compiled or asked.laid_out) and not target.is_tpu:
            option = "--compile" if asked.compiled else "--memory"
            raise ConfigError(f"{option}: {target.words}: {ANALYTIC_ONLY}")
    if asked.plot is not None and asked.explain is None:
        raise ConfigError("--plot draws the plan that --explain N explains: add --explain N")
    results = in_order([_searched(model, target, asked.top) for target in targets])
    if asked.explain is not None:
        # An unknown number is refused here, before minutes of compiling.
        numbered(results, asked.explain)
    if asked.compiled or asked.laid_out:
        results = in_order([_confirmed(path, overrides, one, asked, console) for one in results])
    _print_results(results, config, console)
    if asked.explain is not None:
        _explain(results, config, asked.explain, asked.plot, console)
    if asked.write is not None:
        _write(document, results, asked.write, console)
    if asked.json_file is not None:
        write_json(asked.json_file, _to_json(results, config), what="plans")
    return results


def _searched(model: Model, target: Target, top: int) -> Result:
    begun = time.perf_counter()
    found = search(model, target)
    spent = time.perf_counter() - begun
    return Result(model, target, found, best(found, top), search_seconds=spent)


def _confirmed(
    path: Path, overrides: Sequence[str], result: Result, asked: Asked, console: Console
) -> Result:
    """Return a target's result with the compiler's numbers, sorted by time.

    The plans that the compiler refuses come last.
    """

    def asked_for(one: Judged) -> tuple[Judged, Confirmed]:
        if asked.compiled:
            known = confirm(path, overrides, one.plan, result.target, one.seconds.slow)
            said = show_seconds(known.seconds)
        else:
            known = lay_out(path, overrides, one.plan, result.target, one.seconds.total)
            said = show_bytes(known.peak_bytes)
        said = "refused" if known.refusal else said
        console.print(f"compiled: {escape(one.plan.words())}: {said}", style="dim", soft_wrap=True)
        return one, known

    with ThreadPoolExecutor(TOGETHER if asked.compiled else 1) as pool:
        pairs = list(pool.map(asked_for, result.top))
    pairs.sort(key=lambda pair: (bool(pair[1].refusal), pair[1].seconds))
    return replace(
        result,
        top=tuple(one for one, _ in pairs),
        confirmed=tuple(known for _, known in pairs),
    )


def _write(document: Document, results: Sequence[Result], path: Path, console: Console) -> None:
    first = results[0]
    if first.refused:
        printed = sum(len(one.top) for one in results)
        raise ConfigError(
            f"--write: the compiler refuses all {printed} printed plans, so no plan is written; "
            f"compile more plans: --top {2 * len(first.top)}"
        )
    write_config(document, first.top[0].plan, path)
    where = f", on {first.target.words}," if len(results) > 1 else ""
    console.print(f"The first plan{escape(where)} is in {escape(str(path))}.", soft_wrap=True)


def _print_results(results: Sequence[Result], config: ExperimentConfig, console: Console) -> None:
    """Print the model, each target's plans, and a comparison if there are several targets."""
    model = results[0].model
    _line("model", f"{config.model.type}, {model.parameters:,} parameters", console)
    if len(results) == 1:
        _print_result(results[0], 1, console, model.step_words)
        return
    _line("step", model.step_words, console)
    console.print()
    print_comparison(results, config, console)
    for one, first in zip(results, first_numbers(results), strict=True):
        if one.top:
            console.print()
            _print_result(one, first, console)


def _print_result(result: Result, first: int, console: Console, step: str = "") -> None:
    """Print a target's plans, and the number of refused plans for each reason.

    Args:
      result: the result of the target.
      first: the number of the target's first plan.
      console: the console that prints the plans.
      step: the amount of data in a step as text, or an empty string to leave it out.
    """
    target, found = result.target, result.found
    devices = f", {target.devices:,} devices" if target.per_chip > 1 else ""
    _line("chips", f"{target.chips:,}: {target.words}{devices}", console)
    if step:
        _line("step", step, console)
    counts = (
        f"{found.count:,} plans in {result.search_seconds:.1f} s, {len(found.valid):,} possible"
    )
    _line("search", counts, console)
    console.print()
    console.print(_plans(result, first))
    if isinstance(result.model, Decoder):
        console.print("MFU counts half of the FLOPs of causal attention.", style="dim")
    else:
        console.print(ROUGH, style="dim", soft_wrap=True)
    if not target.is_tpu:
        console.print(ANALYTIC_ONLY, style="dim", soft_wrap=True)
    for one in result.confirmed:
        if one.note:
            console.print(escape(one.note), style="dim", soft_wrap=True)
            break
    if found.refused:
        console.print()
        refused = table("Plans refused", "reason", "plans")
        for why, count in found.refused.items():
            refused.add_row(escape(why), f"{count:,}")
        console.print(refused)


def _line(name: str, text: str, console: Console) -> None:
    console.print(f"{name:<7}{text}", soft_wrap=True, markup=False)


def _plans(result: Result, first: int) -> Table:
    columns = ["", "plan", "step", "MFU", "memory"]
    if result.confirmed:
        columns += ["compiled"] if result.confirmed[0].laid_out else ["compiled", "memory"]
    made = table("Predicted plans", *columns, left=(0, 1))
    for number, one in enumerate(result.top):
        row = [
            str(first + number),
            escape(one.plan.words()),
            show_seconds(one.seconds.total),
            f"{one.mfu(result.model, result.target, masked=False):.1%}",
            show_bytes(one.memory.total),
        ]
        if result.confirmed:
            row += _said(result.confirmed[number])
        made.add_row(*row)
    return made


def _said(known: Confirmed) -> list[str]:
    """Return the compiler's numbers for a plan, which fill the last columns of the table."""
    said = [] if known.laid_out else ["refused" if known.refusal else show_seconds(known.seconds)]
    if known.refusal:
        return [*said, "" if said else "refused"]
    return [*said, show_bytes(known.peak_bytes)]


def _explain(
    results: Sequence[Result],
    config: ExperimentConfig,
    number: int,
    plot: Path | None,
    console: Console,
) -> None:
    result, one = numbered(results, number)
    print_explained(number, one, result.model, result.target, console)
    for line in energy_lines(one, result.model, result.target, config):
        console.print(line, style="dim", soft_wrap=True)
    if plot is not None:
        console.print(f"drawn in {escape(str(draw_plan(one, plot)))}", soft_wrap=True)


def _to_json(results: Sequence[Result], config: ExperimentConfig) -> JsonObject:
    """Return everything that the tables of the plans show, as JSON values."""
    model = results[0].model
    return {
        "parameters": model.parameters,
        "tokens": model.tokens,
        "targets": [
            _target_json(one, first) | _first_json(one, results, config)
            for one, first in zip(results, first_numbers(results), strict=True)
        ],
    }


def _first_json(one: Result, results: Sequence[Result], config: ExperimentConfig) -> JsonObject:
    """Return the cost of a billion tokens with a target's first plan, as JSON values.

    If no plan fits in memory, the key "nothing" has the reason.
    """
    if not one.top:
        return {"chip_hours": None, "kwh": None, "nothing": one.why_not()}
    hours = None if one.refused else one.chip_hours
    return {"chip_hours": hours, "kwh": energy_kwh(one, results, config), "nothing": None}


def _target_json(result: Result, first: int) -> JsonObject:
    model, target = result.model, result.target
    plans = []
    for index, one in enumerate(result.top):
        plans.append({
            "number": first + index,
            "plan": one.plan.words(),
            "settings": one.plan.settings(),
            "seconds": {"total": one.seconds.total, **one.seconds.parts()},
            "memory_bytes": {"total": one.memory.total, **one.memory.parts()},
            "host_bytes": one.memory.host,
            "mfu": one.mfu(model, target, masked=True),
            "mfu_causal": one.mfu(model, target, masked=False),
            "compiled": asdict(result.confirmed[index]) if result.confirmed else None,
        })  # fmt: skip
    return {
        "target": {
            "text": target.words,
            "chips": target.chips,
            "devices": target.devices,
            "device": target.device.name,
        },
        "search_seconds": result.search_seconds,
        "plans_seen": result.found.count,
        "plans_that_fit": len(result.found.valid),
        "refused": dict(result.found.refused),
        "plans": plans,
    }
