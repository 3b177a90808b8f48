"""The report of `jaxdist report` on how a run used its time, from the files in its directory."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from jaxdist.errors import RunError
from jaxdist.heartbeat.flight.slow import Slow
from jaxdist.heartbeat.journal import read_journal
from jaxdist.metrics.energy import tally
from jaxdist.metrics.goodput import Goodput, goodput_table, joined_lives, predicted
from jaxdist.metrics.report import write_json
from jaxdist.metrics.writer import FILE_NAME, read_metrics
from jaxdist.run.directory import existing_run
from jaxdist.run.report.proof import proof_lines, read_proof
from jaxdist.types import JsonObject

_IDLE = re.compile(r"worker_\d+_idle_share")


def report_goodput(run: Path, json_file: Path | None = None, *, console: Console) -> Goodput:
    """Print how a run used its time, write the use to `json_file` if given, and return it.

    The run may still be in progress. All attempts of a resumed run are added up. Steps after the
    checkpoint from which the next attempt continued count as lost work, and the time from the last
    record of an attempt to the next start counts as idle. If the run has several processes, the
    report covers only process 0.

    Raises:
      RunError: there is no run in the directory, or the run has no records of time.
    """
    directory = existing_run(run)
    records = read_metrics(run)
    found = joined_lives(records)
    if found is None:
        raise RunError(
            f"{run / FILE_NAME} has no records of time (split goodput): an older version wrote the "
            "run, or the run ended before its first step; with --resume the run begins to write "
            "these records"
        )
    _print(found, records, console)
    proof, events = read_proof(directory), read_journal(run)
    for line in (*proof_lines(proof), *slow_lines(events), *uncopied_lines(events)):
        console.print(line, soft_wrap=True, markup=False)
    if json_file is not None:
        energy = tally.joined_energy(records)
        more = {
            "kept": found.kept,
            "predicted": predicted(records),
            "slow": [event for event in events if event["event"] == "slow"],
            "uncopied": [event for event in events if event["event"] == "uncopied"],
            "energy": None if energy is None else energy.as_json(),
            "proof": proof,
        }
        write_json(json_file, {"run": str(run), **found.as_json(), **more}, what="report")
    return found


def print_goodput(records: Sequence[JsonObject], console: Console) -> None:
    """Print how a run used its time; print nothing if the records do not contain the time."""
    found = joined_lives(records)
    if found is not None:
        _print(found, records, console)


def _print(found: Goodput, records: Sequence[JsonObject], console: Console) -> None:
    console.print(goodput_table(found), soft_wrap=True, markup=False)
    share = predicted(records)
    if share is not None:
        told = (
            f"kept   {found.kept:.1%} of the time after the first start; the prediction was "
            f"{share:.1%}"
        )
        console.print(told, soft_wrap=True)
    energy = tally.joined_energy(records)
    if energy is not None:
        console.print(tally.energy_table(energy), soft_wrap=True, markup=False)
    shares = waiting_shares(records)
    if shares:
        console.print(
            f"       workers waited for servers {statistics.mean(shares):.1%} of their time "
            f"(mean of {len(shares)})",
            soft_wrap=True,
        )


def slow_lines(events: Sequence[JsonObject]) -> Iterator[str]:
    """Yield a line about each slow process that an agent's journal records."""
    for event in events:
        if event["event"] == "slow":
            given = event["process"], event["ratio"], event["why"], event["step"]
            told = Slow(*given, least=event["least"]).words()
            yield f"slow   generation {event['generation']}, step {event['step']}: {told}"


def uncopied_lines(events: Sequence[JsonObject]) -> Iterator[str]:
    """Yield a line about each host that stopped copying the snapshots of another host."""
    for at, event in enumerate(events):
        if event["event"] != "uncopied":
            continue
        mine = {name: event[name] for name in ("generation", "host", "why")}
        again = (
            later
            for later in events[at:]
            if later["event"] == "copied" and {name: later[name] for name in mine} == mine
        )
        end = next(
            (
                f"; the copies were made again after {e['time'] - event['time']:.0f} s"
                for e in again
            ),
            "",
        )
        yield f"copies generation {event['generation']}, {event['host']}: {event['why']}{end}"


def waiting_shares(records: Sequence[JsonObject]) -> list[float]:
    """Return, from the last record, the share of time that each worker waited for servers.

    >>> waiting_shares([{"step": 9, "split": "servers", "worker_0_idle_share": 0.25}])
    [0.25]
    """
    told = [record for record in records if record["split"] == "servers"]
    return [value for name, value in told[-1].items() if _IDLE.fullmatch(name)] if told else []
