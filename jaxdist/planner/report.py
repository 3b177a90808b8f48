"""`jaxdist plan`: the best plans of a config on a target, as tables, as JSON and as a config."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, load
from jaxdist.inspect.rows import show_bytes
from jaxdist.inspect.tables import table
from jaxdist.inspect.times import show_seconds
from jaxdist.metrics.report import write_json
from jaxdist.planner.confirm import Confirmed, confirm
from jaxdist.planner.explain import draw, energy_lines, print_explained
from jaxdist.planner.model import Decoder, decoder_of
from jaxdist.planner.search import Found, Judged, best, judged_of, no_plan, search
from jaxdist.planner.target import Target, parse_target
from jaxdist.planner.write import write_config
from jaxdist.types import JsonObject

ANALYTIC_ONLY = (
    "By formulas only: GPU programs are not compiled without the GPU, and their compiler estimates "
    "no time."
)


@dataclass(frozen=True)
class Asked:
    """What the command was asked for.

    Attributes:
      on: a slice, or hosts of GPUs.
      top: how many plans to print.
      explain: the number of one of them, or of the plans after them.
      compiled: whether to compile those that are printed.
      write: a file for CONFIG with the best plan.
      plot: a directory for the picture of what is explained.
    """

    on: str
    slices: int = 1
    top: int = 5
    explain: int | None = None
    compiled: bool = False
    write: Path | None = None
    plot: Path | None = None
    json_file: Path | None = None


@dataclass(frozen=True)
class Result:
    """What was found.

    Attributes:
      confirmed: of the plans printed, what their compiled programs say; in the same order.
      search_seconds: of the search alone.
    """

    model: Decoder
    target: Target
    found: Found
    top: tuple[Judged, ...]
    confirmed: tuple[Confirmed, ...]
    search_seconds: float


def plan(path: Path, overrides: Sequence[str], asked: Asked, *, console: Console) -> Result:
    """Search, compile where asked, and print.

    Args:
      path: the configuration file, with `overrides` on top.

    Raises:
      JaxdistError: no plan is valid, or anything else that the user can mend.
    """
    document, config = load(path, overrides)
    target = parse_target(asked.on, asked.slices)
    model = decoder_of(config, document)
    if asked.compiled and not target.is_tpu:
        raise ConfigError(f"--compile: {target.words}: {ANALYTIC_ONLY}")
    if asked.plot is not None and asked.explain is None:
        raise ConfigError("--plot draws what --explain N says: give both")
    begun = time.perf_counter()
    found = search(model, target)
    spent = time.perf_counter() - begun
    if not found.valid:
        raise no_plan(model, target, found)
    result = _confirmed(path, overrides, asked, Result(
        model, target, found, best(found, asked.top), (), spent
    ), console)  # fmt: skip
    print_result(result, config, console)
    if asked.explain is not None:
        _explain(result, config, asked.explain, asked.plot, console)
    if asked.write is not None:
        if result.confirmed and result.confirmed[0].refusal:
            raise ConfigError(
                f"--write: the compiler refuses all {len(result.top)} plans printed, so that none "
                f"is written; compile more of them: --top {2 * len(result.top)}"
            )
        write_config(document, result.top[0].plan, asked.write)
        console.print(f"The first plan is in {escape(str(asked.write))}.", soft_wrap=True)
    if asked.json_file is not None:
        write_json(asked.json_file, to_json(result), what="plans")
    return result


def _confirmed(
    path: Path, overrides: Sequence[str], asked: Asked, result: Result, console: Console
) -> Result:
    """The same with the plans compiled and in their order, where that is asked for."""
    if not asked.compiled:
        return result
    pairs = []
    for one in result.top:
        known = confirm(path, overrides, one.plan, result.target, one.seconds.slow)
        said = "refused" if known.refusal else show_seconds(known.seconds)
        console.print(f"compiled: {escape(one.plan.words())}: {said}", style="dim", soft_wrap=True)
        pairs.append((one, known))
    pairs.sort(key=lambda pair: (bool(pair[1].refusal), pair[1].seconds))
    top, confirmed = zip(*pairs, strict=True)
    return Result(result.model, result.target, result.found, top, confirmed, result.search_seconds)


def print_result(result: Result, config: ExperimentConfig, console: Console) -> None:
    """The head, the plans, and how many were refused for what."""
    model, target, found = result.model, result.target, result.found
    for name, text in (
        ("model", f"{config.model.type}, {model.parameters:,} parameters"),
        ("chips", f"{target.chips:,}: {target.words}"),
        ("step", f"{model.batch:,} sequences of {model.window:,}: {model.tokens:,} tokens"),
        ("search", f"{found.count:,} plans in {result.search_seconds:.1f} s, "
                   f"{len(found.valid):,} fit"),
    ):  # fmt: skip
        console.print(f"{name:<7}{text}", soft_wrap=True, markup=False)
    console.print()
    console.print(_plans(result))
    console.print("MFU with causal attention counted half.", style="dim")
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


def _plans(result: Result) -> Table:
    columns = ["", "plan", "step", "MFU", "memory"]
    if result.confirmed:
        columns += ["compiled", "memory"]
    made = table("Predicted plans", *columns)
    made.columns[1].justify = "left"
    for number, one in enumerate(result.top):
        row = [
            str(number + 1),
            escape(one.plan.words()),
            show_seconds(one.seconds.total),
            f"{one.mfu(result.model, result.target, masked=False):.1%}",
            show_bytes(one.memory.total),
        ]
        if result.confirmed:
            known = result.confirmed[number]
            row += (
                ["refused", ""]
                if known.refusal
                else [show_seconds(known.seconds), show_bytes(known.peak_bytes)]
            )
        made.add_row(*row)
    return made


def _explain(
    result: Result, config: ExperimentConfig, number: int, plot: Path | None, console: Console
) -> None:
    one = judged_of(result.found, result.top, number)
    print_explained(number, one, result.model, result.target, console)
    for line in energy_lines(one, result.model, result.target, config):
        console.print(line, style="dim", soft_wrap=True)
    if plot is not None:
        console.print(f"drawn in {escape(str(draw(one, plot)))}", soft_wrap=True)


def to_json(result: Result) -> JsonObject:
    """Everything that the tables show, as plain data."""
    model, target = result.model, result.target
    plans = []
    for number, one in enumerate(result.top):
        plans.append({
            "plan": one.plan.words(),
            "settings": one.plan.settings(),
            "seconds": {"total": one.seconds.total, **one.seconds.parts()},
            "memory_bytes": {"total": one.memory.total, **one.memory.parts()},
            "mfu": one.mfu(model, target, masked=True),
            "mfu_causal": one.mfu(model, target, masked=False),
            "compiled": asdict(result.confirmed[number]) if result.confirmed else None,
        })  # fmt: skip
    return {
        "parameters": model.parameters,
        "target": {"text": target.words, "chips": target.chips, "device": target.device.name},
        "search_seconds": result.search_seconds,
        "plans_seen": result.found.count,
        "plans_that_fit": len(result.found.valid),
        "refused": dict(result.found.refused),
        "plans": plans,
    }
