"""Commands on a run whose stages have several chunks: checkpoints have the model's order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from runs import metrics

from jaxdist.commands.evaluate import evaluate_run
from jaxdist.run.train import train

STEPS, QUIET = 4, Console(quiet=True)
SECTIONS = {
    "model": {"type": "gpt", "layers": 4, "embed": 32, "heads": 4, "vocab_multiple": 8},
    "data": {
        "type": "synthetic", "kind": "tokens", "window": 8, "vocab_size": 64,
        "heldout_examples": 32,
    },
    "optim": {"type": "adamw", "learning_rate": 0.02, "schedule": {"type": "constant"}},
    "train": {"steps": STEPS, "batch_size": 16, "microbatches": 4, "log_every": 1},
    "eval": {"every": 2},
    "checkpoint": {"every": 2, "keep": 9},
    "mesh": {"stage": 2, "data": 4},
    "parallel": {"pipeline": {"schedule": {"type": "interleaved", "chunks": 2}}},
}  # fmt: skip
ONE_CHUNK = ["parallel.pipeline.schedule={type: 1f1b}"]
NO_STAGES = ["mesh={data: 4, tensor: 2}", "parallel.pipeline={}"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(SECTIONS))
    return path


def losses(folder: Path, split: str) -> list[float]:
    return [record["loss"] for record in metrics(folder) if record["split"] == split]


@pytest.mark.slow
def test_other_plans_see_what_the_run_saw_and_go_on_where_it_was(config: Path) -> None:
    whole = train(config, ["run.directory=whole"], console=QUIET).directory
    seen = losses(whole, "heldout")[-1]
    for plan in ([], NO_STAGES):
        assert evaluate_run(whole, plan, console=QUIET)["loss"] == pytest.approx(seen, rel=1e-5)
    begun = ["run.directory=begun"]
    train(config, [*begun, "train.steps=2"], console=QUIET)
    train(config, [*begun, "train.steps=3"], resume=True, console=QUIET)
    last = train(config, [*begun, *ONE_CHUNK], resume=True, console=QUIET).directory
    assert losses(last, "train") == pytest.approx(losses(whole, "train"), rel=1e-5)


# Every plan loads such a checkpoint: tests/equivalence/test_plans_checkpoint.py; runs that begin
# with another: test_begin.py and test_begin_with.py.
@pytest.mark.slow
def test_a_run_with_several_chunks_begins_with_the_layers_of_one_without(config: Path) -> None:
    whole = train(config, ["run.directory=whole", *NO_STAGES], console=QUIET).directory
    seen = evaluate_run(whole, console=QUIET)["loss"]
    begin = ["run.directory=begun", "checkpoint.begin_with={run: whole}", "train.steps=1"]
    tuned = train(config, [*begin, "optim.learning_rate=1.0e-30"], console=QUIET).directory
    assert evaluate_run(tuned, console=QUIET)["loss"] == pytest.approx(seen, rel=1e-5)
