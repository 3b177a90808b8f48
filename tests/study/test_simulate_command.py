"""`jaxdist simulate CONFIG` from the command to its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.errors import JaxdistError

SERVERS = (
    "strategy={type: parameter_server, workers: 4, servers: 2, "
    "simulation: {noise: 0.3, stragglers: [{worker: 0, factor: 2.0}]}}"
)
SHORT = ["train.epochs=null", "train.steps=6", "eval.every=2", "eval.batches=2"]
PLAIN = [SERVERS, *SHORT, "optim={type: sgd, learning_rate: 0.1, momentum: 0}"]
BSP = ["--variant", "bsp=strategy.consistency={type: bsp}"]
ASYNC = ["--variant", "async=strategy.consistency={type: async}"]


def simulate(config: Path, *args: object) -> str:
    """What the command prints; its error is raised."""
    result = CliRunner().invoke(app, ["simulate", str(config), *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.output


def found(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


@pytest.mark.full
def test_one_run_twice_gives_the_same_file(config: Path) -> None:
    out = simulate(config, *PLAIN, "--json", "first.json", "--plot", "pictures")
    assert simulate(config, *PLAIN, "--json", "again.json") == out
    assert Path("first.json").read_bytes() == Path("again.json").read_bytes()
    assert {path.name for path in Path("pictures").iterdir()} == {
        "simulation.png",
        "simulation.svg",
    }
    lines = out.splitlines()
    assert max(len(line) for line in lines[2:]) <= 80
    assert "shared by 4 workers; 2 servers" in lines[1]
    for text in ("virtual s", "staleness in updates: mean", "worker  gradients", "server"):
        assert any(text in line for line in lines)
    assert any(line.endswith("the bound is 2") for line in lines)
    (variant,) = found("first.json")["variants"]
    (run,) = variant["runs"]
    assert [point["updates"] for point in run["curve"]] == [0, 8, 16, 24]
    assert run["curve"][-1]["loss"] == variant["losses"][0] < run["curve"][0]["loss"]
    assert sum(one["gradients"] for one in run["workers"]) == 24
    assert run["largest_lead"] <= run["bound"] == 2


@pytest.mark.slow
def test_variants_side_by_side(config: Path) -> None:
    racks = "racks=strategy.aggregation={type: racks, size: 2} strategy.codec={type: cast}"
    args = [*PLAIN, *BSP, *ASYNC, "--variant", racks, "--seeds", 2, "--target", 2.0]
    out = simulate(config, *args, "--json", "found.json", "--plot", "pictures")
    written = found("found.json")
    assert [one["name"] for one in written["variants"]] == ["bsp", "async", "racks"]
    assert written["targets"] == [2.0, 2.0]
    assert all([run["seed"] for run in one["runs"]] == [0, 1] for one in written["variants"])
    table = [line for line in out.splitlines() if line.startswith(("bsp  ", "async  ", "racks  "))]
    assert len(table) == 6
    assert max(map(len, table)) <= 80
    bsp, free, racks = (one["runs"][0] for one in written["variants"])
    assert bsp["staleness"] == {"0": 2 * 4 * 6}
    assert bsp["curve"][0]["loss"] == free["curve"][0]["loss"]
    assert free["seconds"] < bsp["seconds"]
    assert max(racks["received_bytes"]) < 0.3 * max(bsp["received_bytes"])
    assert len(racks["rack_received_bytes"]) == 2
    again = simulate(config, *PLAIN, *BSP, *ASYNC, "--seeds", 1, "--json", "fewer.json")
    assert "Mean over 1 seeds" in again
    # 1% above its own last loss: the first always gets there.
    assert found("fewer.json")["variants"][0]["seconds_to_target"] is not None
    assert found("fewer.json")["variants"][1]["runs"][0] == free


REFUSED = [
    (SHORT, [], r"strategy.type .*synchronous.*: the command simulates only parameter servers"),
    ([SERVERS, *SHORT], ["--variant", "x=train.batch_size=32"], "'x' changes train.batch_size"),
    ([SERVERS, *SHORT], ["--variant", "x=seed=3"], "'x' changes seed"),
    (PLAIN, ["--variant", "x=strategy.workers=3"], "does not divide by 3 workers"),
    ([*PLAIN, "optim.clip_norm=1"], [], "optim.clip_norm"),
]


@pytest.mark.parametrize(("overrides", "options", "message"), REFUSED)
def test_what_cannot_be_simulated(
    config: Path, overrides: list[str], options: list[str], message: str
) -> None:
    one = [] if not options else BSP
    with pytest.raises(JaxdistError, match=message):
        simulate(config, *overrides, *one, *options)


@pytest.mark.full
def test_a_loss_that_is_not_finite_is_told(config: Path) -> None:
    out = simulate(config, *PLAIN, "optim.learning_rate=1e30", "--json", "found.json")
    assert "changes dropped: the push contains a NaN or an infinity" in out
    (run,) = found("found.json")["variants"][0]["runs"]
    assert run["dropped"]
    assert run["curve"][-1]["loss"] is None
