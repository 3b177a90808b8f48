"""`jaxdist study batch-scaling` from the command to its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.errors import ConfigError, JaxdistError, RunError
from jaxdist.study.trainer import Trainer
from jaxdist.study.trial import Trial, TrialOutcome

SMALL = ["--batches", "128,64", "--optimizers", "lamb,sgd", "--seeds", "2"]


def study(config: Path, *args: object) -> str:
    """What the command prints; its error is raised."""
    result = CliRunner().invoke(app, ["study", "batch-scaling", str(config), *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """The trials that were trained; set `stop_after` to press Ctrl-C after so many."""
    trials: list[Trial] = []

    def call(self: Trainer, trial: Trial) -> TrialOutcome:
        if len(trials) == call.stop_after:  # pyright: ignore[reportFunctionMemberAccess]
            raise KeyboardInterrupt
        trials.append(trial)
        accuracy = 0.99 - abs(trial.learning_rate - 0.05) - trial.batch_size / 1e4
        return TrialOutcome(trial, 3, {"loss": 0.1, "accuracy": accuracy}, False, 0.5)

    call.stop_after = -1  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(Trainer, "__call__", call)
    return trials


@pytest.mark.slow
def test_a_small_study_end_to_end(config: Path) -> None:
    options = ["--no-tune", "--batches", "128,64", "--optimizers", "sgd", "--seeds", "2"]
    out = study(config, *options, "--json", "o/found.json", "--plot", "o", "seed=7")
    assert "mlp on images: digits of scikit-learn" in out
    assert "1 epochs at each batch size; mesh {data: 8} on 8 x cpu." in out
    assert "learning rate by the rule: " in out
    assert "learning rate tuned" not in out
    found = json.loads(Path("o/found.json").read_text())
    assert found["metric"] == "accuracy"
    assert "\n".join(found["table"]) in out
    assert [cell["batch_size"] for cell in found["cells"]] == [64, 128]
    reported = [run for run in found["runs"] if run["seed"] in (10, 11)]
    assert {run["seed"] for run in found["runs"]} == {7, 8, 9, 10, 11}
    assert [(run["batch_size"], run["steps"]) for run in reported] == [(64, 22)] * 2 + [
        (128, 11)
    ] * 2
    at_base = [run["metrics"]["accuracy"] for run in reported if run["batch_size"] == 64]
    assert found["cells"][0]["mean"] == pytest.approx(sum(at_base) / 2)
    assert at_base[0] > 0.5
    assert len(Path("o/found.runs.jsonl").read_text().splitlines()) == len(found["runs"])
    assert Path("o/batch_scaling.png").stat().st_size > 5000
    assert Path("o/batch_scaling.svg").stat().st_size > 5000


@pytest.mark.full
def test_an_interrupted_study_goes_on(config: Path, trained: list[Trial], monkeypatch: Any) -> None:
    monkeypatch.setattr(Trainer.__call__, "stop_after", 13)
    stopped = CliRunner().invoke(app, ["study", "batch-scaling", str(config), *SMALL])
    assert stopped.exit_code == 130
    assert "13 runs are saved in runs/tiny-batch-scaling.runs.jsonl" in stopped.output
    journal = Path("runs/tiny-batch-scaling.runs.jsonl")
    assert len(journal.read_text().splitlines()) == 13
    monkeypatch.setattr(Trainer.__call__, "stop_after", -1)
    whole = study(config, *SMALL)
    assert len(trained) == len(set(trained)), "no run is made twice"
    assert len(journal.read_text().splitlines()) == len(trained)
    count = len(trained)
    assert study(config, *SMALL).splitlines()[-9:] == whole.splitlines()[-9:]
    assert len(trained) == count
    study(config, *SMALL, "train.epochs=2")
    assert len(trained) == 2 * count, "other settings, other runs"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batches", ","], "--batches is empty"),
        (["--batches", "64,2048"], "--batches 2048 is larger than the training split of 1,438"),
        (["--batches", "64,100"], "a batch of 100 does not divide over 8 devices"),
        (["--batches", "64", "--optimizers", "adam"], "'adam': did you mean 'adamw'"),
        (["--batches", "64", "optim.type=sgd"], "override 'optim.type=sgd' has no effect here"),
        (
            ["--batches", "64", "train.batch_size=8"],
            "has no effect here, because the study sets optim, ",
        ),
        (["--batches", "64", "--epochs", "-1"], "train.epochs"),
        (["--batches", "64", "seed=4294967293"], "4294967298"),
        (["--batches", "64", "train.steps=3"], "override 'train.steps=3' has no effect here"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    config: Path, trained: list[Trial], args: list[str], message: str
) -> None:
    with pytest.raises(JaxdistError) as caught:
        study(config, *args)
    assert message in str(caught.value)
    assert not trained


def test_a_config_of_steps_needs_epochs(config: Path, trained: list[Trial]) -> None:
    sections = json.loads(config.read_text())
    config.write_text(json.dumps({**sections, "train": {"steps": 3, "batch_size": 64}}))
    with pytest.raises(ConfigError, match=r"tiny\.yaml trains 3 steps, but .*add --epochs"):
        study(config, "--batches", "64")
    out = study(config, *SMALL, "--epochs", 2)
    assert "2 epochs at each batch size" in out


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_place_that_cannot_be_written(config: Path, trained: list[Trial], option: str) -> None:
    Path("file").write_text("")
    place = "file/x.json" if option == "--json" else "file/x"
    with pytest.raises(RunError, match="cannot write the study to file"):
        study(config, "--batches", "64", option, place)
    assert not trained


def test_results_that_cannot_be_written(config: Path, trained: list[Trial]) -> None:
    Path("taken.json").mkdir()
    with pytest.raises(RunError, match=r"taken\.json: Is a directory; choose another path"):
        study(config, *SMALL, "--json", "taken.json")
    assert trained, "the runs are kept in the journal"
