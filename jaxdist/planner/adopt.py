"""`jaxdist adopt`: the config that trains a downloaded model on a slice, made from config.json."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxdist.commands.import_model import config_values, synthetic_data
from jaxdist.config import plain_yaml
from jaxdist.errors import RunError, os_errors_as
from jaxdist.experiment import load
from jaxdist.inspect.times import show_seconds
from jaxdist.interchange.source import open_source
from jaxdist.planner.compare import energy_kwh
from jaxdist.planner.report import Asked, plan
from jaxdist.planner.target import parse_targets
from jaxdist.planner.write import write_config
from jaxdist.types import JsonObject

WINDOW = 4096
"""The largest number of tokens in a sequence."""
SEQUENCES = 4
"""The number of sequences in a step for each chip."""


def adopt(
    path: Path,
    on: str,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    top: int = 3,
    compiled: bool = True,
    console: Console,
) -> JsonObject:
    """Rank plans for training a model on a slice, and write the config of the best plan.

    Weights are not read, but the config names the path from which training will load them.

    Args:
      path: a directory with config.json, or a GGUF file.
      on: the slice, such as `v5e:16x16`.
      out: the file for the config.
      overrides: the settings that override the adopted config, such as `train.steps=100`.
      top: the number of plans to rank.
      compiled: whether to rank plans by their compiled programs, instead of by formulas.
      console: the console for the tables and the best plan.

    Returns:
      The file, the target, the energy of a billion tokens in kWh (None if unknown), and each plan
      with the seconds of a step, the bytes on a device, and whether its program was compiled.

    Raises:
      JaxdistError: the model is unknown, no plan fits in memory, or the file cannot be written.
    """
    source = open_source(path)
    chips = parse_targets([on])[0].chips
    values = _values(source, path, chips)
    document, _ = load(values, overrides)
    # The search needs only shapes. With the real data, the search would read and tokenize the text.
    stand_in: Any = {**document.values, "data": _stand_in(document.values["data"], source)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adopted.yaml"
        file.write_text(plain_yaml(stand_in), encoding="utf-8")
        (found,) = plan(file, [], Asked([on], top=top, compiled=compiled), console=console)
    if not found.top or found.refused:
        raise RunError(f"{path} on {on}: {found.why_not()}")
    with os_errors_as(RunError, f"{out} cannot be written", "choose another file with --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_config(document, found.top[0].plan, out)
    rows: list[JsonObject] = []
    for i, one in enumerate(found.top):
        known = found.confirmed[i] if found.confirmed else None
        seconds = one.seconds.total if known is None else known.seconds
        held = one.memory.total if known is None else known.peak_bytes
        row = {"plan": one.plan.words(), "seconds": seconds, "bytes": held}
        rows.append({**row, "compiled": known is not None})
    best: Any = rows[0]
    energy = energy_kwh(found, [found], load(stand_in)[1])
    words = "" if energy is None else f", {energy:,.0f} kWh for a billion tokens"
    console.print(f"best   {show_seconds(best['seconds'])} a step{words}", soft_wrap=True)
    console.print(f"config {out}", soft_wrap=True, markup=False)
    return {"file": str(out), "on": on, "plans": rows, "kwh": energy}


def _values(source: Any, path: Path, chips: int) -> Any:
    folder = path if path.is_dir() else path.parent
    values: Any = config_values(source, folder, begin_with=path.absolute())
    if "window" in values["data"] and source.family.kind == "gpt":
        length = source.config.get("max_position_embeddings") or source.config.get("n_positions")
        values["data"]["window"] = min(WINDOW, length or WINDOW)
    values["model"]["compute_dtype"] = "bfloat16"
    values["train"]["batch_size"] = SEQUENCES * chips
    return values


def _stand_in(data: Any, source: Any) -> JsonObject:
    """Return a section `data` for synthetic data, with the shapes of the text in a section `data`.

    A section for other data than text is unchanged.

    Args:
      data: the section `data`.
      source: the model whose vocabulary the synthetic data has.
    """
    if data["type"] != "text":
        return data
    return {**synthetic_data(source), "window": data["window"]}
