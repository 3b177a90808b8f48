"""The command `jaxdist doctor`, which reads facts about a machine and checks them."""

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
    """Print every check, and return the exit code: 1 if a check found an error, else 0.

    The backend starts in a separate process, so that its crash or hang is reported as an error.

    Args:
      devices: the number of fake CPU devices for which to check the machine; None checks the real
        devices.
      as_json: whether to print the checks as JSON.
      console: the console on which to print; None uses standard output.
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
    """Print a line for each check, with its remedy below the line, and the counts at the end."""
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
