"""The output of a run of draws: lines for a console, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.draws.model import Sections, has_batch_norm, model_key
from benchmarks.draws.run import DrawOutcome
from benchmarks.draws.sections import mesh_axis_size, stage_count
from benchmarks.draws.settings import SETTINGS
from jaxdist.config import plain_yaml
from jaxdist.mesh import AXES
from jaxdist.metrics.report import PACKAGES
from jaxdist.parity.run import COMMON
from jaxdist.parity.trace import STEPS, Differences
from jaxdist.runtime import environment
from jaxdist.types import Json, JsonObject

HEADER = f"{'seed':>6} {'verdict':<9}{'loss':>8}{'grad':>8}{'update':>8}  {'loaded':<8} what"
"""The line of column names above the lines of `draw_line`."""


def draw_line(outcome: DrawOutcome) -> str:
    """Return the lines for an outcome: the verdict, both plans, and the reason if there is any."""
    sections, found = outcome.sections, outcome.differences
    values = asdict(found).values() if found else ()
    numbers = "".join(f"{value:>8.1e}" for value in values) or " " * 24
    what = f"{model_key(sections['model'])} {sections['optim']['type']}"
    text = f"{outcome.seed:>6} {outcome.verdict:<9}{numbers}  {outcome.checkpoint:<8} {what}"
    own = [text.rstrip(), plan_text(sections), f"loaded by {plan_text(outcome.reader)}"]
    return "\n       ".join([*own, *([outcome.reason] if outcome.reason else [])])


def mesh_text(mesh: Mapping[str, Json]) -> str:
    """Return the axes of a section `mesh` and their sizes as text, in the section's order.

    >>> mesh_text({"tensor": 2, "data": {"dcn": 2, "ici": 1}, "fake_devices": 4})
    'tensor 2, data 2 dcn x 1 ici'
    """
    sizes = {name: size for name, size in mesh.items() if name in AXES}
    return ", ".join(
        f"{name} {size}"
        if isinstance(size, int)
        else f"{name} {size['dcn']} dcn x {size['ici']} ici"
        for name, size in sizes.items()
    )


def plan_text(sections: Sections) -> str:
    """Return a text with a config's mesh and its drawn settings that differ from the defaults."""
    features = features_of(sections)
    shown = ("ZeRO", "reduce", "messages", "microbatches", "schedule")
    plan = [f"{name} {features[name]}" for name in shown if features[name] not in ("none", "1")]
    values = {name: setting.text(sections) for name, setting in SETTINGS.items()}
    plan += [
        name if value == "yes" else f"{name} {value}"
        for name, value in values.items()
        if value not in ("no", "plain")
    ]
    return "; ".join([mesh_text(sections["mesh"]), *plan])


def features_of(sections: Sections) -> dict[str, str]:
    """Return the value of each drawn feature of a config, by the feature's name on the page.

    The value of an absent feature is "no" or "none".
    """
    parallel, mesh = sections["parallel"], sections["mesh"]
    zero, pipeline = parallel["zero"], parallel.get("pipeline")
    scope = ", ici" if zero["scope"] == "ici" else ""
    model = sections["model"]
    remat = model.get("remat", "none")
    layers = model.get("args", model).get("layers")
    uneven = pipeline and layers and (layers % stage_count(sections) or "layers" in pipeline)
    return {
        "model": model_key(model),
        "BatchNorm": "yes" if has_batch_norm(model) else "no",
        "optimizer": sections["optim"]["type"],
        "devices": str(mesh["fake_devices"]),
        "axes": " x ".join(name for name in AXES if mesh_axis_size(mesh, name) > 1) or "none",
        "attention over context": _shared(sections, "context"),
        "order over context": _shared(sections, "context_order"),
        "data over two networks": "yes" if isinstance(mesh.get("data"), dict) else "no",
        "ZeRO": f"{zero['stage']}{scope}" if zero["stage"] else "none",
        "whole_below": str(zero["whole_below"]) if zero["stage"] else "none",
        "reduce": parallel["reduce"]["type"] if parallel["reduce"] else "none",
        "messages": _messages(parallel.get("compression")),
        "microbatches": str(sections["train"]["microbatches"]),
        "remat": remat if isinstance(remat, str) else "some",
        "sharding rules": ", ".join(
            f"{dim}: {axis or 'null'}" for dim, axis in sections["sharding"]["rules"].items()
        ) or "none",
        "schedule": pipeline["schedule"]["type"] if pipeline else "none",
        "activations": pipeline["activations"] if pipeline else "none",
        "gathers of stages": pipeline.get("gather", "none") if pipeline else "none",
        "uneven layers": "yes" if uneven else "no",
        **{name: setting.text(sections) for name, setting in SETTINGS.items()},
    }  # fmt: skip


