"""`jaxdist simulate choice`: step times of servers and of an all-reduce."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from jaxdist.errors import ConfigError
from jaxdist.simulation.choice import RING, Choice, ChoiceConfig, Speeds, ring_seconds, run_choice

SMALL = ("gbits=[1]", "touched=[1,0.01]", "workers=4", "servers=2", "step_seconds=0.2")


def choice(*settings: str, file: Path | None = None) -> tuple[str, list[Choice]]:
    out = io.StringIO()
    rows = run_choice(settings, json_file=file, console=Console(file=out, width=80))
    return out.getvalue(), rows


@pytest.mark.slow
def test_the_table_and_its_file(tmp_path: Path) -> None:
    """A dense model over slow links wants an all-reduce; a sparse one with a straggler does not."""
    out, rows = choice(*SMALL, file=tmp_path / "choice.json")
    assert max(map(len, out.splitlines())) <= 80
    found = {(row.touched, row.speeds): row for row in rows}
    assert found[1.0, "equal"].take == RING
    assert found[0.01, "one 2x slow"].take == "async"
    for row in rows:
        assert row.seconds["bsp"] > row.seconds["ssp 2"] > 0
        slower = row.seconds["bsp"] - found[row.touched, "equal"].seconds["bsp"]
        assert row.speeds != "one 2x slow" or 0 < slower <= 0.2
    written = json.loads((tmp_path / "choice.json").read_text())
    assert [row["take"] for row in written["rows"]] == [row.take for row in rows]
    assert written["config"]["workers"] == 4


@pytest.mark.slow
def test_bsp_moves_what_its_cards_can() -> None:
    """All in step: each server sends all its workers their parameters, and hears them, in turn."""
    _, rows = choice("gbits=[1]", "touched=[1]", "workers=4", "servers=2", "step_seconds=0.001")
    bsp = rows[0].seconds["bsp"]
    assert bsp == pytest.approx(2 * 1e8 * 4 / 2 / 1.25e8, rel=0.05)


def test_a_ring_gathers_what_was_touched_where_that_is_less() -> None:
    config = ChoiceConfig(latency_seconds=0.0)
    times = [ring_seconds(config, share, 1.0, Speeds("equal")) for share in (1.0, 0.5, 0.01)]
    reduced, gathered = 2 * 7 / 8 * 1e8 / 1.25e8, 7 / 8 * 8 * 1e6 / 1.25e8
    assert times == pytest.approx([0.1 + reduced, 0.1 + reduced, 0.1 + gathered])


def test_settings_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="did you mean 'workers'"):
        choice("worker=3")
    with pytest.raises(ConfigError, match="touched"):
        choice("touched=[0]")
