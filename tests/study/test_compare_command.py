"""`jaxdist study CONFIG` from the command to its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.errors import JaxdistError, RunError
from jaxdist.experiment import build, load
from jaxdist.study import compare
from jaxdist.study.compare import VariantTrainer
from jaxdist.study.compression import sent_bytes
from jaxdist.study.trial import TrialOutcome, VariantTrial

SIGN = "parallel.compression={type: sign, block: 64}"
TWO = ["--variant", f"sign={SIGN}", "--variant", "bf16=parallel.compression={type: cast}"]
SCALE = "{type: scale, std: 16}"
OF = ["--of", "compression", "--seeds", "2"]


def study(config: Path, *args: object) -> str:
    """What the command prints; its error is raised."""
    result = CliRunner().invoke(app, ["study", str(config), *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[VariantTrial]:
    """The trials that were trained; set `stop_after` to press Ctrl-C after so many."""
    trials: list[VariantTrial] = []

    def call(self: VariantTrainer, trial: VariantTrial) -> TrialOutcome[VariantTrial]:
        if len(trials) == call.stop_after:  # pyright: ignore[reportFunctionMemberAccess]
            raise KeyboardInterrupt
        trials.append(trial)
        loss = 2.0 + trial.seed / 10 + len(trial.variant) / 100
        return TrialOutcome(trial, 3, {"loss": loss}, False, 0.5)

    call.stop_after = -1  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(VariantTrainer, "__call__", call)
    monkeypatch.setattr(compare, "sent_bytes", lambda experiment: 100.0)
    return trials


@pytest.mark.full
def test_the_variants_that_come_along(config: Path, trained: list[VariantTrial]) -> None:
    out = study(config, *OF, *TWO[:1], "mine=optim.learning_rate=2e-3", "seed=5")
    names = list(dict.fromkeys(trial.variant for trial in trained))
    assert names[0] == "uncompressed"
    assert names[1:6] == ["int8", "int4", "sign", "top-k 1%", "PowerSGD rank 4"]
    assert names[6:] == ["sign, no feedback", "top-k, no feedback", "mine"]
    assert {trial.seed for trial in trained} == {5, 6}
    assert "mlp on images: digits of scikit-learn" in out
    assert "sign and top-k send the momentum of 1-bit Adam" in out
    assert max(len(line) for line in out.splitlines() if line.startswith("|")) <= 80
    assert (
        'int4: parallel.compression={"type": "quantize", "bits": 4, "error_feedback": true}' in out
    )


@pytest.mark.full
def test_what_a_config_refuses_of_them_is_left_out(
    config: Path, trained: list[VariantTrial]
) -> None:
    out = study(config, *OF, "model.hidden=[3]")
    assert "left out: PowerSGD rank 4, since " in out
    assert "rank 4 exceeds the largest rank of a 64 x 3 matrix" in out
    names = {trial.variant for trial in trained}
    assert len(names) == 7
    assert "PowerSGD rank 4" not in names


@pytest.mark.full
def test_an_interrupted_study_goes_on(
    config: Path, trained: list[VariantTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VariantTrainer.__call__, "stop_after", 3)
    stopped = CliRunner().invoke(app, ["study", str(config), *TWO, "--seeds", "2"])
    assert stopped.exit_code == 130
    assert "3 runs are saved in runs/tiny-variants.runs.jsonl" in stopped.output
    monkeypatch.setattr(VariantTrainer.__call__, "stop_after", -1)
    whole = study(config, *TWO, "--seeds", "2")
    assert len(trained) == len(set(trained)) == 6, "no run is made twice"
    assert study(config, *TWO, "--seeds", "2").splitlines()[-9:] == whole.splitlines()[-9:]
    assert len(trained) == 6
    study(config, *TWO, "--seeds", "3")
    assert len(trained) == 9, "further seeds alone"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to compare tiny.yaml with: add --of compression or --variant NAME="),
        (["--of", "compresion"], "--of 'compresion': did you mean 'compression'"),
        (["--variant", "quick"], "--variant 'quick' lacks a name or settings"),
        ([*TWO, "--variant", "sign=seed=1"], "'sign' is the name of another variant"),
        (["--of", "compression", *TWO], "'sign' is the name of another variant"),
        (["--variant", "x=optim.b3=1"], "optim.b3 = 1"),
        (["--variant", "x=parallel.compression={type: sign, block: 3}"], "block"),
        (["--variant", "x=train.batch_size=60"], "a batch of 60 does not divide over 8 devices"),
        (["--variant", "x=seed=3"], "variant 'x' sets the seed, which a study varies itself"),
        (
            ["--variant", "x=train.epochs=2"],
            "variant 'x' changes the number of steps: all variants must train",
        ),
        (
            ["--variant", "x=train.batch_size=128 train.epochs=2"],
            "'x' changes train.batch_size: all",
        ),
        (
            ["--variant", f"x=data.transform={SCALE}"],
            "variant 'x' changes data: all variants must train",
        ),
        (["--variant", "x=strategy={type: lookahead}"], "'x' changes strategy"),
        (["--variant", "x=train.batch_size=64"], "'as given' and 'x' have the same settings"),
        (["--of", "compression", "mesh={tensor: 8}"], "a single device computes the whole batch"),
        (["--variant", "x=optim.b1=0", "strategy={type: lookahead}"], "tiny.yaml: strategy.type"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    config: Path, trained: list[VariantTrial], args: list[str], message: str
) -> None:
    with pytest.raises(JaxdistError) as caught:
        study(config, *args)
    assert message in str(caught.value)
    assert not trained


def test_what_refuses_every_variant_refuses_the_study(
    config: Path, trained: list[VariantTrial]
) -> None:
    with pytest.raises(JaxdistError, match=r"parallel\.compression"):
        study(config, *OF, "mesh={data: 4, stage: 2}", "model.hidden=[16, 16]")
    assert not trained


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_place_that_cannot_be_written(
    config: Path, trained: list[VariantTrial], option: str
) -> None:
    Path("file").write_text("")
    place = "file/x.json" if option == "--json" else "file/x"
    with pytest.raises(RunError, match="cannot write the study to file"):
        study(config, *TWO, option, place)
    assert not trained


def bytes_of(config: Path, setting: str) -> float:
    document, settings = load(config, [setting])
    return sent_bytes(build(settings, document))


@pytest.mark.full
def test_bytes_are_those_of_a_step_after_the_warm_up(config: Path) -> None:
    """By hand, on 8 devices: a ring's of all, and messages of signs and scales."""
    codec = "parallel.compression={type: sign, block: 64, warmup_steps: %d}"
    # The matrices are 64 x 16 and 16 x 10, in shards of 148; the vectors stay whole.
    matrices, vectors, others = 64 * 16 + 16 * 10, 16 + 10, 8
    plain = bytes_of(config, "parallel.compression=null")
    assert plain >= 2 * 7 / 8 * 4 * (matrices + vectors)
    assert plain <= 2 * 7 / 8 * 4 * (matrices + vectors + others)
    words = 3 * (64 // 8 + 2)  # three blocks hold a shard
    sent = bytes_of(config, codec % 0)
    whole = 2 * 7 / 8 * 4 * vectors
    assert 2 * 7 * words + whole <= sent <= 2 * 7 * words + whole + 2 * 7 / 8 * 4 * others
    assert bytes_of(config, codec % 3) == sent


@pytest.mark.slow
def test_feedback_matters(config: Path) -> None:
    """Signs alone lose what is small; with feedback, a run comes near the uncompressed one."""
    codec = "parallel.compression={type: sign, block: 64%s}"
    with_and_without = [f"sign={codec % ''}", f"alone={codec % ', error_feedback: false'}"]
    variants = [word for text in with_and_without for word in ("--variant", text)]
    sgd = "optim={type: sgd, momentum: 0, learning_rate: 0.1, schedule: {type: linear}}"
    fixed = ["--seeds", "1", sgd, "train.epochs=5"]
    out = study(config, *fixed, *variants, "--json", "o/found.json", "--plot", "o")
    found = json.loads(Path("o/found.json").read_text())
    assert "\n".join(found["table"]) in out
    assert len(Path("o/found.runs.jsonl").read_text().splitlines()) == len(found["runs"]) == 3
    assert Path("o/variants.png").stat().st_size > 5000
    plain, sign, alone = found["variants"]
    assert plain["loss"] < 1.5, "it learns, from 2.3"
    assert alone["verdict"] == "worse"
    assert alone["change"] > 0.3
    assert sign["change"] < alone["change"] / 4
