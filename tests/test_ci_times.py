"""What `.ci/times.py` says of the seconds of `.ci/run`."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from spent import Spent, counts_here

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("ci_times", ROOT / ".ci/times.py")
assert SPEC is not None
assert SPEC.loader is not None
times = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(times)


@pytest.mark.parametrize(
    ("seconds", "recorded", "grown"),
    [
        (120.0, 100.0, False),  # a fifth, not more
        (121.0, 100.0, True),
        (80.0, 100.0, False),
        (9.9, 5.0, False),  # nearly twice, of next to nothing
        (10.0, 5.0, True),
        (500.0, None, False),  # new
    ],
)
def test_a_part_has_grown_by_more_than_a_fifth(
    seconds: float, recorded: float | None, grown: bool
) -> None:
    assert times.has_grown(seconds, recorded) == grown


def test_the_table_shows_each_part_and_warns_of_those_that_have_grown() -> None:
    measured = times.read_measured("130\tquick tests\n90\tquick tests: tests/run\n7\tthe wheel\n")
    shown = times.table(measured, {"quick tests": 100, "quick tests: tests/run": 89, "gone": 1})
    assert shown.splitlines() == [
        "   seconds   recorded",
        "     130.0      100.0  quick tests",
        "      90.0       89.0  quick tests: tests/run",
        "       7.0          -  the wheel",
        "warning: 'quick tests' took 130 s, 30 s over the record: "
        "if the machine is quiet, make it cheaper or record the new time",
    ]


def test_a_part_that_is_recorded_at_zero_seconds_is_compared_too() -> None:
    shown = times.table({"quick tests: jaxdist": 8.0}, {"quick tests: jaxdist": 0.0})
    assert "'quick tests: jaxdist' took 8 s, 8 s over the record" in shown


def test_what_is_recorded_is_what_the_next_run_is_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, record = tmp_path / "measured", tmp_path / "times.json"
    measured.write_text("10.04\tlint\n")
    times.main([str(measured), "--record"], record)
    assert json.loads(record.read_text()) == {"lint": 10.0}
    measured.write_text("30\tlint\n")
    times.main([str(measured)], record)  # growth is told, and ends nothing
    assert "20 s over the record" in capsys.readouterr().out
    assert json.loads(record.read_text()) == {"lint": 10.0}


def test_the_seconds_of_each_folder_are_written_beside_what_is_there(tmp_path: Path) -> None:
    spent, measured = Spent(), tmp_path / "measured"
    for nodeid, seconds in [("run/test_a.py::b", 1.0), ("run/test_c.py::d", 2.5), ("a.py::b", 1)]:
        report = pytest.TestReport(
            f"tests/{nodeid}", ("", None, ""), {}, "passed", None, "call", duration=seconds
        )
        spent.pytest_runtest_logreport(report)
    measured.write_text("7.0\tinstall\n")
    spent.write(measured)
    assert times.read_measured(measured.read_text()) == {"install": 7, "tests/run": 3.5, "tests": 1}


def test_workers_do_not_count_what_the_main_process_counts(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "FOLDER_SECONDS", "times")
    monkeypatch.delattr(pytestconfig, "workerinput", raising=False)
    assert counts_here(pytestconfig)
    monkeypatch.setattr(pytestconfig, "workerinput", {}, raising=False)
    assert not counts_here(pytestconfig)
