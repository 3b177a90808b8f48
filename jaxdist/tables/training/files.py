"""The checkpoints of tables: the touched rows of each server, for any number of servers.

RUN/tables/server_0/step_00000500/     see `jaxdist.checkpoint.layout`
    arrays/000000.bin                  row numbers, uint32
    arrays/000001.bin                  values and optimizer state, float32
    metadata.json                      number of servers, and what the rows are
    manifest.json                      shapes, dtypes, sizes and digests
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint import layout as names
from jaxdist.checkpoint.manifest import DamageError, check_files, read_manifest, seal
from jaxdist.checkpoint.structure import describe_arrays
from jaxdist.config.files import read_json
from jaxdist.errors import CheckpointError
from jaxdist.types import JsonObject

FOLDER = "tables"
KEPT = 2
"""The number of newest steps that are never deleted, since their checkpoints may not be on disk
yet."""


def _directory(run: Path, server: int) -> Path:
    return run / FOLDER / f"server_{server}"


def write_tables(
    run: Path, server: int, step: int, about: JsonObject, rows: np.ndarray, values: np.ndarray
) -> None:
    """Write, digest and commit the rows of a server.

    Args:
      about: the description of the rows, which a reader's description must match, and the number of
        servers.

    Raises:
      CheckpointError: the files cannot be written.
    """
    directory = _directory(run, server)
    staging = names.staging_directory(directory, step)
    try:
        shutil.rmtree(staging, ignore_errors=True)  # A crash may have left a part.
        (staging / names.ARRAYS).mkdir(parents=True)
        for number, leaf in enumerate((rows, values)):
            leaf.tofile(staging / names.ARRAYS / f"{number:06d}.bin")
        (staging / names.METADATA).write_text(json.dumps(about), encoding="utf-8")
        leaves = describe_arrays({"rows": rows, "values": values})
        seal(staging, step=step, metric=None, leaves=leaves)
        names.commit(staging, names.step_directory(directory, step))
    except OSError as error:
        raise CheckpointError(
            f"the tables of server {server} cannot be saved in {directory}: "
            f"{error.strerror or error}; free some space, then resume the run"
        ) from error


def read_tables(run: Path, step: int, about: JsonObject) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield row numbers and values from each server that saved a step, even if it no longer runs.

    Args:
      about: the description of the tables, which the files must match.

    Raises:
      CheckpointError: tables of this step are missing, damaged, or of another form.
    """
    count = 1
    server = 0
    while server < count:
        path = names.step_directory(_directory(run, server), step)
        try:
            check_files(path, read_manifest(path))
            found: Any = read_json(path / names.METADATA)
            count = int(found.pop("servers"))
        except (DamageError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the tables of step {step} in {path} cannot be trusted: {error}; resume from a "
                "step whose tables are whole (jaxdist train with a copy of the run)"
            ) from error
        wrong = [name for name, value in about.items() if found.get(name) != value]
        if wrong:
            told = ", ".join(f"{one} {found.get(one)} there, {about[one]} here" for one in wrong)
            raise CheckpointError(f"{path} holds other tables: {told}")
        rows = np.fromfile(path / names.ARRAYS / "000000.bin", np.uint32)
        values = np.fromfile(path / names.ARRAYS / "000001.bin", np.float32)
        yield rows, values.reshape(len(rows), -1)
        server += 1


def prune_tables(run: Path, kept: Sequence[int]) -> None:
    """Delete the tables of all steps except those in `kept` and the newest `KEPT` steps."""
    for directory in (run / FOLDER).glob("server_*"):
        steps = names.steps_present(directory)
        for step in set(steps) - set(kept) - {*sorted(steps)[-KEPT:]}:
            names.delete(names.step_directory(directory, step))
