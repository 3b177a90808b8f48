"""`jaxdist plan`: what it prints, writes, draws and refuses."""

from __future__ import annotations

import io
import json
import re
import threading
from pathlib import Path

import jax
import pytest
from rich.console import Console
from runs import Jaxdist

from jaxdist.errors import ConfigError
from jaxdist.experiment import build, load
from jaxdist.planner import report
from jaxdist.planner.confirm import Confirmed

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
    "train": {"steps": 10, "batch_size": 16},
    "parallel": {"reduce": {"type": "ring"}},
}  # fmt: skip


def test_a_table_within_80_columns_and_what_was_refused(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist.here("plan", "config.yaml", "--on", "v5e:2x4", "--json", "plans.json")
    assert done.code == 0, done
    assert max(map(len, done.out.splitlines())) <= 80
    assert "chips  8: v5e:2x4" in done.out
    assert "Plans refused" in done.out
    (told,) = json.loads((jaxdist.folder / "plans.json").read_text())["targets"]
    assert told["target"]["chips"] == 8
    first, second = told["plans"][:2]
    assert first["seconds"]["total"] <= second["seconds"]["total"]
    assert sum(told["refused"].values()) + told["plans_that_fit"] == told["plans_seen"]


def test_the_best_plan_is_written_and_accepted(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist.here("plan", "config.yaml", "--on", "v5e:2x4", "--write", "best.yaml")
    assert done.code == 0, done
    path = jaxdist.folder / "best.yaml"
    _, config = load(path)
    assert config.parallel.reduce is None  # the plan's, not the config's own
    assert config.train.steps == 10
    assert jaxdist.here("config", "show", "best.yaml").code == 0
    # A plan for eight chips is one for any eight devices.
    assert build(*reversed(load(path)), devices=jax.devices()).layout.mesh.size == 8


def test_a_plan_that_the_compiler_refuses_is_not_written(
    jaxdist: Jaxdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "confirm", lambda *_: Confirmed(refusal="too large"))
    jaxdist.config(CONFIG)
    best = jaxdist.folder / "best.yaml"
    asked = report.Asked(["v5e:2x4"], top=2, compiled=True, write=best)
    console = Console(record=True, file=io.StringIO())
    with pytest.raises(ConfigError, match="refuses all 2 printed plans"):
        report.plan(jaxdist.folder / "config.yaml", (), asked, console=console)
    assert console.export_text().count("refused") >= 2
    assert not best.exists()


def test_two_programs_are_compiled_at_the_same_time(
    jaxdist: Jaxdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other, and the faster stands first."""
    both, seconds = threading.Barrier(2, timeout=60), iter([2.0, 1.0])

    def confirm(*_: object) -> Confirmed:
        both.wait()
        return Confirmed(next(seconds), 3_000_000_000)

    monkeypatch.setattr(report, "confirm", confirm)
    jaxdist.config(CONFIG)
    asked = report.Asked(["v5e:2x4"], top=2, compiled=True)
    console = Console(quiet=True)
    (result,) = report.plan(jaxdist.folder / "config.yaml", (), asked, console=console)
    assert [one.seconds for one in result.confirmed] == [1.0, 2.0]


def test_memory_alone_is_asked_for(jaxdist: Jaxdist, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that the compiler refuses stands last, and is not the one that is written."""
    sizes = iter([Confirmed(refusal="too large", laid_out=True), 3_000_000_000])

    def lay_out(path: Path, overrides: object, plan: object, target: object, seconds: float):
        size = next(sizes)
        return size if isinstance(size, Confirmed) else Confirmed(seconds, size, laid_out=True)

    monkeypatch.setattr(report, "lay_out", lay_out)
    jaxdist.config(CONFIG)
    asked = report.Asked(["v5e:2x4"], top=2, laid_out=True)
    console = Console(record=True, file=io.StringIO(), width=80)
    (result,) = report.plan(jaxdist.folder / "config.yaml", (), asked, console=console)
    said = console.export_text()
    assert [bool(one.refusal) for one in result.confirmed] == [False, True]
    assert result.seconds == result.top[0].seconds.total
    assert "3 GB" in said
    assert re.search(r"│ +refused *$", said, re.MULTILINE)
    assert max(map(len, said.splitlines())) <= 80


def test_explained_with_a_picture_and_energy(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG, energy={"watts": 200.0, "pue": 1.1, "grid": 100.0})
    done = jaxdist.here("plan", "config.yaml", "--on", "v5e:2x4", "--explain", 1, "--plot", "drawn")
    assert done.code == 0, done
    assert max(map(len, done.out.splitlines())) <= 200
    said = " ".join(done.out.split())
    for part in ("Time of a step", "Memory of each v5e", "kWh", "PUE 1.1, 100 g/kWh", "10 steps"):
        assert part in said
    drawn = (jaxdist.folder / "drawn/plan.svg").read_text()
    assert drawn.startswith("<?xml")
    assert "memory of a chip, 16.9 GB" in drawn
    # A part that is too small to be seen has its figure, and an axis no row of zeros.
    assert re.search(r"parameters, \d\S* [kM]B", drawn)
    assert re.search(r"(milli|micro)seconds of a step, \d\S* [mu]s in all", drawn)


def test_gpus_are_planned_by_formula_and_that_is_said(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist.here("plan", "config.yaml", "--on", "h100:2x8", "--explain", 1)
    assert done.code == 0, done
    said = " ".join(done.out.split())
    assert "The ranking uses only formulas" in said
    assert "board power" in said


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--on", "v5q:2x2"], "topology 'v5q:2x2'"),
        (["--on", "v5e:2x4", "--plot", "drawn"], "add --explain N"),
        (["--on", "v5e:2x4", "--explain", "99999"], "use a number from 1 to"),
        (["--on", "v5e:2x4", "train.batch_size=7"], "batch does not divide"),
        (["--on", "v5e:2x4", "optim.type=lars"], "optim.type"),
        (
            ["--on", "v5e:2x4", "parallel={deterministic: {type: strict, shards: 8}}"],
            "the planner does not search with this setting",
        ),
        (["--on", "v5e:2x4", "model.freeze=[nothing]"], "nothing"),
        (["--on", "v5e:2x4", "--write", "no/such/best.yaml"], "No such file"),
        (
            ["--on", "v5e:1x1", "model.layers=64", "model.embed=8192", "model.mlp=32768"],
            "chips would be enough",
        ),
    ],
)
def test_bad_input_is_one_message(jaxdist: Jaxdist, arguments: list[str], part: str) -> None:
    jaxdist.config(CONFIG)
    refused = jaxdist.here("plan", "config.yaml", *arguments)
    assert refused.code in (2, 3), refused
    assert part in refused.message


def test_gpus_are_not_compiled_for(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    refused = jaxdist("plan", "config.yaml", "--on", "h100:2x8", "--compile")
    assert refused.code == 2, refused
    assert "--compile: h100:2x8: The ranking uses only formulas" in refused.message
    refused = jaxdist.here("plan", "config.yaml", "--on", "h100:2x8", "--memory")
    assert "--memory: h100:2x8: The ranking uses only formulas" in refused.message


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_the_best_plans_compiled_for_a_tpu(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist("plan", "config.yaml", "--on", "v5e:2x2", "--top", 1, "--compile", "--json", "p")
    assert done.code == 0, done
    assert re.search(r"compiled: data .*: [\d.]+ [mu]?s", done.out)
    (target,) = json.loads((jaxdist.folder / "p").read_text())["targets"]
    (plan,) = target["plans"]
    assert plan["compiled"]["refusal"] == ""
    assert plan["compiled"]["peak_bytes"] > 0
    assert plan["compiled"]["sent_bytes"]["data"] > 0


def test_several_slices(jaxdist: Jaxdist) -> None:
    jaxdist.config(CONFIG)
    done = jaxdist.here(
        "plan", "config.yaml", "--on", "v5e:2x2", "--slices", 2, "--write", "best.yaml"
    )
    assert done.code == 0, done
    assert "8: 2 x v5e:2x2" in done.out
    _, config = load(Path(jaxdist.folder / "best.yaml"))
    assert config.mesh.model_dump()["data"]["dcn"] == 2
