"""The writer of the page of `jaxdist report --html`, once or repeatedly during a run."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from jaxdist.config.files import replace_text
from jaxdist.errors import RunError, os_errors_as
from jaxdist.run.lock import BEAT_SECONDS, FILE_NAME, PATIENCE_SECONDS
from jaxdist.run.report.page.data import (
    Compile,
    program_data,
    run_curves,
    run_data,
    setting_differences,
)
from jaxdist.types import JsonObject

MOST_BYTES = 1_000_000
"""The size limit of a page, in bytes, so that the page can be mailed and opens quickly."""
_POINTS = 24_000
"""The number of points of all curves together; the points take about half of the page's size."""
_FEWEST_POINTS = 500


def render(runs: Sequence[JsonObject], *, reload_seconds: float | None, now: float) -> str:
    """Return the HTML page about runs.

    Args:
      runs: the data of each run, as `run_data` returns it, together with its curves.
      reload_seconds: the interval, in seconds, at which the page reloads itself, or None for a page
        that does not reload.
      now: the current time, in seconds since 1970.
    """
    title = " and ".join(run["path"] for run in runs)
    data = {
        "runs": list(runs),
        "differences": setting_differences(runs),
        "written": now,
        "reload_seconds": reload_seconds,
    }
    template = files("jaxdist.run.report.page").joinpath("page.html").read_text("utf-8")
    # The title is replaced first, since the data may contain text that looks like a placeholder.
    return template.replace("{{TITLE}}", html.escape(title)).replace("{{DATA}}", _embedded(data))


def _embedded(data: JsonObject) -> str:
    """Return the data as JSON that cannot close its HTML element, whatever the config contains.

    >>> _embedded({"name": "</script><b>"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    # json.dumps writes only ASCII characters.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(
    runs: Sequence[Path],
    file: Path,
    compiled: Sequence[JsonObject],
    *,
    reload_seconds: float | None = None,
) -> int:
    """Write a page of at most `MOST_BYTES` atomically, and return its size in bytes.

    Args:
      compiled: the result of `program_data` for each run.
      reload_seconds: the interval, in seconds, at which the page reloads itself, or None for a page
        that does not reload.

    Raises:
      RunError: a run cannot be read, the page would be too large, or the file cannot be written.
    """
    found = [run_data(run, compiled=known) for run, known in zip(runs, compiled, strict=True)]
    points = _POINTS
    while True:
        each = points // len(runs)
        data = [
            {**known, "curves": run_curves(records, each), "loads": records.loads.as_json(2 * each)}
            for known, records in found
        ]
        # The page has only ASCII characters, so its length is its size in bytes.
        page = render(data, reload_seconds=reload_seconds, now=time.time())
        if len(page) <= MOST_BYTES:
            break
        points //= 2
        if points < _FEWEST_POINTS:
            raise RunError(
                f"a page of {len(runs)} runs has {len(page):,} bytes, more than the limit of "
                f"{MOST_BYTES:,}: give fewer runs"
            )
    with os_errors_as(RunError, f"cannot write the page to {file}", "choose another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, page)
    return len(page)


def report_page(
    runs: Sequence[Path],
    file: Path,
    *,
    compile_step: Compile | None = None,
    live_seconds: float | None = None,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write a page about runs once, or write it repeatedly until all runs have ended.

    With `live_seconds`, the page reloads itself as long as a run is in progress.

    Args:
      compile_step: the function from a config to an inspection, which is called at most once for
        each run; None compiles nothing.
      live_seconds: the smallest interval between two writes of the page, in seconds; None writes
        the page once.

    Raises:
      RunError: the page cannot be written; see `write_page`.
    """
    pulses = [_Pulse(run, clock) for run in runs]
    if live_seconds is not None and compile_step is not None:
        # The first page shows the curves before the steps are compiled.
        nothing = [program_data(run, None) for run in runs]
        write_page(runs, file, nothing, reload_seconds=live_seconds)
    compiled = [program_data(run, compile_step) for run in runs]
    while True:
        begun = clock()
        # `beats` is called for every run, even after a True, since each call records changes of the
        # lock file.
        beats = [pulse.beats() for pulse in pulses]
        again_seconds = live_seconds if any(beats) else None
        size = write_page(runs, file, compiled, reload_seconds=again_seconds)
        if again_seconds is None:
            break
        # A long file of metrics takes seconds to read. The wait limits the load to a tenth of a
        # core.
        sleep(max(again_seconds, 9 * (clock() - begun)))
    say(f"page   {file}, {size:,} bytes")


class _Pulse:
    """A check whether a run is in progress: such a run touches its lock file again and again.

    The clocks of two machines are never compared. Only changes of the lock file's time count.
    """

    def __init__(self, run: Path, clock: Callable[[], float]) -> None:
        self._lock, self._clock = run / FILE_NAME, clock
        self._seen: float | None = None
        self._changed = clock()

    def beats(self) -> bool:
        """Return whether the run is in progress, as far as can be determined without a wait.

        The first call returns True whenever the lock file exists, since only a later call can see a
        change of its time.
        """
        try:
            touched = self._lock.stat().st_mtime
        except OSError:
            return False
        if touched != self._seen:
            self._seen, self._changed = touched, self._clock()
        return self._clock() - self._changed < PATIENCE_SECONDS + BEAT_SECONDS
