"""`jaxdist parity`: the check that every exact plan gives the same numbers as a single device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.console import Console

from jaxdist.errors import ConfigError, RunError
from jaxdist.experiment import load
from jaxdist.parity.cells import Combination, cover, possible_cells, valid_cells
from jaxdist.parity.children import Ended, answers
from jaxdist.parity.report import (
    HEADER,
    REMEDY,
    combination_line,
    from_json,
    read_earlier,
    recorded,
    results_to_json,
)
from jaxdist.parity.run import (
    BUILT_IN,
    ParityResult,
    ParitySubject,
    compare_combination,
    open_reference,
    remats_of,
    sections_of,
)
from jaxdist.parity.trace import compiled_at
from jaxdist.types import Json, JsonObject

BUILT_IN_NAME = "A gpt of 8 layers of width 32"


def parity(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    full: bool = False,
    jobs: int = 1,
    json_file: Path | None = None,
    resume: bool = False,
    console: Console,
) -> list[ParityResult]:
    """Compare combinations of plan settings with a single device, and return the results.

    The function prints a line for each combination, and then the numbers of equal, different and
    skipped combinations.

    Args:
      path: the config whose model and data are used, or None for a small language model.
      overrides: the settings that override the config.
      full: whether to compare the combinations of a full run, and not only enough combinations to
        cover every pair of settings.
      jobs: the number of processes, each of which compares one combination at a time.
      json_file: a file for the results as JSON, updated after each combination, or None to write
        none.
      resume: whether to skip the combinations that `json_file` already has.
      console: the console for the lines.

    Raises:
      JaxdistError: the config cannot be read, or cannot be built on a single device; the file
        cannot be resumed or written; or a process ended without an answer.
    """
    sections, name = BUILT_IN, BUILT_IN_NAME
    if path is not None:
        sections, name = sections_of(*load(path, overrides)), " ".join([str(path), *overrides])
    subject = open_reference(sections)
    remats = remats_of(sections)
    cells = valid_cells(remats) if full else cover([*possible_cells(remats)])
    losses = [*map(float, subject.reference.values.values())]
    report = partial(results_to_json, name, planned=len(cells), full=full, losses=losses)
    results = _earlier(json_file, report([])) if resume and json_file else []
    done = {result.cell for result in results}
    console.print(
        f"{name}: {len(cells)} combinations on 8 fake devices against one device,\n"
        f"float32, relative differences; {compiled_at()}"
        f"{f'; {len(results)} are in {json_file}' if results else ''}",
        soft_wrap=True,
    )
    console.print(HEADER, style="bold")
    told: dict[str, int] = {}
    fresh = _compared(subject, [cell for cell in cells if cell not in done], jobs)
    for result in recorded(fresh, results, json_file, report, what="comparison"):
        style = "bold red" if result.verdict == "differs" else None
        console.print(combination_line(result, told), style=style, soft_wrap=True, markup=False)
    console.print(_verdict(results))
    return results


def _earlier(file: Path, empty: Mapping[str, Json]) -> list[ParityResult]:
    """Return the results that an interrupted run wrote to a file.

    Args:
      file: the file of the interrupted run. If this file does not exist, there are no results.
      empty: the report of the present run without results, with which the file must agree. The
        losses on a single device are part of the report, since models of the same name may differ.

    Raises:
      ConfigError: the file is not a report, or is a report of another run.
    """

    def parse(report: JsonObject) -> tuple[list[ParityResult], JsonObject]:
        names = [name for name in empty if name != "results"]
        return from_json(report), {n: report[n] for n in names if report[n] != empty[n]}

    results, other = read_earlier(file, parse) or ([], {})
    if other:
        pairs = ", ".join(
            f"{name} {there} there, {empty[name]} here" for name, there in other.items()
        )
        raise ConfigError(
            f"cannot continue {file}, which a different command wrote: {pairs}; {REMEDY}"
        )
    return results


def _compared(
    subject: ParitySubject, cells: Sequence[Combination], jobs: int
) -> Iterator[ParityResult]:
    """Yield the result of each combination in the order of `cells`, from `jobs` processes.

    Raises:
      RunError: a process ended without an answer.
    """
    if jobs == 1:
        yield from (compare_combination(subject, cell) for cell in cells)
        return
    # There is no time limit, since the size of the user's model is unknown.
    with closing(
        answers(partial(compare_combination, subject), cells, jobs, limit_seconds=None)
    ) as found:
        for answer in found:
            if isinstance(answer, Ended):
                raise RunError(
                    f"one of {jobs} processes that compare plans has ended, perhaps for lack of "
                    f"memory ({answer.reason}): use fewer --jobs, and --resume to continue the "
                    "file of --json"
                )
            yield answer


def _verdict(results: Sequence[ParityResult]) -> str:
    """Return the numbers of combinations that are equal, differ or were skipped, as text.

    >>> _verdict([ParityResult(cell, "skipped") for cell in valid_cells()[:2]])
    '0 equal, 0 differ, 2 skipped'
    """
    counts = Counter(result.verdict for result in results)
    return f"{counts['equal']} equal, {counts['differs']} differ, {counts['skipped']} skipped"
