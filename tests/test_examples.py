"""The examples run as they stand, with fewer steps."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a script in a folder of its own; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        # Run as a script, but with a name: what a config names by it must be importable.
        monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_a_loop_of_ones_own(run: Any) -> None:
    *steps, sent = run("own_loop.py", "40").splitlines()
    losses = [float(line.split()[-1]) for line in steps]
    assert len(losses) == 2
    assert losses[1] < losses[0] / 5
    assert sent == "a device sends 238 bytes to sum 34 numbers of 4 bytes"


@pytest.mark.full
def test_a_model_of_ones_own(run: Any) -> None:
    printed = run("own_model.py", "train.steps=30", "parallel.zero.stage=3")
    assert float(printed.split("held-out accuracy")[-1]) > 0.6


TENSOR = ["mesh={data: 2, tensor: 4}"]
STAGES = ["mesh={data: 2, stage: 4}", "train.microbatches=4", "parallel.zero.stage=3"]


# That a model of a user's has the numbers of one device on other plans: the draws of `.ci/run`.
@pytest.mark.parametrize(
    "plans",
    [
        [STAGES],
        pytest.param([["parallel.zero.stage=3"], TENSOR, STAGES], marks=pytest.mark.slow),
    ],
    ids=len,
)
@pytest.mark.full
def test_a_vision_transformer_of_ones_own(run: Any, plans: list[list[str]]) -> None:
    """The plans that its first lines name: the same held-out accuracy to a few images."""
    few = ["train.steps=60", "eval.every=60", "checkpoint.every=60"]
    found = [
        float(run("own_vit.py", *plan, *few, f"run.directory=runs/{i}").split()[-1])
        for i, plan in enumerate(plans)
    ]
    assert min(found) > 0.5
    assert max(found) - min(found) < 0.02


@pytest.mark.full
def test_an_image_job(run: Any) -> None:
    printed = run("image_job.py", "train.epochs=3", "eval.every=30", "model.channels=[4, 8]")
    assert "step 30: held-out accuracy" in printed
    assert printed.count("taken for") == 3


@pytest.mark.full
def test_a_plot_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells one after another, with what a notebook would show counted."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    updates: list[Any] = []

    class Shown:
        def update(self, figure: Any) -> None:
            updates.append(figure)

    names: dict[str, Any] = {"__name__": "notebook", "display": lambda *_, **__: Shown()}
    cells = json.loads((EXAMPLES / "plot_while_training.ipynb").read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, "plot_while_training.ipynb", "exec"), names)
            if "settings = " in source:
                names["settings"] += ["train.epochs=2"]
    steps = names["found"].step
    assert steps == 45
    assert len(updates) == len(names["plot"].heldout) == 3
    assert [step for step, _ in names["plot"].train] == [*range(1, steps + 1)]
