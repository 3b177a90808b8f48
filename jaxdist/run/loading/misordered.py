"""A check for old checkpoints whose parameters were stored in the wrong order.

In versions that wrote checkpoints of format 1, ZeRO 3 with an explicit reduction also split dims
that another mesh axis already split. ZeRO stored the shards of these dims in one order and gathered
them in another order. The model was therefore trained with permuted rows; the permutation depends
on the mesh.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jaxdist.checkpoint.layout import ARRAYS, step_directory
from jaxdist.checkpoint.manifest import read_manifest
from jaxdist.config import read
from jaxdist.config.files import parse_json, read_json
from jaxdist.errors import CheckpointError, some_of
from jaxdist.mesh import DCN, ICI
from jaxdist.run.directory import RunDirectory

_PARAMS = "params/"
_LISTED = 3


def check_order(run: RunDirectory, step: int) -> None:
    """Check that the parameters of a run's checkpoint were stored in the right order.

    Raises:
      CheckpointError: parameters are misordered; the message names the first misordered parameter.
    """
    path = step_directory(run.checkpoints, step)
    manifest = read_manifest(path)
    if manifest.format > 1:
        return
    # The parameters of a run without an explicit reduction are in the right order, because XLA
    # gathers the shards in the order in which they are stored.
    parallel = read(run.config).values.get("parallel")
    if isinstance(parallel, dict) and parallel.get("reduce", "?") is None:
        return
    specs = _specs(path / ARRAYS)
    found = [
        name.removeprefix(_PARAMS)
        for number, name in enumerate(manifest.leaves)
        if name.startswith(_PARAMS) and any(map(_over_two_axes, specs.get(number, ())))
    ]
    if found:
        raise CheckpointError(
            f"{path} contains parameters in a different order from that in which they were trained "
            f"({some_of(found, _LISTED)}). The checkpoint was written by an earlier "
            "version of jaxdist, whose ZeRO 3 with an explicit reduction misplaced shards of dims "
            "that a second mesh axis splits. Train the run again (docs/errata.md lists which runs "
            "are affected)"
        )


def _specs(arrays: Path) -> dict[int, list[Any]]:
    """Return the partition spec of each array, by the array's number, as orbax recorded it."""
    noted = read_json(arrays / "_sharding")
    return {
        int(base64.b64decode(number)): parse_json(text).get("partition_spec", [])
        for number, text in noted.items()
    }


def _over_two_axes(entry: str | list[str] | None) -> bool:
    names = entry if isinstance(entry, list) else []
    # data_dcn and data_ici are parts of the config's data axis. The shards along both axes were
    # always in order.
    return len({name.removesuffix(DCN).removesuffix(ICI) for name in names}) > 1
