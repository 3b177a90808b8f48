"""The tutorial's commands, run in their order in an empty folder, print what the page shows."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
from documents import FENCE, ROOT
from runs import Jaxdist

PAGE = (ROOT / "docs/tutorial.md").read_text()
TITLED = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.M | re.S)
SESSIONS = [body for _, name, body in FENCE.findall(PAGE) if name == "console"]


def plain(line: str) -> str:
    """A line without its numbers and the width of its columns."""
    return " ".join(re.sub(r"\d[\d.,]*( [mu]?s| [kMG]?B)?", "#", line).split())


def missing(shown: list[str], printed: str) -> list[str]:
    """The lines of a page that were not printed, in the page's order."""
    lines, left = iter([plain(line) for line in printed.splitlines()]), []
    for line in shown:
        if line.strip() != "..." and plain(line) not in lines:
            left.append(line)
    return left


@pytest.mark.full
def test_every_command_prints_what_the_page_shows(jaxdist: Jaxdist, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    for name, text in TITLED.findall(PAGE):
        (jaxdist.folder / name).write_text(text)
    assert len(SESSIONS) == 10
    for number, session in enumerate(SESSIONS):
        command, *shown = session.splitlines()
        words = shlex.split(command.removeprefix("$ jaxdist "))
        # One device, or a TPU that is not there, needs a process of its own: this one has eight.
        here = number > 0 and "--topology" not in words
        done = (jaxdist.here if here else jaxdist)(*words)
        assert done.code == 0, (command, done.err)
        assert not missing(shown, done.out), (command, done.out)
    page = (jaxdist.folder / "both.html").read_text()
    assert "runs/mine and runs/eight" in page


def test_a_line_that_is_not_printed_is_missing() -> None:
    assert missing(["a 1", "  ...", "b 2.5 s"], "a 3\nx\nb 7 ms\n") == []
    assert missing(["b 1", "a 1"], "a 1\nb 1\n") == ["a 1"]
