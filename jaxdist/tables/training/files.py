"""The checkpoints of tables: the touched rows of each server, which any number of servers can load.

A checkpoint has only the rows that were updated since the previous checkpoint. If the rows of
successive checkpoints of this kind would add up to more than all rows, the checkpoint has all rows.
Reading a checkpoint takes at most twice the bytes of all rows.

RUN/tables/server_0/step_00000500/     see `jaxdist.checkpoint.layout`
    arrays/000000.bin                  row numbers, uint32, or keys (`jaxdist.tables.keys`)
    arrays/000001.bin                  values and optimizer state, float32
    metadata.json                      number of servers, what the rows are, and the earlier step
                                       to which these rows are added (base), or null
    manifest.json                      shapes, dtypes, sizes and digests
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from jaxdist.checkpoint import layout as names
from jaxdist.checkpoint.manifest import DamageError, check_files, read_manifest
from jaxdist.config.document import flat
from jaxdist.config.files import read_json
from jaxdist.errors import CheckpointError, some_of
from jaxdist.models.recommend.rows import RowForm
from jaxdist.param_server.training.files import write_arrays
from jaxdist.tables.batch import TableRows
from jaxdist.tables.keys import row_dtype
from jaxdist.tables.optimizer import RowOptimizer
from jaxdist.types import JsonObject

FOLDER = "tables"
MOST_LINKS = 16
"""The largest number of successive checkpoints that contain only the changed rows."""
KEPT = 2
"""The number of newest steps that are never deleted, since their checkpoints may not be on disk
yet."""
_LISTED = 3


def _directory(run: Path, server: int) -> Path:
    return run / FOLDER / f"server_{server}"


def write_tables(
    run: Path, server: int, step: int, about: JsonObject, rows: np.ndarray, values: np.ndarray
) -> None:
    """Write the rows of a server and the digests of the files, and commit the checkpoint.

    Args:
      run: the run directory.
      server: the number of the server, or of the range that it leads.
      step: the step of the checkpoint.
      about: the description of the rows, which a reader's description must match, and the number of
        servers.

    Raises:
      CheckpointError: the files cannot be written.
    """
    plain = rows.view(np.uint8).reshape(len(rows), -1) if rows.dtype.names else rows
    tree = {"rows": plain, "values": values}
    write_arrays(_directory(run, server), step, about, tree, f"the tables of server {server}")


class TableWriter:
    """A writer of the checkpoints of one server's rows.

    Args:
      server: the number of the server, or of the range that it leads.
      about: the description of the rows, with the number of servers.
      kept: the function that returns rows, as `jaxdist.tables.server.TableServer.kept` does.
    """

    def __init__(
        self,
        run: Path,
        server: int,
        about: JsonObject,
        kept: Callable[[int], tuple[bool, np.ndarray, np.ndarray]],
    ) -> None:
        self._run, self._server, self._about, self._kept = run, server, about, kept
        self._base: JsonObject | None = None
        self._room, self._links = -1, 0

    def write(self, step: int) -> None:
        """Write the rows of a step: all rows, or the rows that changed since the last written step.

        Raises:
          CheckpointError: the files cannot be written.
        """
        whole, rows, values = self._kept(self._room if self._links < MOST_LINKS else -1)
        base = None if whole else self._base
        own = {"id": token_hex(8)}
        about = {**self._about, **own, "base": base}
        write_tables(self._run, self._server, step, about, rows, values)
        self._room = len(rows) if whole else self._room - len(rows)
        self._links = 0 if whole else self._links + 1
        self._base = {**own, "step": step}


def about_tables(rows: TableRows, optimizer: RowOptimizer) -> JsonObject:
    """Return a description of the rows of a run, which the files of the rows must match."""
    settings = optimizer.model_dump(mode="json")
    form = {**dataclasses.asdict(rows.form), "fields": dict(rows.form.fields)}
    # The bound itself may change between runs, so it is not compared. But rows have keys only with
    # a bound, so both runs must have a bound, or neither.
    if form.pop("most"):
        form["keys"] = True
    state = {key: settings[key] for key in settings.keys() & {"type", "per"}}
    return {"form": form, "seed": rows.seed, "optimizer": state}


def form_of(about: JsonObject, most: int) -> RowForm:
    """Return the form of tables that `about_tables` describes, with a bound on their rows."""
    form: Any = about["form"]
    return RowForm(**{key: form[key] for key in form if key != "keys"}, most=most)


def _differences(path: Path, found: JsonObject, about: JsonObject) -> str | None:
    """Return how the tables in a file differ from the config's tables, or None if they agree.

    Args:
      path: the file, for the message.
      found: the description of the tables in the file.
      about: the description of the config's tables.
    """
    there, here = (flat(one) for one in (found, about))
    wrong = [
        f"{at} {there.get(at)} there, {here.get(at)} here"
        for at in {**here, **there}
        if at.split(".")[0] in about and there.get(at) != here.get(at)
    ]
    if not wrong:
        return None
    return (
        f"{path} contains other tables than the config: {some_of(wrong, _LISTED)}; resume "
        "with the configuration with which the run was started, or start a run in a new directory"
    )


def tables_problem(run: Path, step: int, about: JsonObject) -> str | None:
    """Return how the tables of a step differ from the config's tables, or None if they agree.

    Missing and damaged tables are not a difference: `read_tables` reports them.
    """
    path = names.step_directory(_directory(run, 0), step)
    try:
        found = _metadata(path)
    except (OSError, ValueError, TypeError):
        return None
    return _differences(path, found, about)


def read_tables(run: Path, step: int, about: JsonObject) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield row numbers and values from each server that saved a step.

    The servers include servers that no longer run.

    Args:
      about: the description of the tables, which the files must match.

    Raises:
      CheckpointError: tables of this step are missing or damaged, or do not match `about`.
    """
    kind = row_dtype("keys" in about.get("form", {}))
    count = 1
    server = 0
    while server < count:
        chain: list[Path] = []
        base: JsonObject | None = {"step": step}
        while base is not None:
            path = names.step_directory(_directory(run, server), base["step"])
            try:
                found = _checked(path, base.get("id"))
                count = int(found["servers"])
            except (DamageError, OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"the tables of step {step} in {path} are damaged: {error}; to resume from "
                    f"an earlier step, delete the checkpoints from step {step} on in "
                    f"{run / 'checkpoints'}, and resume the run (jaxdist train --resume)"
                ) from error
            problem = _differences(path, found, about)
            if problem is not None:
                raise CheckpointError(problem)
            chain.append(path)
            base = found.get("base")
        for path in reversed(chain):
            rows = np.fromfile(path / names.ARRAYS / "000000.bin", kind)
            values = np.fromfile(path / names.ARRAYS / "000001.bin", np.float32)
            yield rows, values.reshape(len(rows), -1)
        server += 1


