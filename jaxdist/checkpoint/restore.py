"""The load of the newest valid checkpoint, with warnings about newer checkpoints that are damaged.

A load writes nothing, so that another process can evaluate a run that is finished or still in
progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from jaxdist.checkpoint.agree import any_process, broadcast_json
from jaxdist.checkpoint.arrays import load_arrays
from jaxdist.checkpoint.layout import ARRAYS, METADATA, step_directory, steps_present
from jaxdist.checkpoint.manifest import (
    DamageError,
    LeafRecord,
    Manifest,
    check_files,
    read_manifest,
)
from jaxdist.checkpoint.reasons import one_line
from jaxdist.checkpoint.structure import check_structure
from jaxdist.config.files import read_json
from jaxdist.errors import CheckpointError
from jaxdist.types import JsonObject, PyTree


class Wanted(NamedTuple):
    """The parts of a checkpoint to load, and their conversion.

    Attributes:
      target: a tree of `jax.ShapeDtypeStruct` (or arrays) with `.sharding`, on any mesh.
      shapes: a tree like `target` with the shapes of the tensors without padding, or None if the
        target is not padded.
      ignored: the names of the saved arrays that are not loaded.
      finish: the function from the loaded tree to the caller's result.
    """

    target: PyTree
    shapes: PyTree = None
    ignored: frozenset[str] = frozenset()
    finish: Callable[[PyTree], PyTree] = lambda tree: tree


Adapt = Callable[[Mapping[str, LeafRecord]], Wanted]
"""A function from the records of a checkpoint's arrays to the parts to load."""


@dataclass(frozen=True)
class Restored:
    """A loaded state, with its step and metadata."""

    step: int
    """The step of the loaded state."""
    state: PyTree
    """The loaded state, with the structure and shardings of the target."""
    metadata: JsonObject
    """The metadata that was saved with the state."""


def committed_steps(directory: Path) -> tuple[int, ...]:
    """Return the steps with a valid manifest, in ascending order.

    Only the manifests are checked, and not the other files.
    """
    return tuple(manifest.step for manifest in valid_manifests(directory))


def valid_manifests(directory: Path) -> list[Manifest]:
    """Return all valid manifests of checkpoints in a directory, by ascending step."""
    manifests = []
    for step in steps_present(directory):
        try:
            manifests.append(_read(directory, step))
        except DamageError:
            continue
    return manifests


def restore(
    directory: Path,
    target: PyTree,
    *,
    shapes: PyTree = None,
    step: int | None = None,
    on_event: Callable[[str], None],
) -> Restored:
    """Load a checkpoint into the structure and the shardings of `target`.

    Every process calls this function.

    Args:
      directory: the directory that contains the `step_*` directories, on a file system that all
        processes share.
      target: a tree of `jax.ShapeDtypeStruct` (or arrays) with `.sharding`, on any mesh.
      shapes: a tree like `target` with the shapes of the tensors without padding, or None if the
        target is not padded.
      step: the step to load, or None for the newest complete checkpoint.
      on_event: the function that process 0 calls with a line for each damaged checkpoint.

    Raises:
      CheckpointError: see `restore_as`.
    """
    wanted = Wanted(target, shapes)
    return restore_as(directory, lambda saved: wanted, step=step, on_event=on_event)


