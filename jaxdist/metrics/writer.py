"""Metrics on disk: one JSON line per record, and TensorBoard events beside it.

A resumed run continues the same file. Records of steps that the interrupted run had taken but not
checkpointed are dropped first, so that the file ends up as if nothing had happened. What stays is
where time and energy went, for they were spent, and where replicas differed, for which a run may go
back. The events carry the same purge for TensorBoard.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self

from jaxdist.config.files import parse_json, read_regular
from jaxdist.errors import RunError
from jaxdist.metrics.energy.tally import SPLIT as ENERGY
from jaxdist.metrics.events import EventFile
from jaxdist.metrics.goodput import SPLIT as TIME
from jaxdist.types import Json, JsonObject

FILE_NAME = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"

REPLICAS = "replicas"
"""The split of records of replicas that differed."""

Tell = Callable[[int, str, Mapping[str, float]], None]

_LASTING = (TIME, ENERGY, REPLICAS)
_RESERVED = ("step", "split", "time")
_NON_FINITE = frozenset(("nan", "inf", "-inf"))
_TOGETHER = 500
"""Lines that are parsed at once."""


def read_metrics(path: str | os.PathLike[str]) -> list[JsonObject]:
    """The records of a metrics file in the order written; a torn last line is left out.

    Args:
      path: a `metrics.jsonl`, or the directory that holds it.

    Raises:
      RunError: no such file, or a line before the last that is not a record.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | os.PathLike[str]) -> Iterator[JsonObject]:
    """Yield what `read_metrics` returns, one record after another, for files of many records.

    Raises:
      RunError: as `read_metrics` does, a bad line when it is reached.
    """
    path = _metrics_file(Path(path))
    try:
        for record in _records(path):
            if any(value in _NON_FINITE for value in record.values()):
                record = {key: _decode(key, value) for key, value in record.items()}
            yield record
    except OSError as error:
        raise RunError(
            f"no metrics can be read from {path}: {error.strerror}; "
            "name the directory of a run that has started"
        ) from error


def append(
    directory: str | os.PathLike[str], step: int, values: Mapping[str, float], *, split: str
) -> None:
    """One more line of a `metrics.jsonl` that no writer has open any more, without an event.

    Raises:
      RunError: the disk refuses it.
    """
    path = Path(directory) / FILE_NAME
    with _told(f"append the last metrics of step {step} to", path), path.open("a") as file:
        file.write(_line(step, values, split, time.time()))


class Records:
    """Where the records of a run go: by itself nowhere, as in each process but the first."""

    def write(self, step: int, values: Mapping[str, float], *, split: str = "train") -> None:
        """See `MetricsWriter.write`."""


