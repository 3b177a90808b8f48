"""The checkpoints of shards, which each server writes when all changes before a clock are applied.

RUN/shards/server_0/step_00000500/     the checkpoint of clock 500 (`jaxdist.checkpoint.layout`)
    arrays/000000.bin ...              the leaves in order, raw
    metadata.json                      floor and version
    manifest.json                      shapes, dtypes, sizes and digests
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint import layout as names
from jaxdist.checkpoint.manifest import DamageError, check_files, read_manifest, seal
from jaxdist.checkpoint.structure import describe_arrays
from jaxdist.config.files import read_json
from jaxdist.errors import CheckpointError, os_errors_as
from jaxdist.param_server.live.layout import ShardLayout
from jaxdist.param_server.live.shard import ShardState
from jaxdist.param_server.training.state import Sharded
from jaxdist.types import JsonObject, PyTree

FOLDER = "shards"


def directory_of(run: Path, server: int) -> Path:
    """Return the directory of a server's checkpoints."""
    return run / FOLDER / f"server_{server}"


def write_arrays(directory: Path, step: int, about: JsonObject, tree: PyTree, what: str) -> None:
    """Write the leaves of a tree with their digests, and commit the checkpoint.

    Args:
      about: the metadata of the checkpoint.
      what: the name of the content, for errors.

    Raises:
      CheckpointError: the checkpoint cannot be written.
    """
    staging = names.staging_directory(directory, step)
    with os_errors_as(
        CheckpointError,
        f"{what} cannot be saved in {directory}",
        "free some space, then resume the run",
    ):
        # A crash may have left files of an earlier attempt, which are deleted here.
        shutil.rmtree(staging, ignore_errors=True)
        (staging / names.ARRAYS).mkdir(parents=True)
        for number, leaf in enumerate(jax.tree.leaves(tree)):
            np.asarray(leaf).tofile(staging / names.ARRAYS / f"{number:06d}.bin")
        (staging / names.METADATA).write_text(json.dumps(about), encoding="utf-8")
        seal(staging, step=step, metric=None, leaves=describe_arrays(tree))
        names.commit(staging, names.step_directory(directory, step))


def write_shard(run: Path, server: int, shard: ShardState) -> None:
    """Write, digest and commit the checkpoint of a shard.

    Raises:
      CheckpointError: the checkpoint cannot be written.
    """
    tree = {"optimizer": shard.optimizer, "params": shard.params}
    about: JsonObject = {"floor": shard.floor, "version": shard.version}
    what = f"the shard of server {server}"
    write_arrays(directory_of(run, server), shard.floor, about, tree, what)


def read_shard(run: Path, sharded: Sharded, layout: ShardLayout, clock: int) -> ShardState:
    """Read the checkpoint of a shard at a clock.

    Raises:
      CheckpointError: the checkpoint is missing or damaged, or belongs to other ranges or another
        optimizer.
    """
    path = names.step_directory(directory_of(run, layout.server), clock)
    wanted = {
        "optimizer": sharded.begun(layout),
        "params": jax.ShapeDtypeStruct((layout.length,), layout.dtype),
    }
    try:
        manifest = read_manifest(path)
        check_files(path, manifest)
    except DamageError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if manifest.leaves != describe_arrays(wanted):
        raise CheckpointError(
            f"{path} was saved for other ranges of parameters, or for another optimizer than the "
            "configured optimizer. Configure the model, placement and optimizer with which the run "
            "was started"
        )
    leaves: list[np.ndarray] = []
    for number, leaf in enumerate(jax.tree.leaves(wanted)):
        raw = (path / names.ARRAYS / f"{number:06d}.bin").read_bytes()
        leaves.append(np.frombuffer(raw, leaf.dtype).reshape(leaf.shape))
    tree = jax.tree.unflatten(jax.tree.structure(wanted), leaves)
    try:
        about: Any = read_json(path / names.METADATA)
        given = about["floor"], about["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {names.METADATA}: {error}") from error
    return ShardState(*given, tree["params"], tree["optimizer"])


def prune(run: Path, stale: Callable[[int], bool]) -> None:
    """Delete the checkpoints of all clocks for which `stale` is true."""
    for directory in (run / FOLDER).glob("server_*"):
        for clock in filter(stale, names.steps_present(directory)):
            names.delete(names.step_directory(directory, clock))


def clear(run: Path) -> None:
    """Delete checkpoints that a crash left incomplete."""
    for directory in (run / FOLDER).glob("server_*"):
        names.recover(directory)
