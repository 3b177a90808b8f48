"""The doctor: facts read from the machine (`facts`), judged (`checks`), and printed here."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from jaxdist.doctor.checks import Check, checks
from jaxdist.doctor.facts import MachineFacts, gather_facts
from jaxdist.metrics.report import SCHEMA

__all__ = ["Check", "MachineFacts", "checks", "gather_facts", "main", "show_checks"]

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def main(devices: int | None = None, as_json: bool = False, console: Console | None = None) -> int:
    """Print every check; the exit code is 1 if there is an error, else 0.

    The backend is started in a separate process, so that a crash or a hang is only a finding.

    Args:
      devices: judge a run on this many fake CPU devices; None judges the real devices.
      as_json: print them as JSON instead.
      console: the output; standard output when None.
    """
    console = Console() if console is None else console
    found = checks(gather_facts(devices))
    if as_json:
        told = {"schema": SCHEMA, "checks": [asdict(check) for check in found]}
        text = json.dumps(told, indent=2)
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    else:
        show_checks(found, console)
    return int(any(check.status == "error" for check in found))


def show_checks(found: Sequence[Check], console: Console) -> None:
    """Print a line per check, the remedy indented below it, and a count at the end."""
    name_width = max(len(check.name) for check in found)
    indent = " " * (len("warning") + name_width + 4)
    width = max(console.width - len(indent), 20)
    for check in found:
        lines = textwrap.wrap(check.value, width)
        if check.remedy:
            lines += textwrap.wrap(f"-> {check.remedy}", width, subsequent_indent="   ")
        line = Text(f"{check.status:<7}", style=_STYLES[check.status])
        console.print(line, end="")
        body = f"  {check.name:<{name_width}}  " + f"\n{indent}".join(lines)
        console.print(body, soft_wrap=True, markup=False, highlight=False)
    counts = Counter(check.status for check in found)
    summary = [f"{counts['ok']} ok", _several(counts["warning"], "warning")]
    console.print(", ".join([*summary, _several(counts["error"], "error")]), highlight=False)


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