class MetricsWriter(Records):
    """Appends records to `metrics.jsonl` and TensorBoard events under `directory`.

    Each line is flushed as it is written: a killed process loses at most the line it was writing.
    Only one process of a run may hold a writer.

    Args:
      directory: the run directory; made when missing.
      resume_step: None for a new run; else the step of the checkpoint that the run resumes from (0
        when it starts over): records after it are dropped.
      admit: asked before each record, raises where this process may not write any more.
      tell: called with the step, the split and the values of each record that was written.

    Raises:
      RunError: the directory cannot be written, it holds the metrics of another run although
        `resume_step` is None, or a line before the last is not a record.
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
        try:
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
        except OSError as error:
            raise RunError(
                f"cannot write metrics to {self.path}: {error.strerror}; "
                "make the run directory writable, or choose another"
            ) from error

    def write(self, step: int, values: Mapping[str, float], *, split: str = "train") -> None:
        """Append one record.

        Args:
          step: number of optimizer steps taken.
          values: metric name to a number; arrays of no dims are taken, NaN and infinities too.
          split: which data the numbers are about.

        Raises:
          RunError: a metric is named like one of our own keys, the disk refuses the line, or the
            file is no longer there.
        """
        taken = [name for name in _RESERVED if name in values]
        if taken:
            raise RunError(
                f"metric {taken[0]!r} of split {split!r} has the name of a key that every record "
                f"holds ({', '.join(_RESERVED)}): rename the metric"
            )
        if step == self._resume_step and split in self._kept_splits.difference(_LASTING):
            return  # the interrupted run had already recorded this evaluation of the same state
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
        """Flush and close both files.

        Raises:
          RunError: the disk refuses what was not flushed yet.
        """
        with _told("write the last metrics to", self.path), ExitStack() as both:
            both.callback(self._events.close)
            both.callback(self._file.close)

    def _check_in_place(self, step: int) -> None:
        """Check that the file still exists: writing to a removed file raises nothing."""
        try:
            if os.path.samestat(os.stat(self.path), self._identity):
                return
            what = "was replaced by another file"
        except (FileNotFoundError, NotADirectoryError):
            what = "was removed" if self.path.parent.is_dir() else "went with its run directory"
        raise RunError(
            f"{self.path} {what} while the run was writing there, so that its metrics from step "
            f"{step} on would be lost; leave a run's files alone until it ends, then resume the run"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with suppress(RunError) if kind is not None else nullcontext():
            self.close()

    def _rewind(self, resume_step: int) -> None:
        """Drop the records after `resume_step`: one rename, so that no kill can lose the others."""
        if not self.path.exists():
            return
        kept = [
            (line, record)
            for line, record in _complete_lines(self.path)
            if record["step"] <= resume_step or record["split"] in _LASTING
        ]
        self._kept_splits = {record["split"] for _, record in kept if record["step"] == resume_step}
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.writelines(line + b"\n" for line, _ in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


@contextmanager
def _told(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot {doing} {path}: {error.strerror}; free some space, then resume the run"
        ) from error


def _line(step: int, values: Mapping[str, float], split: str, now: float) -> str:
    record = {"step": int(step), "split": split, "time": round(now, 3)}
    record |= {name: _encode(float(value)) for name, value in values.items()}
    return json.dumps(record, allow_nan=False) + "\n"


def _metrics_file(path: Path) -> Path:
    return path / FILE_NAME if path.is_dir() else path


def _lines(path: Path) -> list[bytes]:
    return read_regular(path).rstrip(b"\n").split(b"\n")


def _records(path: Path) -> Iterator[JsonObject]:
    """Yield the records of `_complete_lines`, many lines parsed at once, which halves the time."""
    lines = _lines(path)
    for start in range(0, len(lines), _TOGETHER):
        part = lines[start : start + _TOGETHER]
        try:
            found = parse_json(b"[" + b",".join(part) + b"]")
        except ValueError:
            found = []
        if isinstance(found, list) and len(found) == len(part) and all(map(_is_record, found)):
            yield from found
        else:  # one of them is torn, or is no record
            yield from (record for _, record in _complete_lines(path, lines, start, len(part)))


def _complete_lines(
    path: Path, lines: list[bytes] | None = None, start: int = 0, count: int | None = None
) -> Iterator[tuple[bytes, JsonObject]]:
    """Yield each line with its record; the last line may be torn by a kill and is then left out.

    Args:
      lines: those of the file, where they were read already.
      start, count: which of them; all by default.
    """
    lines = _lines(path) if lines is None else lines
    chosen = lines[start:] if count is None else lines[start : start + count]
    for number, line in enumerate(chosen, start=start + 1):
        record = _parse(line)
        if record is not None:
            yield line, record
        elif number < len(lines):
            raise RunError(
                f"{path}:{number} is not a metrics record: {line[:60]!r}; remove the line, or "
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


def _encode(number: float) -> float | str:
    """JSON has no NaN or infinity, so they are written as strings, which `float` reads."""
    return number if math.isfinite(number) else str(number)


def _decode(key: str, value: Json) -> Json:
    return float(value) if key not in _RESERVED and value in _NON_FINITE else value