def restore_as(
    directory: Path,
    adapt: Adapt,
    *,
    step: int | None = None,
    on_event: Callable[[str], None],
) -> Restored:
    """Load the parts of a checkpoint that `adapt` chooses from the checkpoint's records.

    Every process calls this function. Every file is compared with the manifest before any array is
    loaded. If `step` is None, checkpoints are tried from the newest to the oldest, and a damaged
    checkpoint is reported through `on_event` and skipped.

    Args:
      directory: the directory that contains the `step_*` directories, on a file system that all
        processes share.
      adapt: the function from the records of a checkpoint's arrays to the parts to load.
      step: the step to load, or None for the newest complete checkpoint.
      on_event: the function that process 0 calls with a line for each damaged checkpoint.

    Raises:
      CheckpointError: there is no complete checkpoint; the requested step is missing or damaged; or
        the checkpoint belongs to another model. In the last case no older checkpoint is tried,
        since it would belong to the other model too.
    """
    directory = directory.absolute()  # Orbax accepts only absolute paths.
    steps = broadcast_json(steps_present(directory))
    if not steps:
        raise CheckpointError(
            f"{directory} has no checkpoint: no step was saved in this directory yet. Name a run "
            "that has saved a step, or wait for the first save"
        )
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{directory} has no checkpoint of step {step}; choose from steps {steps}"
        )
    remaining = [step] if step is not None else steps[::-1]
    refused: list[str] = []
    while remaining:
        candidate = remaining.pop(0)
        restored, problem = _try(directory, candidate, adapt)
        if restored is not None:
            return restored
        following = (
            f"trying step {remaining[0]} next"
            if remaining
            else "there is no other checkpoint to try"
        )
        if jax.process_index() == 0 and step is None:
            path = step_directory(directory, candidate)
            on_event(f"checkpoint {path} is damaged: {problem}; {following}")
        refused.append(f"step {candidate}: {problem}")
    advice = (
        "start again without --resume in a new run directory, or restore the files from a copy"
        if step is None
        else f"leave the step out to use the newest complete checkpoint of {steps}"
    )
    raise CheckpointError(
        f"no checkpoint in {directory} can be used:\n  " + "\n  ".join(refused) + f"\n{advice}"
    )


def _try(directory: Path, step: int, adapt: Adapt) -> tuple[Restored | None, str | None]:
    """Load a step; return the checkpoint and None, or None and a description of the problem.

    Either all processes return a checkpoint, or all processes return a problem.
    """
    # Only process 0 computes the digests, so that the files are read once and not by every process.
    problem = broadcast_json(_verify(directory, step) if jax.process_index() == 0 else None)
    if problem is not None:
        return None, problem
    path = step_directory(directory, step)
    try:
        manifest = _read(directory, step)
        metadata = _metadata(path)
    except (DamageError, OSError) as error:
        raise CheckpointError(
            f"process {jax.process_index()} cannot read {path} ({error}), although process 0 can: "
            "put the run directory on a file system that all hosts share"
        ) from error
    target, shapes, ignored, finish = adapt(manifest.leaves)
    compared = {n: leaf for n, leaf in manifest.leaves.items() if n not in ignored}
    check_structure(compared, target if shapes is None else shapes, where=str(path))
    try:
        state = load_arrays(path, manifest, target)
    # Any error of orbax or tensorstore means that the checkpoint cannot be loaded.
    except Exception as error:
        state, problem = None, f"{ARRAYS}: {one_line(error)}"
    # All processes must take or skip the same checkpoint.
    if any_process(problem is not None):
        return None, problem or f"{ARRAYS}: another process could not load the arrays"
    return Restored(step, finish(state), metadata), None


def _verify(directory: Path, step: int) -> str | None:
    try:
        check_files(step_directory(directory, step), _read(directory, step))
        _metadata(step_directory(directory, step))
    except DamageError as damage:
        return str(damage)
    return None


def _metadata(path: Path) -> JsonObject:
    """Read the metadata of a checkpoint.

    Raises:
      DamageError: the file cannot be read, or does not contain a mapping.
    """
    try:
        found = read_json(path / METADATA)
    except (OSError, ValueError) as error:
        raise DamageError(f"{METADATA}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(found, dict):
        raise DamageError(f"{METADATA}: the file does not contain a mapping")
    return found


def _read(directory: Path, step: int) -> Manifest:
    manifest = read_manifest(step_directory(directory, step))
    if manifest.step != step:
        raise DamageError(
            f"manifest.json: the manifest belongs to step {manifest.step}, but the name of its "
            f"directory belongs to step {step}"
        )
    return manifest
