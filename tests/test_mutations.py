"""The faults of `scripts/mutations` can still be made, and its page is of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAULTS = tomllib.loads((ROOT / "tests/mutations.toml").read_text())["mutation"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["what"])
def test_a_fault_can_be_made_in_one_place(fault: dict[str, str]) -> None:
    text = (ROOT / fault["file"]).read_text()
    found, count = re.subn(fault["was"], fault["becomes"], text)
    assert count == 1
    compile(found, fault["file"], "exec")
    assert all((ROOT / test.split("::")[0]).exists() for test in fault["tests"])


def test_the_page_has_every_fault_and_a_test_for_each() -> None:
    page = (ROOT / "tests/mutations.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[1] for row in rows] == [fault["what"] for fault in FAULTS]
    for *_, test in rows:
        file, name = test.strip("`| ").split("::")
        assert f"def {name}(" in (ROOT / file).read_text()
