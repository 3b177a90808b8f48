"""The export of a recommender: its dense parameters, and a tensor of rows for each table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint.restore import Restored
from jaxdist.errors import ConfigError, RunError, os_errors_as
from jaxdist.experiment import Experiment
from jaxdist.interchange import safetensors
from jaxdist.interchange.source import CONFIG, SINGLE
from jaxdist.interchange.write import DTYPES, check_free
from jaxdist.models.recommend.rows import RowForm
from jaxdist.models.recommend.tables import RecommenderConfig
from jaxdist.tables.keys import KEY, field_rows
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject

TABLE = "tables/rows"
PART = 2**20
"""The number of rows that are read at once."""
IDS = ".ids"
Read = Callable[[np.ndarray], np.ndarray]
Tensor = tuple[tuple[int, ...], Callable[[], np.ndarray]]
"""The shape of a tensor, and the function that returns its value."""


def export_recommender(
    experiment: Experiment, restored: Restored, run: Path, out: Path, dtype: str | None
) -> JsonObject:
    """Write the parameters of a recommender as safetensors, with its tables from mesh or servers.

    The tensor `tables.FIELD.weight` has the rows of a field in the order of its ids. If the ids
    have 64 bits, this tensor has the rows that exist, and the tensor `tables.FIELD.ids` has the ids
    of these rows, ascending.

    Args:
      dtype: the dtype of the tensors besides ids, or None for float32.

    Returns:
      The directory, the type of the model, the dtype, and the number of tensors.

    Raises:
      JaxdistError: the dtype is unknown, or tables or files cannot be read or written.
    """
    model, held = experiment.config.model, dtype or "float32"
    assert isinstance(model, RecommenderConfig)
    if held not in DTYPES:
        raise ConfigError(f"--dtype {held} is unknown: use one of {', '.join(DTYPES)}")
    program, state = experiment.program, restored.state
    params = program.model.merged(program.home.used.params(program.evaluated(state)))
    values = {name: np.asarray(leaf) for name, leaf in flatten_with_names(params)}
    form = model.form(experiment.dataset.fields or {})
    known = np.empty(0, KEY)
    if experiment.rows is None:
        table = values.pop(TABLE)
        read: Read = table.__getitem__
    else:
        # This module is imported here, since it needs packages that a plain install does not have.
        from jaxdist.tables.training.program import saved_rows

        strategy: Any = experiment.config.strategy
        store = saved_rows(run, restored.step, experiment.rows, strategy.optimizer)
        form, read = experiment.rows.form, store.read
        if form.most:
            known = store.kept()[0]
    found = {name.replace("/", "."): (x.shape, lambda x=x: x) for name, x in values.items()}
    found |= dict(table_tensors(form, known, read))
    settings: JsonObject = model.model_dump(mode="json")
    config: JsonObject = {"model_type": model.type, "model": settings, "fields": {**form.fields}}
    _write(out, {**config, "dtype": held}, found, DTYPES[held])
    return {"directory": str(out), "family": model.type, "dtype": held, "tensors": len(found)}


def _write(out: Path, config: JsonObject, tensors: Mapping[str, Tensor], dtype: np.dtype) -> None:
    """Write config.json and a file of tensors, in `dtype` or, for ids, in int64.

    Raises:
      RunError: the directory has files, or cannot be written.
    """
    check_free(out)
    entries = [
        (name, shape, np.dtype(np.int64) if name.endswith(IDS) else dtype)
        for name, (shape, _) in tensors.items()
    ]
    with os_errors_as(RunError, f"{out} cannot be written", "name another directory"):
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        safetensors.write(out / SINGLE, entries, lambda name: tensors[name][1]())


def table_tensors(form: RowForm, known: np.ndarray, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of tables by name, with its shape and a function that reads the value.

    Args:
      known: the keys of all rows that exist, for fields whose ids have 64 bits.
      read: the function from row numbers to values.
    """
    for at, (name, size) in enumerate(form.fields.items()):
        ids = np.arange(size, dtype=np.uint64)
        if not size:
            ids = np.sort(known["id"][known["field"] == at])
        rows = field_rows(form, at, ids)

        def weight(rows: np.ndarray = rows) -> np.ndarray:
            found = np.empty((len(rows), form.width), np.float32)
            for begin in range(0, len(rows), PART):
                found[begin : begin + PART] = read(rows[begin : begin + PART])
            return found

        if not size:
            yield f"tables.{name}{IDS}", (ids.shape, lambda ids=ids: ids.view(np.int64))
        yield f"tables.{name}.weight", ((len(rows), form.width), weight)
