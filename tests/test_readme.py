"""README and concepts: short; pictures and paths are the code's, figures the recorded ones."""

import re
import statistics

import pytest
from documents import README, ROOT
from test_layers import LAYERS

from benchmarks.core.ranges import ranges, read_runs

TEXT = README.read_text()
CONCEPTS = (ROOT / "docs/concepts.md").read_text()
PACKAGE = ROOT / "jaxdist"
MOST_LINES = 150


def test_it_is_short():
    assert len(TEXT.splitlines()) <= MOST_LINES


def test_the_two_commands_come_first():
    head = TEXT.splitlines()[:20]
    assert sum(line.startswith("    pip install") for line in head) == 2


def test_the_picture_shows_the_layers():
    picture = CONCEPTS.split("## Layers of the code")[1].split("```")[1]
    rows = [re.split(r" {3,}", line)[0].split() for line in picture.splitlines()[1:]]
    there = [
        {part for part in parts if part_exists(part) and part != "__main__"} for parts in LAYERS
    ]
    assert [set(row) for row in reversed(rows)] == [parts for parts in there if parts]


def part_exists(part):
    """A room, not a sub-room with a layer of its own."""
    return (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()


def test_what_is_to_be_read_is_there():
    section = CONCEPTS.split("### What to read first")[1]
    paths = re.findall(r"`([\w/]+\.py)`", section)
    folders = [PACKAGE, PACKAGE / "parallel/pipeline"]
    assert len(paths) > 15
    assert not [p for p in paths if not any((folder / p).is_file() for folder in folders)]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", TEXT))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).is_file()


def rows():
    """The table of results: figure, median, range, runs, goal, command."""
    table = TEXT.split("## Results")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_eight_results():
    assert len(rows()) == 8


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_results_are_those_that_are_recorded(row):
    figure, median, spread, count, goal, command = row
    if "bench" not in command:
        page = "parity_draw" if "--draw" in command else "parity"
        equal, all_ = count.split(" of ")
        text = (ROOT / f"docs/{page}.md").read_text()
        assert f"{equal} of {all_} combinations equal" in text or f"- {equal} equal, 0 ref" in text
        assert equal == all_
        return
    bench = re.search(r"bench (\w+)", command)[1]
    (found,) = (
        found
        for found in ranges(read_runs(ROOT / f"docs/results/{bench}.jsonl"))
        if found.name == figure
    )
    assert float(median) == float(f"{statistics.median(found.ratios):.3g}")
    assert spread == f"{min(found.ratios):.3g} to {max(found.ratios):.3g}"
    assert (count, goal) == (str(len(found.ratios)), found.goal)
