"""The data that a page shows about a run, read only from the run's directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from jaxdist.checkpoint.layout import steps_present
from jaxdist.config import read
from jaxdist.config.document import flat
from jaxdist.config.files import parse_json
from jaxdist.errors import JaxdistError
from jaxdist.experiment import load
from jaxdist.heartbeat.journal import read_journal
from jaxdist.metrics.energy import tally
from jaxdist.metrics.goodput import joined_lives, predicted
from jaxdist.metrics.writer import FILE_NAME, iterate_metrics
from jaxdist.pipeline_schedules.draw.text import summary
from jaxdist.pipeline_schedules.simulate import Timeline, simulate
from jaxdist.run.directory import RunDirectory, existing_run
from jaxdist.run.report.goodput import slow_lines, uncopied_lines
from jaxdist.run.report.page.curves import RunRecords, collect
from jaxdist.run.report.proof import proof_lines, read_proof
from jaxdist.types import Json, JsonObject

INSPECTION = "inspect.json"
"""The name of the file in a run directory that has the output of `jaxdist inspect --json`. A user
may put this file there."""
MOST_BOXES = 4000
"""The largest number of boxes in the drawing of a schedule. For a larger schedule the page shows
only the numbers."""
MOST_LETTERS = 200
"""The largest number of characters that the page shows of a setting's value."""

Compile = Callable[[Path], JsonObject]
"""A function from the path of a resolved config to the output of `jaxdist inspect --json`; the
function may raise JaxdistError.
"""


def run_data(run: Path, *, compiled: JsonObject) -> tuple[JsonObject, RunRecords]:
    """Return the data that a page shows about a run, and the run's records.

    The run may still be in progress.

    Args:
      compiled: the inspection of the compiled step, as `program_data` returns it.

    Raises:
      RunError: there is no run in the directory, or a line of its metrics is not a record.
    """
    directory = existing_run(run)
    records = RunRecords()
    if (run / FILE_NAME).exists():
        records = collect(iterate_metrics(run))
    time, energy = joined_lives(records.others), tally.joined_energy(records.others)
    events = read_journal(run)
    found = {
        "path": str(run),
        "going": directory.lock.exists(),
        "last_step": records.last_step,
        "last_time": records.last_time,
        "time": None if time is None else {**time.as_json(), "kept": time.kept},
        "predicted": predicted(records.others),
        "notes": [*slow_lines(events), *uncopied_lines(events)],
        "energy": None if energy is None else energy.as_json(),
        "checkpoints": steps_present(directory.checkpoints),
        "proof": [*proof_lines(read_proof(directory))],
        "versions": _versions(directory),
        **_configured(directory),
        **compiled,
    }
    return found, records


def run_curves(records: RunRecords, points: int) -> list[Json]:
    """Return the curves of a run, with about `points` points in total."""
    most = max(points // max(len(records.curves), 1), 20)
    return [
        {"split": split, "name": name, **curve.as_json(most, smoothed=name == "loss")}
        for (split, name), curve in records.curves.items()
    ]


def _configured(directory: RunDirectory) -> JsonObject:
    """Return the settings of a run and, if it has pipeline stages, the schedule of its pipeline."""
    try:
        values = flat(read(directory.config).values)
    except JaxdistError as error:
        return {"config": {}, "config_error": str(error), "schedule": None}
    settings = {path: _text(value) for path, value in values.items()}
    try:
        return {"config": settings, "schedule": _schedule(directory.config)}
    except JaxdistError as error:
        # If another version of jaxdist wrote the config, this version may refuse it, and the page
        # shows the error.
        return {"config": settings, "schedule": {"summary": str(error), "boxes": []}}


def _text(value: Json) -> str:
    """Return a setting's value as text of at most `MOST_LETTERS` characters.

    >>> _text(None), _text(1e-3), _text("gpt")
    ('null', '0.001', 'gpt')
    """
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 3] + "..."


def _schedule(config_file: Path) -> JsonObject | None:
    _, config = load(config_file)
    stages = config.mesh.stage
    if not isinstance(stages, int) or stages < 2:
        return None
    schedule = config.parallel.pipeline.schedule
    timeline = simulate(schedule.build(stages, config.train.microbatches))
    boxes = [] if sum(map(len, timeline.spans)) > MOST_BOXES else _boxes(timeline)
    return {"summary": summary(timeline), "boxes": boxes, "makespan": timeline.makespan}


def _boxes(timeline: Timeline) -> list[Json]:
    return [
        [[str(span.task.kind), span.task.microbatch, span.task.chunk, span.start, span.end]
         for span in row]
        for row in timeline.spans
    ]  # fmt: skip


def _versions(directory: RunDirectory) -> Json:
    with suppress(OSError, ValueError):
        return parse_json(directory.versions.read_bytes())
    return {}


def program_data(run: Path, compile_step: Compile | None) -> JsonObject:
    """Return the inspection of a run's compiled step, or the reason why there is no inspection.

    Args:
      compile_step: the function that inspects the step if the run's directory has no
        `inspect.json`; None compiles nothing.
    """
    file, config = run / INSPECTION, run / RunDirectory(run).config.name
    remedy = (
        f"`jaxdist inspect {config} --json {file}` writes these figures, and the next page will "
        "show them"
    )
    try:
        if file.exists():
            return {"program": _shown(parse_json(file.read_bytes()))}
        if compile_step is None:
            return {"program": None, "why_no_program": f"The step was not compiled; {remedy}"}
        return {"program": _shown(compile_step(config))}
    except JaxdistError as error:
        why = f"{error}; {remedy}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{file} is not what `jaxdist inspect --json` writes ({error}); {remedy}"
    return {"program": None, "why_no_program": why}


_SHOWN = ("model", "step", "devices", "axes", "flops", "memory", "time")


def _shown(inspection: Json) -> JsonObject:
    """Return an inspection without its ledger, which a page does not show and which may be long."""
    found = {key: inspection[key] for key in _SHOWN}
    return found | {"time": None if found["time"] is None else found["time"].get("seconds")}


def setting_differences(runs: Sequence[JsonObject]) -> list[Json]:
    """Return a row for each setting that differs: the setting's path, and its value in each run.

    >>> setting_differences([{"config": {"a": "1", "b": "2"}}, {"config": {"a": "1", "b": "3"}}])
    [['b', '2', '3']]
    """
    paths = dict.fromkeys(path for run in runs for path in run["config"])
    rows = [[path, *(run["config"].get(path) for run in runs)] for path in paths]
    return [row for row in rows if len(set(row[1:])) > 1]
