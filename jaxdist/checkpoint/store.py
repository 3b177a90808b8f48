"""The store of a run's checkpoints, which saves in the background.

A kill at any time loses no committed checkpoint. A save has these steps:

1. The arrays are written into a hidden directory.
2. The digest of every file is computed, and the file is synced to disk.
3. The manifest is written and synced.
4. The directory is renamed, and its parent is synced.
5. The checkpoints that the retention does not keep are deleted.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import jax

from jaxdist.checkpoint import layout
from jaxdist.checkpoint.agree import broadcast_json
from jaxdist.checkpoint.arrays import ArrayWriter, LargeArrayFiles
from jaxdist.checkpoint.manifest import FileRecord, LeafRecord, seal
from jaxdist.checkpoint.pieces import CHUNK_BYTES, Known
from jaxdist.checkpoint.reasons import how_lost, is_disk_full, one_line
from jaxdist.checkpoint.restore import (
    Adapt,
    Restored,
    committed_steps,
    restore,
    restore_as,
    valid_manifests,
)
from jaxdist.checkpoint.retention import to_delete
from jaxdist.checkpoint.structure import describe_arrays
from jaxdist.errors import CheckpointError, RunError
from jaxdist.types import Json, PyTree

LOST_PEERS_SECONDS = 10


class _Pending(NamedTuple):
    step: int
    metric: float | None
    leaves: dict[str, LeafRecord]
    whole: LargeArrayFiles


class _Outcome(NamedTuple):
    failure: str | None
    met: bool
    """Whether all processes passed the last barrier of the save. Only then can all processes take
    part in a broadcast of the outcome.
    """


class FencedBy(Protocol):
    """The fence of a generation, which checks whether the generation may still write."""

    generation: int

    def check(self) -> None:
        """Check that this generation of the run may still write checkpoints.

        Raises:
          RunError: a later generation has started.
        """
        ...


class CheckpointStore:
    """The store of a run's checkpoints; every process creates a store and calls the same methods.

    The directory must be on a file system that all processes share. Only process 0 writes
    manifests, commits and deletes. In a run with several processes the arrays must be global
    arrays.

    Args:
      directory: the directory of the checkpoints, which is created if it is missing. The store
        removes the remains of a crash from this directory.
      keep: the number of newest checkpoints to keep, at least 1.
      keep_best: whether to keep the checkpoint with the lowest metric as well.
      chunk_bytes: the largest size, in bytes, of a file of a divided array, as in `ArrayWriter`. If
        a file has the content of a file of an earlier step, it becomes a link to that file.
      on_event: the function that is called with a line about each event that concerns the user,
        such as a damaged file. The background thread may call the function.
      fence: the fence of this generation, or None to write without a check. A run on several hosts
        needs a fence, since processes of an earlier generation may still be alive.

    Raises:
      CheckpointError: the directory cannot be created or written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_best: bool,
        chunk_bytes: int = CHUNK_BYTES,
        on_event: Callable[[str], None],
        fence: FencedBy | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self._fence = fence
        self._keep = keep
        self._keep_best = keep_best
        self._on_event = on_event
        self._primary = jax.process_index() == 0
        self._thread: threading.Thread | None = None
        self._outcome: _Outcome | None = None
        self._saves = 0
        self._prepare_directory()
        self._writer = ArrayWriter(chunk_bytes)

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        metadata: Mapping[str, Json],
        metric: float | None = None,
        shapes: PyTree = None,
    ) -> None:
        """Copy the arrays to the host, and save them as a checkpoint in the background.

        The call first waits for the previous save. The caller may donate `state` after this call. A
        checkpoint of the same step remains complete until the new checkpoint replaces it.

        Args:
          step: the step of the state, 0 or more.
          state: a tree of `jax.Array`, which may include typed random keys.
          metadata: JSON values that `restore` returns.
          metric: the metric for `keep_best`, or None without a metric. A metric that is not finite
            is never the best.
          shapes: a tree like the state with the shapes of the tensors without padding, or None if
            the arrays are not padded.

        Raises:
          CheckpointError: the previous save failed, this save cannot begin, `metadata` is not JSON,
            or two leaves have the same path.
        """
        self.wait()
        text = _encode(metadata)
        finite = float(metric) if metric is not None and math.isfinite(metric) else None
        leaves = describe_arrays(state, shapes)
        self._check_fence()
        staging = self._staging(step)
        try:
            if self._primary:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
                (staging / layout.METADATA).write_text(text, encoding="utf-8")
            whole = self._writer.start(staging, state)
        except Exception as error:
            raise CheckpointError(self._abandon(step, error)) from error
        self._saves += 1
        # The outcome is a failure until the thread reports another outcome. If the thread dies, the
        # outcome of the previous save must not count for this save.
        self._outcome = _Outcome(
            f"saving step {step} in {self.directory} did not finish: read the log for the "
            "reason, then resume the run",
            met=False,
        )
        pending = _Pending(step, finite, leaves, whole)
        self._thread = threading.Thread(
            target=self._finish, args=(pending,), name=f"checkpoint-{step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is committed on every process.

        Raises:
          CheckpointError: the save failed; the message has the reason, the free space and the last
            good step.
        """
        outcome = self._join()
        if outcome is None:
            return
        # A broadcast waits for every process. If some processes did not pass the last barrier of
        # the save, they might never join the broadcast.
        failure = broadcast_json(outcome.failure) if outcome.met else outcome.failure
        if failure is not None:
            raise CheckpointError(failure)

    def close(self) -> None:
        """Wait for the last save, and stop the writer.

        Raises:
          CheckpointError: the last save failed.
        """
        try:
            self.wait()
            self._clear_older()
        finally:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
            return
        # After an error, other processes may never reach a collective. This process therefore
        # finishes its part of the save without a broadcast.
        if self._thread is not None and jax.process_count() > 1:
            self._thread.join(LOST_PEERS_SECONDS)
            if self._thread.is_alive():
                self._on_event(
                    "the last save is abandoned, because other processes did not finish the save: "
                    "read their logs for the reason"
                )
                return
        outcome = self._join()
        if outcome is not None and outcome.failure is not None:
            self._on_event(outcome.failure)
        self._writer.close()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the committed checkpoints, in ascending order."""
        return committed_steps(self.directory)

    def restore(
        self,
        target: PyTree,
        *,
        shapes: PyTree = None,
        step: int | None = None,
    ) -> Restored:
        """Load a checkpoint of this store; see `jaxdist.checkpoint.restore.restore`."""
        self.wait()
        return restore(self.directory, target, shapes=shapes, step=step, on_event=self._on_event)

    def restore_as(self, adapt: Adapt, *, step: int | None = None) -> Restored:
        """Load parts of a checkpoint of this store; see `jaxdist.checkpoint.restore.restore_as`."""
        self.wait()
        return restore_as(self.directory, adapt, step=step, on_event=self._on_event)

    def _prepare_directory(self) -> None:
        # The probe shows now, and not only at the first save, that an existing directory cannot be
        # written. All processes probe at the same time, so each process needs a different name.
        probe = self.directory / f".probe-{jax.process_index()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
            self._identity = os.stat(self.directory)
            self._check_fence()
            leftovers = layout.recover(self.directory) if self._primary else []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.directory}: {one_line(error)}; choose a "
                "directory that exists or can be created, in which you may write, on a disk with "
                "free space"
            ) from error
        if leftovers:
            self._on_event(
                f"{self.directory}: removed the files of an interrupted save: "
                f"{', '.join(leftovers)}"
            )
        if self._primary:
            self._report_torn()

    def _report_torn(self) -> None:
        torn = set(layout.steps_present(self.directory)) - set(committed_steps(self.directory))
        for step in sorted(torn):
            path = layout.step_directory(self.directory, step)
            self._on_event(
                f"{path} has no valid manifest, so the directory does not count as a "
                "checkpoint: delete it, or restore its files"
            )

    def _finish(self, pending: _Pending) -> None:
        """Do the part of a save that runs in the background."""
        failure, met = None, False
        try:
            self._writer.wait()
            written, failure = self._place(pending)
            # Process 0 seals all files, so every process must have written its files before.
            self._writer.barrier(f"jaxdist_pieces_{self._saves}")
            try:
                if self._primary and failure is None:
                    self._commit(pending, written)
            except Exception as error:
                failure = self._abandon(pending.step, error)
            # This barrier also follows a failed commit, since the other processes wait at the
            # barrier: no process may report the save as done before process 0 has committed the
            # save.
            self._writer.barrier(f"jaxdist_checkpoint_{self._saves}")
            met = True
        except Exception as error:
            failure = self._abandon(pending.step, error)
        self._outcome = _Outcome(failure, met)

    def _place(self, pending: _Pending) -> tuple[dict[str, FileRecord], str | None]:
        """Write this process's part of the large arrays; return the files' records, or the failure.

        No error is raised, since the other processes wait for this process at the next barrier. If
        files are missing, process 0 detects this when it commits.
        """
        try:
            steps = [
                (layout.step_directory(self.directory, m.step), m)
                for m in valid_manifests(self.directory)
            ]
            known = Known(steps, self._on_event)
            staging = self._staging(pending.step)
            return self._writer.place(staging, known), None
        except Exception as error:
            failure = self._abandon(pending.step, error)
            # Process 0 can see which files are missing, but only this process knows the reason.
            if not self._primary:
                self._on_event(failure)
            return {}, failure

    def _commit(self, pending: _Pending, written: Mapping[str, FileRecord]) -> None:
        staging = self._staging(pending.step)
        final = layout.step_directory(self.directory, pending.step)
        # If the directory is missing, orbax creates another directory for its arrays. Only the file
        # that was written first shows that the directory still belongs to this save.
        if not (staging / layout.METADATA).exists():
            raise FileNotFoundError(f"{staging} was removed while the arrays were written")
        # A digest that is computed after the write cannot show that a file is missing or truncated,
        # so the sizes are compared.
        for name, size in pending.whole.bytes.items():
            if (staging / name).stat().st_size != size:
                raise OSError(f"{staging / name} no longer has the {size} bytes that were written")
        given = {"metric": pending.metric, "leaves": pending.leaves, "cuts": pending.whole.cuts}
        seal(staging, step=pending.step, **given, known=written, generation=self._generation)
        self._check_fence()
        # If this process is suspended here while the next generation starts, the rename below
        # fails, since the next generation removes the directory.
        layout.commit(staging, final)
        self._check_fence()
        self._clear_older()
        self._prune(pending.step)

    def _is_deposed(self) -> bool:
        try:
            self._check_fence()
        except RunError:
            return True
        return False

    def _check_fence(self) -> None:
        if self._fence is not None:
            self._fence.check()

    def _clear_older(self) -> None:
        if self._primary and self._fence is not None:
            layout.clear_older(self.directory, self._fence.generation)

    def _staging(self, step: int) -> Path:
        return layout.staging_directory(self.directory, step, self._generation)

    @property
    def _generation(self) -> int | None:
        return None if self._fence is None else self._fence.generation

    def _prune(self, step: int) -> None:
        """Delete those checkpoints that the retention does not keep, among the steps up to `step`.

        If the run was resumed from an earlier step, the directory also has later steps. If the
        retention counted those steps, it could delete the step that was just saved.
        """
        manifests = valid_manifests(self.directory)
        later = [manifest.step for manifest in manifests if manifest.step > step]
        if later:
            self._on_event(
                f"{self.directory} holds steps {later}, later than step {step} just saved: the "
                "later steps are kept, and --resume uses the latest complete checkpoint"
            )
        metrics = {m.step: m.metric for m in manifests if m.step <= step}
        for old in to_delete(metrics, keep=self._keep, keep_best=self._keep_best):
            path = layout.step_directory(self.directory, old)
            try:
                layout.delete(path)
            except OSError as error:
                self._on_event(
                    f"the old checkpoint {path} cannot be deleted: "
                    f"{one_line(error)}; delete it yourself"
                )

    def _abandon(self, step: int, error: Exception) -> str:
        """Remove the files of a failed save, and return a description of the failure.

        The method raises no OSError.
        """
        reason = "the disk is full" if is_disk_full(error) else one_line(error)
        try:
            # With the suffix "/.", stat also fails if a file has replaced the directory.
            if not os.path.samestat(os.stat(f"{self.directory}/."), self._identity):
                # The run's directory was removed, and orbax has created a new directory for its
                # arrays.
                raise FileNotFoundError
            if self._primary and self._fence is None:
                layout.recover(self.directory)
            elif self._primary or self._is_deposed():
                # Only the directory of this save is removed, since other files may belong to the
                # next generation. If the next generation has started, each process removes the
                # directory, since any process may be the last to write there.
                shutil.rmtree(self._staging(step), ignore_errors=True)
            good, free = self.steps(), shutil.disk_usage(self.directory).free
        except OSError as lost:
            return (
                f"saving step {step} failed: {self.directory} {how_lost(lost)}; there is no "
                "checkpoint to resume from: restore the directory, or start a new run"
            )
        return (
            f"saving step {step} in {self.directory} failed: {reason}; the disk has {free} free "
            "bytes; "
            + (f"the last good checkpoint is step {good[-1]}" if good else "there is no checkpoint")
            + "; make room or choose another disk, then resume"
        )

    def _join(self) -> _Outcome | None:
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        return self._outcome


def _encode(metadata: Mapping[str, Json]) -> str:
    try:
        return json.dumps(dict(metadata))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the metadata of a checkpoint must be JSON values, but {error}: {dict(metadata)!r}"
        ) from error
