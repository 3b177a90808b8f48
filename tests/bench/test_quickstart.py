from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import quickstart
from benchmarks.quickstart import best_baseline, final_loss, plain_environment
from jaxdist.errors import RunError

CONFIG = """
model: {type: gpt, layers: 1, embed: 8, heads: 2}
data: {type: text, files: ["%s/*.txt"], window: 16, heldout_fraction: 0.3}
optim: {type: adamw, learning_rate: 1e-3}
train: {steps: %s, batch_size: 4}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"file {number} says what files say\n" * 20)
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG % (tmp_path, 3))
    return path


@pytest.mark.slow
def test_a_small_run_is_timed_and_judged(config, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    whole, loss = quickstart.bench(config).figures
    assert (whole.name, whole.reference, whole.goal) == ("whole run", 180, "<= 1")
    assert 0 < whole.ours < 120
    assert (loss.name, loss.goal) == ("held-out loss over trigram", "<= 0.95")
    assert loss.ours == pytest.approx(5.5, rel=0.2)  # about log 257: it has learnt little
    assert 0 < loss.reference < 2  # but counting finds such text easy
    assert loss.holds is False


@pytest.mark.slow
def test_a_failing_run_is_named_with_its_last_line(config, tmp_path):
    config.write_text(CONFIG % (tmp_path, "never"))
    with pytest.raises(RunError, match=r"small.yaml run.directory=\S+` failed: exit code 2: "):
        quickstart.train(config, tmp_path / "run")


def test_a_run_that_takes_too_long_is_named(config, tmp_path):
    with pytest.raises(RunError, match=r"small.yaml .* took more than 0.1 s"):
        quickstart.train(config, tmp_path / "run", timeout_seconds=0.1)


def test_a_missing_config_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"no configs/gpt/quickstart.yaml in .*; run it in a check"):
        quickstart.bench()


def test_the_last_held_out_loss_counts():
    records = [
        {"step": 1, "split": "heldout", "loss": 3.0},
        {"step": 2, "split": "heldout", "loss": 2.0},
        {"step": 2, "split": "train", "loss": 1.0},
    ]
    assert final_loss(records) == 2.0
    with pytest.raises(RunError, match="wrote no held-out loss"):
        final_loss(records[2:])


def test_the_lowest_baseline_counts():
    assert best_baseline({"a": 2.0, "b": 1.0}) == ("b", 1.0)
    with pytest.raises(RunError, match="gives no baseline"):
        best_baseline({})


def test_the_run_has_neither_our_fake_devices_nor_a_cache():
    environ = {"XLA_FLAGS": "x", "NPROC": "16", "JAX_PLATFORMS": "cpu", "HOME": "h"}
    assert plain_environment(environ, cache=Path("c")) == {"HOME": "h", "JAXDIST_CACHE": "c"}
