"""`jaxdist eval` and `jaxdist generate`: a run used on other devices than it was trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import RUN, Jaxdist, metrics

TEXT = {
    "model": {"type": "gpt", "layers": 1, "embed": 32, "heads": 2},
    "data": {"type": "text", "files": "text/*.txt", "window": 32, "heldout_fraction": 0.2},
    "optim": {"type": "adamw", "learning_rate": 1e-2},
    "train": {"steps": 40, "batch_size": 16},
    "checkpoint": {"every": 20},
    "eval": {"batches": 2},
}


def numbers(out: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"held-out (\w+) ([\d.]+)", out)}


@pytest.mark.parametrize("devices", [1, 8])
def test_eval_on_any_number_of_devices(trained: Jaxdist, devices: int) -> None:
    call = trained.here if devices == 8 else trained
    seen = call("eval", RUN, "mesh.data=-1", "eval.batches=null", "--devices", devices)
    assert (seen.code, seen.err) == (0, ""), seen
    assert "data   images: digits" in seen.out
    assert "step   24\n" in seen.out
    last = metrics(trained.run)[-1]
    assert numbers(seen.out)["accuracy"] == pytest.approx(last["accuracy"], abs=0.1)


def test_eval_of_a_step(trained: Jaxdist) -> None:
    seen = trained.here("eval", RUN, "--step", 16, "--devices", 8)
    assert seen.code == 0, seen
    assert "step   16\n" in seen.out
    missing = trained.here("eval", RUN, "--step", 17, "--devices", 8)
    assert missing.code == 3
    assert "no checkpoint of step 17" in missing.message
    assert "choose from steps [16, 24]" in missing.message


def test_no_run_and_no_checkpoint(trained: Jaxdist) -> None:
    nowhere = trained.here("eval", "runs/other")
    assert nowhere.code in (2, 3)
    assert "runs/other" in nowhere.message
    for step in (trained.run / "checkpoints").iterdir():
        step.rename(trained.folder / step.name)
    empty = trained.here("eval", RUN, "--devices", 8)
    assert empty.code == 3
    assert "has no checkpoint: " in empty.message


def test_a_run_of_images_generates_no_text(trained: Jaxdist) -> None:
    refused = trained.here("generate", RUN, "--prompt", "x", "--devices", 8)
    assert refused.code == 3
    assert "not trained on text" in refused.message


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Jaxdist:
    """A tiny language model, trained in this process."""
    jaxdist = Jaxdist(tmp_path_factory.mktemp("text"), compiled)
    (jaxdist.folder / "text").mkdir()
    for number in range(10):
        words = f"the number {number} is one of the numbers. " * 40
        (jaxdist.folder / f"text/{number}.txt").write_text(words)
    (jaxdist.folder / "config.yaml").write_text(json.dumps(TEXT))
    done = jaxdist.here("train", "config.yaml")
    assert done.code == 0, done
    return jaxdist


def generated(jaxdist: Jaxdist, *options: object, devices: int = 8) -> str:
    call = jaxdist.here if devices == 8 else jaxdist
    words = ("--prompt", "the ", "--tokens", 48, "--devices", devices)
    out = call("generate", RUN, *words, *options)
    assert (out.code, out.err) == (0, ""), out
    assert out.out.startswith("the ")
    return out.out


@pytest.mark.slow
def test_generate(speaking: Jaxdist) -> None:
    text = generated(speaking, "--seed", 3, "--json", "a.json")
    found = json.loads((speaking.folder / "a.json").read_text())
    (sample,) = found["samples"]
    assert (found["schema"], found["step"], sample["text"] + "\n") == (1, 40, text)
    assert (sample["prompt"], found["seed"], found["temperature"]) == ("the ", 3, 0.8)
    assert len(sample["log_probs"]) == len(sample["tokens"]) - 5 <= 48
    assert all(x <= 0 for x in sample["log_probs"])
    assert generated(speaking, "--seed", 3, devices=1) == text
    assert generated(speaking, "--seed", 4) != text
    greedy = generated(speaking, "--temperature", 0, "--seed", 1)
    assert greedy == generated(speaking, "--temperature", 0, "--seed", 2)
    assert len(greedy) <= 4 + 48 + 1
    assert generated(speaking, "--temperature", 0, "--step", 20) != greedy


@pytest.mark.full
def test_a_batch_of_prompts_and_a_stop(speaking: Jaxdist) -> None:
    words = ("--prompt", "the ", "--prompt", "one of ", "--tokens", 30, "--devices", 8)
    out = speaking.here("generate", RUN, *words, "--stop", "e", "--top-k", 1, "--json", "b.json")
    assert out.code == 0, out
    samples = json.loads((speaking.folder / "b.json").read_text())["samples"]
    assert [s["prompt"] for s in samples] == ["the ", "one of "]
    assert "".join(s["text"] + "\n" for s in samples) == out.out
    for sample in samples:
        added = sample["text"].removeprefix(sample["prompt"])
        assert sample["stopped"] == added.endswith("e")
        assert "e" not in added[:-1]
    refused = speaking.here("generate", RUN, *words, "--stop", "the")
    assert refused.code == 3
    assert "--stop 'the' is 3 tokens" in refused.message


# Windows of continuations: tests/train/test_continuations.py.
@pytest.mark.slow
def test_a_prompt_longer_than_the_window_and_an_empty_one(speaking: Jaxdist) -> None:
    long = "the number 1 is one of the numbers. " * 3
    out = speaking.here("generate", RUN, "--devices", 8, "--prompt", long, "--tokens", 5)
    assert out.code == 0, out
    assert out.out.startswith(long)
    empty = speaking.here("generate", RUN, "--devices", 8, "--prompt", "", "--tokens", 5)
    assert empty.code == 0, empty
