"""`jaxdist plan` with several targets: side by side, with one numbering."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console
from runs import Jaxdist

from jaxdist.errors import ConfigError, MeshError
from jaxdist.experiment import load
from jaxdist.planner import report
from jaxdist.planner.confirm import Confirmed
from jaxdist.planner.target import parse_target, parse_targets

CONFIG = {
    "model": {
        "type": "gpt", "layers": 2, "embed": 256, "heads": 2, "mlp": 512,
        "compute_dtype": "bfloat16",
    },
    "data": {
        "type": "synthetic", "kind": "tokens", "vocab_size": 512, "window": 256,
        "heldout_examples": 0,
    },
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 10, "batch_size": 32},
}  # fmt: skip
BOTH = ("--on", "v5e:2x2", "--on", "2xv4:2x2x1", "--top", 2)
LARGE = ("model.layers=32", "model.embed=4096", "model.mlp=16384")


def test_targets_stand_side_by_side_the_fastest_first(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist.here("plan", "config.yaml", *BOTH, "--json", "p", "--write", "best.yaml")
    assert done.code == 0, done
    assert max(map(len, done.out.splitlines())) <= 80
    said = " ".join(done.out.split())
    assert "The best plan of each" in said
    assert "chips 4: v5e:2x2" in said
    assert "chips 8: 2 x v4:2x2x1" in said
    told = json.loads((jaxdist.folder / "p").read_text())["targets"]
    first, second = told
    assert first["plans"][0]["seconds"]["total"] < second["plans"][0]["seconds"]["total"]
    assert [plan["number"] for one in told for plan in one["plans"]] == [1, 2, 3, 4]
    # The power of v4 is published, that of v5e is not.
    assert {one["target"]["device"]: one["kwh"] is None for one in told} == {
        "v4": False,
        "v5e": True,
    }
    seconds = first["plans"][0]["seconds"]["total"]
    tokens = 32 * 256
    assert first["chip_hours"] == pytest.approx(
        first["target"]["chips"] * seconds / 3600 / tokens * 1e9
    )
    assert f"The first plan, on {first['target']['text']}, is in" in said
    _, config = load(jaxdist.folder / "best.yaml")
    assert config.train.microbatches == first["plans"][0]["settings"]["train.microbatches"]


@pytest.mark.full
def test_numbers_go_on_from_target_to_target(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist.here("plan", "config.yaml", *BOTH, "--json", "p", "--explain", 3)
    assert done.code == 0, done
    second = json.loads((jaxdist.folder / "p").read_text())["targets"][1]
    assert f"Plan 3: {second['plans'][0]['plan']}" in " ".join(done.out.split())
    assert f"Memory of each {second['target']['device']}" in done.out
    refused = jaxdist.here("plan", "config.yaml", *BOTH, "--explain", 5)
    assert refused.code == 2
    assert (
        "4 plans are printed for 2 targets; use a number from 1 to 4, or give --on once"
        in refused.message
    )


@pytest.mark.full
def test_a_target_on_which_nothing_fits_does_not_hide_the_others(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist.here(
        "plan", "config.yaml", *LARGE, "--on", "v5e:1x1", "--on", "v5p:2x2x2", "--json", "p"
    )
    assert done.code == 0, done
    said = " ".join(done.out.split())
    assert "v5e:1x1: none of" in said
    assert "8: v5p:2x2x2" in said
    there, nothing = json.loads((jaxdist.folder / "p").read_text())["targets"]
    assert there["nothing"] is None
    assert "chips would be enough" in nothing["nothing"]
    refused = jaxdist.here("plan", "config.yaml", *LARGE, "--on", "v5e:1x1", "--on", "v5e:2x2")
    assert refused.code == 2
    assert refused.message.count("fits: ") == 2


@pytest.mark.full
def test_watts_of_the_config_are_of_one_kind_of_chip(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG, energy={"watts": 200.0})
    two = jaxdist.here("plan", "config.yaml", *BOTH)
    assert "energy.watts describes a single type of chip" in " ".join(two.out.split())
    one = jaxdist.here("plan", "config.yaml", "--on", "v5e:2x2", "--on", "v5e:2x4", "--json", "p")
    assert "energy.watts describes a single type" not in one.out
    assert all(t["kwh"] for t in json.loads((jaxdist.folder / "p").read_text())["targets"])


@pytest.mark.parametrize(
    ("known", "words"),
    [
        # The fastest by formula is refused: the other target's plan is the first.
        (
            lambda plan, target: Confirmed(refusal="too large" * (target.chips == 8), seconds=1.0),
            "",
        ),
        (lambda plan, target: Confirmed(refusal="too large"), "refuses all 4 printed plans"),
    ],
)
@pytest.mark.every(2)
def test_the_plan_written_is_one_that_the_compiler_takes(
    jaxdist: Jaxdist,
    monkeypatch: pytest.MonkeyPatch,
    known: Callable[..., Confirmed],
    words: str,
) -> None:
    monkeypatch.setattr(report, "confirm", lambda *given: known(given[2], given[3]))
    jaxdist.config(CONFIG)
    best = jaxdist.folder / "best.yaml"
    asked = report.Asked(["v5e:2x2", "2xv4:2x2x1"], top=2, compiled=True, write=best)
    console = Console(record=True, file=io.StringIO())
    if words:
        with pytest.raises(ConfigError, match=words):
            report.plan(jaxdist.folder / "config.yaml", (), asked, console=console)
        return
    first, second = report.plan(jaxdist.folder / "config.yaml", (), asked, console=console)
    assert (first.target.chips, first.seconds) == (4, 1.0)
    assert second.refused
    assert load(best)[1].mesh.sizes()["data"] in (1, 2, 4)


def test_slices_are_of_those_that_do_not_say() -> None:
    chips = [one.chips for one in parse_targets(["v5p:2x2x1", "3xv5e:2x2", "2 x h100:4x8"], 2)]
    assert chips == [8, 12, 64]
    assert parse_target("2xh100:4x8").words == "h100:8x8"
    with pytest.raises(MeshError, match="2 x v5e:2x2 is named twice"):
        parse_targets(["v5e:2x2", "2xv5e:2x2"], 2)
    with pytest.raises(MeshError, match="0 slices of v5e:2x2 are not a target"):
        parse_target("0xv5e:2x2")
