#!/usr/bin/env python3
"""Compare the time of each part of `.ci/run` with the record, and warn if a time has grown.

    .ci/times.py MEASURED            # compare
    .ci/times.py MEASURED --record   # compare, then MEASURED becomes the record

A line of the file MEASURED has a part's seconds, a tab, and the part's name. A folder of tests
follows its part, as `part: folder`. Nothing fails because of time: machines and their load differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RECORD = Path(__file__).parent / "times.json"
GROWN = 1.2
"""The multiple of the recorded time above which a time is reported."""
LEAST_GROWTH_SECONDS = 5.0
"""The growth, in seconds, that a small part may show when the machine is busy for a moment."""

Times = dict[str, float]


def read_measured(text: str) -> Times:
    """Return the seconds by name; the result for a name that occurs twice is the sum.

    >>> read_measured("2.5\\tlint\\n1\\ttests\\n0.5\\ttests\\n")
    {'lint': 2.5, 'tests': 1.5}
    """
    times: Times = {}
    for line in text.splitlines():
        seconds, name = line.split("\t")
        times[name] = times.get(name, 0.0) + float(seconds)
    return times


def has_grown(seconds: float, recorded: float | None) -> bool:
    """Whether a part takes over a fifth more than recorded; what has no record has not grown."""
    if recorded is None or seconds - recorded < LEAST_GROWTH_SECONDS:
        return False
    return seconds > GROWN * recorded


def table(measured: Times, record: Times) -> str:
    """A line for each part: its seconds, those recorded, its name, and a warning if it has grown.

    What was recorded and not measured (an optional part that was skipped) is left out.
    """
    lines = ["   seconds   recorded"]
    for name, seconds in measured.items():
        known = record.get(name)
        shown = "-" if known is None else f"{known:.1f}"
        lines.append(f"{seconds:10.1f} {shown:>10}  {name}")
    for name, seconds in measured.items():
        known = record.get(name)
        if known is not None and has_grown(seconds, known):
            lines.append(
                f"warning: {name!r} took {seconds:.0f} s, {seconds - known:.0f} s over the record"
                ": if the machine is quiet, make it cheaper or record the new time"
            )
    return "\n".join(lines)


def main(arguments: list[str], record: Path = RECORD) -> None:
    measured = read_measured(Path(arguments[0]).read_text())
    known = json.loads(record.read_text()) if record.exists() else {}
    print(table(measured, known))
    if "--record" in arguments[1:]:
        rounded = {name: round(seconds, 1) for name, seconds in measured.items()}
        record.write_text(json.dumps(rounded, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
