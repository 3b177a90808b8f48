"""`jaxdist study run FILE`: a study as data is the study that the command line describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.errors import JaxdistError
from jaxdist.study import compare
from jaxdist.study.compare import VariantTrainer
from jaxdist.study.definition import FOLDER, BatchScalingStudy, VariantsStudy, read_study
from jaxdist.study.trainer import Trainer
from jaxdist.study.trial import TrialOutcome


def study(*args: object) -> str:
    """Return what the command prints; its error is raised."""
    result = CliRunner().invoke(app, ["study", *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.output


def written(path: Path, values: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(autouse=True)
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trials that were trained."""
    trials: list[Any] = []

    def call(self: Any, trial: Any) -> TrialOutcome:
        trials.append(trial)
        rate = getattr(trial, "learning_rate", 0.05)
        metrics = {"loss": 0.1 + trial.seed / 100, "accuracy": 0.9 - abs(rate - 0.05)}
        return TrialOutcome(trial, 3, metrics, False, 0.5)

    monkeypatch.setattr(Trainer, "__call__", call)
    monkeypatch.setattr(VariantTrainer, "__call__", call)
    monkeypatch.setattr(compare, "sent_bytes", lambda experiment: 100.0)
    return trials


def test_variants_of_a_file_are_those_of_the_command_line(config: Path) -> None:
    own = {"optim.b1": 0, "optim.schedule": {"type": "cosine"}}
    values = {
        "config": "../tiny.yaml",
        "set": {"train.epochs": 2},
        "seeds": 2,
        "variants": {"plain": own},
    }
    file = written(Path("studies/mine.yaml"), values)
    text = "plain=optim.b1=0 optim.schedule={type: cosine}"
    by_hand = study(config, "train.epochs=2", "--seeds", 2, "--variant", text)
    found = study("run", file, "--json", "o.json")
    assert found.splitlines()[-6:-3] == by_hand.splitlines()[-6:-3]
    assert [row["name"] for row in json.loads(Path("o.json").read_text())["variants"]] == [
        "as given",
        "plain",
    ]
    assert "over 1 seeds" in study("run", file, "seeds=1")


def test_batch_sizes_of_a_file_are_those_of_the_command_line(
    config: Path, trained: list[Any]
) -> None:
    values = {"type": "batch_scaling", "config": "tiny.yaml", "batches": [128, 64], "tune": False}
    study("run", written(Path("mine.yaml"), values))
    assert {trial.optimizer for trial in trained} == {"sgd", "nesterov", "lars", "lamb", "adamw"}
    own = {"slow": {"section": {"type": "sgd", "momentum": 0.5}, "start": 0.2}}
    trained.clear()
    out = study("run", written(Path("own.yaml"), {**values, "contenders": own}), "batches=[64]")
    assert {(trial.optimizer, trial.batch_size) for trial in trained} == {("slow", 64)}
    assert {trial.learning_rate for trial in trained} >= {0.1, 0.2, 0.05}
    assert "1 epochs at each batch size; mesh {data: 8}" in out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "batchscaling"}, "type = 'batchscaling': did you mean 'batch_scaling'"),
        ({"type": "batch_scaling", "batches": [64, 64]}, "64 occurs 2 times: name each value once"),
        ({"type": "batch_scaling"}, "batches"),
        ({"variant": {}}, "did you mean 'variants'"),
        ({"variants": {"n" * 21: {"optim.b1": 0}}}, "(21 characters) does not fit a table"),
        ({}, "nothing to compare"),
        ({"variants": {"x": {"seed": 3}}}, "variant 'x' sets the seed"),
    ],
)
def test_mistakes_of_a_file_are_told(
    config: Path, trained: list[Any], values: dict[str, Any], message: str
) -> None:
    file = written(Path("mine.yaml"), {"config": "tiny.yaml", **values})
    with pytest.raises(JaxdistError) as caught:
        study("run", file)
    assert message in str(caught.value)
    assert not trained


def test_what_is_shipped_is_installed_with_the_package(config: Path) -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"batch_scaling.yaml", "compression.yaml"}
    assert "study/studies/*.yaml" in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    given = {"config": "tiny.yaml", "of": "compression"}
    assert isinstance(read_study(written(Path("a.yaml"), given)), VariantsStudy)
    given = {"type": "batch_scaling", "config": "tiny.yaml", "batches": [64]}
    found = read_study(written(Path("b.yaml"), given))
    assert isinstance(found, BatchScalingStudy)
    assert found.contenders["lamb"].start == 0.01
