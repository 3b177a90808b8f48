"""Metrics on disk: a line of JSON for each record, and TensorBoard events.

A resumed run continues the same file. Before that, the records of steps after the checkpoint are
dropped, since the run repeats these steps. The file then equals the file of an uninterrupted run.
Records of time and energy are kept, since both were spent. Records of replicas that differed are
kept too, since they may be the reason for the resume. TensorBoard also drops its events after the
checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Self

from jaxdist.config.files import parse_json, read_regular
from jaxdist.errors import RunError, os_errors_as
from jaxdist.metrics.energy.tally import SPLIT as ENERGY
from jaxdist.metrics.events import EventFile
from jaxdist.metrics.goodput import SPLIT as TIME
from jaxdist.metrics.report import plain
from jaxdist.types import Json, JsonObject

FILE_NAME = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"

REPLICAS = "replicas"
"""The split of the records about replicas that differed."""

Tell = Callable[[int, str, Mapping[str, float]], None]

_LASTING = (TIME, ENERGY, REPLICAS)
_RESERVED = ("step", "split", "time")
_NON_FINITE = frozenset(("nan", "inf", "-inf"))
_TOGETHER = 500
"""The number of lines of a metrics file that are parsed at once."""


def read_metrics(path: str | os.PathLike[str]) -> list[JsonObject]:
    """Return the records of a metrics file, in order, without an incomplete last line.

    Args:
      path: the path of a `metrics.jsonl`, or of its directory.

    Raises:
      RunError: the file does not exist, or a line before the last is not a record.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | os.PathLike[str]) -> Iterator[JsonObject]:
    """Yield the records of a metrics file one at a time, for files that exceed the memory.

    An incomplete last line is left out.

    Raises:
      RunError: see `read_metrics`; a line that is not a record raises the error when the line is
        reached.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    with os_errors_as(
        RunError,
        f"no metrics can be read from {path}",
        "use the directory of a run that has started",
    ):
        for record in _records(path):
            if any(value in _NON_FINITE for value in record.values()):
                record = {key: _decode(key, value) for key, value in record.items()}
            yield record


def append(
    directory: str | os.PathLike[str], step: int, values: Mapping[str, float], *, split: str
) -> None:
    """Append a record to a `metrics.jsonl` that no writer has open, without a TensorBoard event.

    Raises:
      RunError: the line cannot be written.
    """
    path = Path(directory) / FILE_NAME
    with _told(f"append the last metrics of step {step} to", path), path.open("a") as file:
        file.write(_line(step, values, split, time.time()))


class Records:
    """The destination of a run's records.

    This base class drops all records. Processes other than process 0 use it.
    """

    def write(self, step: int, values: Mapping[str, float], *, split: str = "train") -> None:
        """Write a record; see `MetricsWriter.write`."""


class MetricsWriter(Records):
    """A writer of records to `metrics.jsonl`, and of TensorBoard events, under `directory`.

    Each line is flushed at once, so that a killed process loses at most the line that it was
    writing. Only one process of a run may have a writer.

    Args:
      directory: the run directory, which is created if it is missing.
      resume_step: the step from which a run resumes, or 0 if it resumes without a checkpoint. The
        records after this step are dropped. None begins a new run.
      admit: the function that is called before each record. The function raises an error if this
        process may not write.
      tell: the function that is called with the step, the split and the values of each record that
        was written, or None.

    Raises:
      RunError: the directory cannot be written, it has the metrics of another run although
        `resume_step` is None, or a line before the last line is not a record.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        resume_step: int | None,
        admit: Callable[[], None] = lambda: None,
        tell: Tell | None = None,
    ) -> None:
        self.path, self._admit = Path(directory) / FILE_NAME, admit
        self._resume_step, self._tell = resume_step, tell
        self._kept_splits: set[str] = set()
        with os_errors_as(
            RunError,
            f"cannot write metrics to {self.path}",
            "make the run directory writable, or choose another directory",
        ):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                self._rewind(resume_step)
            elif self.path.exists() and self.path.stat().st_size:
                raise RunError(
                    f"{self.path} already holds the metrics of a run: resume that run, or choose "
                    "another run directory"
                )
            self._file = self.path.open("a", encoding="utf-8")
            self._identity = os.fstat(self._file.fileno())
            folder = self.path.parent / EVENTS_FOLDER
            self._events = EventFile(folder, resume_step=resume_step)

    def write(self, step: int, values: Mapping[str, float], *, split: str = "train") -> None:
        """Append a record of the run's metrics to the file.

        An evaluation at the step of the resume is not written again, if the file already has it.

        Args:
          step: the number of optimizer steps that were taken.
          values: the numbers by metric name. Arrays without dims, NaN and infinities are accepted
            too.
          split: the name of the data that the numbers describe, such as `train`.

        Raises:
          RunError: a metric has the name of a reserved key, the line cannot be written, or the file
            no longer exists.
        """
        taken = [name for name in _RESERVED if name in values]
        if taken:
            raise RunError(
                f"metric {taken[0]!r} of split {split!r} has the name of a key that every record "
                f"holds ({', '.join(_RESERVED)}): rename the metric"
            )
        if step == self._resume_step and split in self._kept_splits.difference(_LASTING):
            return  # The interrupted run has recorded this evaluation already.
        self._admit()
        now = time.time()
        with _told(f"append the metrics of step {step} to", self.path):
            self._check_in_place(step)
            self._file.write(_line(step, values, split, now))
            self._file.flush()
            tagged = {f"{split}/{name}": float(number) for name, number in values.items()}
            self._events.write(int(step), now, tagged)
        if self._tell is not None:
            self._tell(int(step), split, values)

    def close(self) -> None:
        """Flush and close the file of metrics and the file of events.

        Raises:
          RunError: the remaining data cannot be written.
        """
        # The stack closes the events even if the close of the metrics file fails.
        with _told("write the last metrics to", self.path), ExitStack() as both:
            both.callback(self._events.close)
            both.callback(self._file.close)

    def _check_in_place(self, step: int) -> None:
        """Check that the file still exists, since a write to a removed file raises no error."""
        try:
            if os.path.samestat(os.stat(self.path), self._identity):
                return
            what = "was replaced by another file"
        except (FileNotFoundError, NotADirectoryError):
            what = (
                "was removed"
                if self.path.parent.is_dir()
                else ("was removed with the run directory")
            )
        raise RunError(
            f"{self.path} {what} while the run was writing it, so the metrics from step {step} on "
            "would be lost. Resume the run, and do not change its files before it ends"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # An error of `close` must not replace the error that ended the `with` block.
        with suppress(RunError) if kind is not None else nullcontext():
            self.close()

    def _rewind(self, resume_step: int) -> None:
        """Drop the records after `resume_step`, such that a kill loses no earlier records."""
        if not self.path.exists():
            return
        lines = _lines(self.path)
        kept = [
            (line, record)
            for line, record in _complete_lines(self.path, lines, range(len(lines)))
            if record["step"] <= resume_step or record["split"] in _LASTING
        ]
        self._kept_splits = {record["split"] for _, record in kept if record["step"] == resume_step}
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.writelines(line + b"\n" for line, _ in kept)
            file.flush()
            # Without the fsync, the rename could reach the disk before the content does.
            os.fsync(file.fileno())
        temporary.replace(self.path)


def _told(doing: str, path: Path) -> AbstractContextManager[None]:
    return os_errors_as(RunError, f"cannot {doing} {path}", "free some space, then resume the run")


def _line(step: int, values: Mapping[str, float], split: str, now: float) -> str:
    record = {"step": int(step), "split": split, "time": round(now, 3)}
    record |= plain({name: float(value) for name, value in values.items()})
    return json.dumps(record, allow_nan=False) + "\n"


def _lines(path: Path) -> list[bytes]:
    return read_regular(path).rstrip(b"\n").split(b"\n")


def _records(path: Path) -> Iterator[JsonObject]:
    """Yield the records of `_complete_lines`, in half the time; many lines are parsed at once."""
    lines = _lines(path)
    for start in range(0, len(lines), _TOGETHER):
        chosen = range(len(lines))[start : start + _TOGETHER]
        part = lines[start : start + _TOGETHER]
        try:
            found = parse_json(b"[" + b",".join(part) + b"]")
        except ValueError:
            found = []
        if isinstance(found, list) and len(found) == len(part) and all(map(_is_record, found)):
            yield from found
        else:  # A line is incomplete, or is not a record.
            yield from (record for _, record in _complete_lines(path, lines, chosen))


def _complete_lines(
    path: Path, lines: Sequence[bytes], chosen: range
) -> Iterator[tuple[bytes, JsonObject]]:
    """Yield each complete line with its parsed record; a last line that a kill cut off is skipped.

    Args:
      lines: the lines of the file.
      chosen: the indices of the lines to yield.
    """
    for index in chosen:
        line = lines[index]
        record = _parse(line)
        if record is not None:
            yield line, record
        elif index + 1 < len(lines):
            raise RunError(
                f"{path}:{index + 1} is not a metrics record: {line[:60]!r}; remove the line, or "
                "restore the file"
            )


def _parse(line: bytes) -> JsonObject | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if _is_record(record) else None


def _is_record(record: Json) -> bool:
    if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
        return False
    return isinstance(record.get("split"), str)


def _decode(key: str, value: Json) -> Json:
    return float(value) if key not in _RESERVED and value in _NON_FINITE else value