def _shared(sections: Sections, setting: str) -> str:
    shares = mesh_axis_size(sections["mesh"], "context") > 1
    return sections["sharding"].get(setting, "auto") if shares else "none"


def _messages(compression: Mapping[str, Json] | None) -> str:
    return f"{compression['type']}, {compression['axis']}" if compression else "none"


def failure_text(outcome: DrawOutcome, file: Path) -> str:
    """Return a text with the commands and configs that reproduce a draw.

    Args:
      outcome: the outcome of the draw.
      file: the file to which the draw's config was written.
    """
    # The config may import models of `benchmarks`, which Python finds only in a checkout.
    again = [
        f"jaxdist parity --draw 1 --seed {outcome.seed}",
        f"PYTHONPATH={CHECKOUT} jaxdist train {file}",
    ]
    text = [*(f"  {command}" for command in again), "", plain_yaml(outcome.sections)]
    if outcome.checkpoint == "differs":
        text += [
            "# The draw's checkpoint is loaded with this second config:",
            plain_yaml(outcome.reader),
        ]
    return "\n".join(text)


def draw_verdict(outcomes: Sequence[DrawOutcome]) -> str:
    """Return a line with the number of draws for each verdict, and a line about checkpoints.

    The second line has the number of checkpoints for each result of loading.
    """
    counts = Counter(outcome.verdict for outcome in outcomes)
    kinds = ("equal", "refused", "differs", "failed")
    loaded = Counter(outcome.checkpoint for outcome in outcomes)
    lines = [
        ", ".join(f"{counts[kind]} {kind}" for kind in kinds),
        f"checkpoints loaded by another plan: {loaded['equal']} equal to the bit, "
        f"{loaded['refused']} refused, {loaded['differs']} differ",
    ]
    return "\n".join(lines)


def outcomes_to_json(
    outcomes: Sequence[DrawOutcome], *, count: int, seed: int, axes: Sequence[str] = ()
) -> JsonObject:
    """Return a report of all outcomes as JSON values.

    Args:
      outcomes: the outcomes until now.
      count, seed: the number of draws of the complete run, and the seed of the first draw.
      axes: the names of mesh axes that select draws; see `seeds_of`.
    """
    return {
        "count": count,
        "seed": seed,
        "axes": [*axes],
        "steps": STEPS,
        "versions": environment.versions(PACKAGES),
        "draws": [_row(outcome) for outcome in outcomes],
    }


def _row(outcome: DrawOutcome) -> JsonObject:
    """Return an outcome as JSON values.

    The `reader` of the result lacks each section in `COMMON` that is equal in both configs of the
    outcome. If only `sections` has a section in `COMMON`, this section of the `reader` is None.
    """
    row = asdict(outcome)
    sections, reader = row["sections"], row["reader"]
    shared = {name for name in COMMON if sections.get(name) == reader.get(name)}
    own = [*reader, *(name for name in COMMON if name in sections and name not in reader)]
    row["reader"] = {name: reader.get(name) for name in own if name not in shared}
    return row


def outcomes_from_json(report: Mapping[str, Json]) -> list[DrawOutcome]:
    """Return the outcomes in a report that `outcomes_to_json` returned."""

    def outcome(row: Mapping[str, Json]) -> DrawOutcome:
        common: Sections = {
            name: row["sections"][name] for name in COMMON if name in row["sections"]
        }
        found = {name: row[name] and Differences(**row[name]) for name in ("differences", "limit")}
        reader = {n: own for n, own in {**common, **row["reader"]}.items() if own is not None}
        return DrawOutcome(**{**row, **found, "reader": reader})

    return [outcome(row) for row in report["draws"]]
