"""Figures over several runs: recorded, read back, and held by their median."""

import json
from pathlib import Path

import pytest

from benchmarks.core.ranges import markdown, ranges, read_runs, record
from benchmarks.core.report import Figure, Report
from jaxdist.errors import JaxdistError

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def run(directory, *ratios):
    figures = [Figure(f"figure {i}", ratio, 1.0, "<= 2") for i, ratio in enumerate(ratios)]
    return record(Report("some", figures), directory)


def test_runs_are_added_and_a_goal_is_held_by_the_median(tmp_path):
    for ratios in [(1.0, 3.0), (9.0, 4.0), (1.5, 1.0), (1.2,)]:
        path = run(tmp_path, *ratios)
    assert path == tmp_path / "some.jsonl"
    first, second = ranges(read_runs(path))
    assert (first.name, sorted(first.ratios), first.median) == ("figure 0", [1, 1.2, 1.5, 9], 1.35)
    assert (first.holds, second.holds) == (True, False)
    page = markdown(tmp_path)
    assert "| figure 0 | 1.2 s | 1 s | 1.35 | 1 to 9 | 4 (few) | <= 2 | yes |" in page
    assert "| figure 1 | 1 s | 1 s | 3 | 1 to 4 | 3 (few) | <= 2 | **no** |" in page
    run(tmp_path, 1.0)
    assert "| 5 | <= 2" in markdown(tmp_path)


def test_a_run_of_which_the_ratio_alone_is_known(tmp_path):
    old = {"date": "2026-01-01", "machine": "m", "figures": [{"name": "f", "ratio": 2.0}]}
    (tmp_path / "old.jsonl").write_text(json.dumps(old))
    assert "| f |  |  | 2 | 2 to 2 | 1 (few) |  |  |" in markdown(tmp_path)


@pytest.mark.parametrize("line", ["{", "{}", '{"date": "d", "machine": "m", "figures": [1]}'])
def test_a_line_that_is_no_run_is_named(line, tmp_path):
    path = run(tmp_path, 1.0)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(JaxdistError, match=r"some.jsonl line 2 is no recorded run"):
        read_runs(path)


def test_where_nothing_can_be_written_or_read_is_told(tmp_path):
    with pytest.raises(JaxdistError, match=r"no run is recorded in .*--record"):
        markdown(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(JaxdistError, match=r"cannot be recorded in .*some.jsonl: .*directory"):
        run(tmp_path / "file", 1.0)


def test_the_page_is_up_to_date():
    assert (RESULTS.parent / "results.md").read_text() == markdown(RESULTS), "see its first lines"
    for path in RESULTS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert json.loads(line)["figures"]
