"""Child processes that are spoken to in lines of JSON."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest

from jaxdist.runtime import children
from jaxdist.runtime.children import Child, Event, end_together, last_lines

ECHO = """
import sys
from jaxdist.runtime.children import Parent
parent = Parent()
print("not a message")
for what in parent.hear():
    parent.say("heard", what=what)
print("done", file=sys.stderr)
"""
STUCK = "import time; time.sleep(60)"


def begun(program: str, folder: Path, events: SimpleQueue[Event], name: str = "child") -> Child:
    def begin(stdin: int, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program], stdin=stdin, stderr=stderr)

    return Child(name, begin, log=folder / "logs" / name, events=events)


def test_messages_and_the_end_come_as_events(tmp_path: Path):
    events = SimpleQueue[Event]()
    child = begun(ECHO, tmp_path, events)
    child.say({"a": 1})
    assert events.get(timeout=60) == (child, {"event": "heard", "what": {"a": 1}}, None)
    end_together([child])
    assert events.get(timeout=60) == (child, {}, 0)
    assert child.last_words() == "not a message\ndone"
    child.say({"a": 2})  # nothing happens: its end was an event


def test_a_child_that_is_killed_has_its_signal_as_its_code(tmp_path: Path):
    events = SimpleQueue[Event]()
    child = begun(STUCK, tmp_path, events)
    child.kill()
    assert events.get(timeout=60).code == -9


def test_stuck_children_are_killed_at_one_deadline(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(children, "END_SECONDS", 0.2)
    events = SimpleQueue[Event]()
    stuck = [begun(STUCK, tmp_path, events, name) for name in ("a", "b")]
    end_together(stuck)
    assert [child.process.returncode for child in stuck] == [-9, -9]


@pytest.mark.parametrize(
    ("count", "words"), [(1, "three"), (2, "two\nthree"), (9, "one\ntwo\nthree")]
)
def test_the_last_lines_of_a_log(count: int, words: str, tmp_path: Path):
    (tmp_path / "log").write_text("one\ntwo\nthree\n\n")
    assert last_lines(tmp_path / "log", count) == words
    assert last_lines(tmp_path / "none", count) == ""
