"""`jaxdist simulate fleet` from the command to its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app, measurement
from jaxdist.errors import ConfigError, RunError
from jaxdist.simulation.failing_fleet import FleetConfig

SMALL = ("days=2", "runs=2")


def fleet(*args: object) -> str:
    """What the command prints; its error is raised."""
    result = CliRunner().invoke(app, ["simulate", "fleet", *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_table_and_its_files(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    out = fleet(*SMALL, "--json", file, "--plot", tmp_path / "plot")
    assert max(map(len, out.splitlines())) <= 80
    assert "fleet  16,384 devices, a failure every 2.78 h: 17 in 2 days; 2 runs, seed 0" in out
    assert {path.name for path in (tmp_path / "plot").iterdir()} == {"fleet.png", "fleet.svg"}
    found = json.loads(file.read_text())
    assert "\n".join(found["text"]) in out
    for tier in found["tiers"]:
        every = [row["every_seconds"] for row in tier["rows"]]
        assert every == sorted(every)
        assert set(tier["marks_seconds"].values()) <= set(every)
        assert tier["best_seconds"] in every
        for row in tier["rows"]:
            assert sum(row["shares"].values()) == pytest.approx(1)
            assert row["goodput_5"] <= row["goodput_95"]
    assert fleet(*SMALL) == out


def test_snapshots_that_cost_nothing_and_are_never_lost(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    out = fleet(*SMALL, "snapshot_seconds=0", "both_copies_lost=0", "--json", file)
    alone, both = (json.loads(file.read_text())["tiers"][at] for at in (0, 1))
    assert both["marks_seconds"] == {}
    assert max(r["goodput"] for r in both["rows"]) > max(r["goodput"] for r in alone["rows"])
    assert out.count("Young") == 1


def test_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("devices: 64\nfailures_per_1000_device_days: 20\n")
    assert "fleet  64 devices" in fleet(file, *SMALL)
    assert "fleet  128 devices" in fleet(file, *SMALL, "devices=128")


def test_what_a_fleet_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"device = 3 .*did you mean 'devices'"):
        fleet("device=3")
    with pytest.raises(ConfigError, match=r"both_copies_lost = 1.5 \(override"):
        fleet("both_copies_lost=1.5")
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such file"):
        fleet("nowhere.yaml")
    with pytest.raises(RunError, match="cannot write"):
        fleet(*SMALL, "--json", "/dev/null/fleet.json")


def test_the_help_has_every_key() -> None:
    assert measurement.fleet.__doc__ is not None
    keys = measurement.fleet.__doc__.split("Keys: ")[1].split(".\n")[0]
    assert [key.strip() for key in keys.split(",")] == list(FleetConfig.model_fields)