def _checked(path: Path, given: str | None) -> JsonObject:
    """Return the metadata of a step whose files are intact.

    Args:
      given: the id that the step must have, or None to accept any id.
    """
    check_files(path, read_manifest(path))
    found = _metadata(path)
    if given not in (None, found.get("id")):
        raise ValueError(
            "the files of this step, on which a later step builds, were replaced by another save"
        )
    return found


def _metadata(path: Path) -> JsonObject:
    found: Any = read_json(path / names.METADATA)
    if not isinstance(found, dict):
        raise TypeError(f"{names.METADATA} is not a JSON object")
    return found


def prune_tables(run: Path, kept: Sequence[int]) -> None:
    """Delete the tables of all steps except `kept`, the newest `KEPT`, and their base steps."""
    for directory in (run / FOLDER).glob("server_*"):
        steps = names.steps_present(directory)
        needed = {*kept, *sorted(steps)[-KEPT:]} & {*steps}
        for step in sorted(needed, reverse=True):
            needed |= set(_bases(directory, step))
        for step in set(steps) - needed:
            names.delete(names.step_directory(directory, step))


def _bases(directory: Path, step: int) -> Iterator[int]:
    """Yield the earlier steps whose saved rows a load of `step` needs."""
    while True:
        try:
            base = _metadata(names.step_directory(directory, step)).get("base")
            step = base["step"] if base else -1
        except (OSError, ValueError, KeyError, TypeError):
            return  # A later load of this step reports the error.
        if step < 0:
            return
        yield step
