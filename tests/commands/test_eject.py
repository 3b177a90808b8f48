"""`jaxdist eject`: the file trains to the losses of the config, and reads as written by hand."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.commands.eject.eject import Keep, eject
from jaxdist.errors import ConfigError
from jaxdist.experiment import build, load
from jaxdist.models.rotary import frequencies

ROOT = Path(__file__).parents[2]
DIGITS = Path("configs/mlp/digits.yaml")
GPT = Path("configs/gpt/quickstart.yaml")
"""Relative, as a user names them: the command stands in the file."""
STEPS = 4
MOST_LINES = 300
SMALL = [
    "model.layers=4",
    "model.embed=32",
    "data.window=32",
    "eval.batches=2",
    "train.steps=20",
    "optim.schedule.warmup_steps=2",
]
RING = "parallel.reduce={type: ring, directions: 2, bucket_bytes: 65536}"
SPIKES = "optim.skip_spikes={factor: 1.01, window: 1}"
"""Strict enough to skip steps after the first, at a learning rate that is too large."""
PIPELINE = ["mesh={data: 2, stage: 4}", "train.microbatches=4"]
DIGITS_CASES = {
    "settings": [
        "optim.weight_decay=0.1",
        "optim.clip_norm=0.5",
        "optim.schedule={type: cosine, warmup_steps: 2, end_fraction: 0.1}",
        "loss={type: classification, label_smoothing: 0.1}",
        "train.epochs=1",
        "eval.batches=2",
    ],
    "sgd": ["optim={type: sgd, learning_rate: 0.1, nesterov: true, weight_decay: 0.01}"],
    "lamb": ["optim={type: lamb, learning_rate: 0.01, schedule: {type: linear}}"],
    "cnn": [
        "model={type: cnn, channels: [4, 8], hidden: 16}",
        "loss={type: classification, label_smoothing: 0.1}",
        "mesh={data: 4, tensor: 2}",
        "parallel.zero={stage: 2, whole_below: 256}",
    ],
    "tensor": ["mesh={data: 4, tensor: 2}"],
    "zero 1": ["parallel.zero.stage=1"],
    "zero 2": ["parallel.zero.stage=2"],
    "zero 3": ["parallel.zero.stage=3"],
    "ring, zero 1": [RING, "parallel.zero.stage=1"],
    "ring, zero 2, cnn": [
        RING,
        "parallel.zero={stage: 2, whole_below: 256}",
        "model={type: cnn, channels: [4, 8], hidden: 16}",
    ],
    "nonfinite, zero 2": ["optim.skip_nonfinite=true", "parallel.zero.stage=2"],
}
GPT_CASES = {
    "zero 1": ["parallel.zero.stage=1"],
    "zero 3 and tensor": ["mesh={data: 4, tensor: 2}", "parallel.zero.stage=3"],
    "lamb": [
        "optim={type: lamb, scale_from: {batch_size: 8, learning_rate: 1e-2, rule: lamb, "
        "warmup_fraction: 0.1}}",
        "model.tied_head=false",
        "model.attention_window=8",
        "model.remat=full",
        "model.scan_unroll=1",
    ],
    "ring": ["parallel.reduce.type=ring"],
    "ring, zero 3": [RING, "parallel.zero.stage=3", "model.remat=full"],
    "1f1b": PIPELINE,
    "gpipe": [
        "mesh={stage: 2, data: 4}",
        "train.microbatches=2",
        "parallel.pipeline.schedule.type=gpipe",
    ],
}


def marked(cases: dict[str, list[str]], *slow: str) -> list[Any]:
    """Cases of the full tests; of the slow sweep those whose settings others of them have too."""
    marks = {name: pytest.mark.slow if name in slow else pytest.mark.full for name in cases}
    return [pytest.param(cases[name], id=name, marks=mark) for name, mark in marks.items()]


def losses_of(path: Path, overrides: list[str]) -> list[float]:
    """Of the first steps, as jaxdist trains."""
    document, config = load(path, overrides)
    made = build(config, document)
    program = made.program
    state, losses = program.init(), []
    with made.loader.batches() as batches:
        for batch in itertools.islice(batches, STEPS):
            state, values = program.train(state, batch)
            losses.append(float(values[0]))
    return losses


def check(path: Path, overrides: list[str], tmp_path: Path, keep: Keep | None = None) -> str:
    """The file's losses are the config's, and its form is what ruff asks of a file written here."""
    file = tmp_path / "ejected.py"
    text = eject(path, overrides, keep=keep, out=file)
    kept = {
        line.split()[1] for line in text.splitlines() if " import " in line and "jaxdist" in line
    }
    assert kept == ({"jaxdist.data", "jaxdist.data.source"} if keep else set())
    assert sum(map(bool, text.splitlines())) <= MOST_LINES
    if shutil.which("ruff"):
        for asked in (("check",), ("format", "--diff")):
            command = ["ruff", *asked, "--config", str(ROOT / "pyproject.toml"), str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout
    names: dict = {"__name__": "ejected"}
    with jax.numpy_rank_promotion("allow"):
        exec(compile(text, str(file), "exec", dont_inherit=True), names)
        found = names["main"](STEPS)
    np.testing.assert_allclose(found, losses_of(path, overrides), rtol=1e-6)
    return text


def test_data_parallel(tmp_path: Path) -> None:
    check(DIGITS, [], tmp_path)


# `.ci/run` ejects this config and runs the file.
@pytest.mark.slow
def test_a_ring(tmp_path: Path) -> None:
    text = check(DIGITS, [RING], tmp_path)
    assert "WAYS = ((1, 4), (-1, 3))" in text


def test_a_ring_with_shares_and_skipped_steps(tmp_path: Path) -> None:
    more = ["parallel.zero.stage=3", SPIKES, "optim.learning_rate=0.03"]
    text = check(DIGITS, [RING, *more], tmp_path)
    assert "SPLIT = {" in text


@pytest.mark.parametrize(
    "overrides", marked(DIGITS_CASES, "tensor", "zero 1", "zero 2", "cnn", "ring, zero 1")
)
@pytest.mark.slow
def test_plans_and_optimizers_of_an_mlp(overrides: list[str], tmp_path: Path) -> None:
    check(DIGITS, overrides, tmp_path)


@pytest.mark.parametrize(
    "overrides", marked(GPT_CASES, "zero 1", "ring", "gpipe", "lamb", "zero 3 and tensor")
)
@pytest.mark.slow
def test_plans_and_optimizers_of_a_decoder(overrides: list[str], tmp_path: Path) -> None:
    check(GPT, [*SMALL, *overrides], tmp_path)


@pytest.mark.slow
def test_a_decoder_in_bfloat16(tmp_path: Path) -> None:
    """XLA must round where the programs say so: by default it leaves some roundings out."""
    narrow = [*SMALL, "model.compute_dtype=bfloat16", "model.layers=2", "model.scan_unroll=1"]
    script = "import sys, test_eject as t; t.check(t.GPT, sys.argv[2:], t.Path(sys.argv[1]))"
    flags = f"{os.environ['XLA_FLAGS']} --xla_allow_excess_precision=false"
    places = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *narrow],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": places},
        check=True,
        cwd=ROOT,
        timeout=300,
    )


@pytest.mark.full
def test_a_file_that_would_be_too_long_is_refused() -> None:
    more = ["parallel.zero.stage=3", "model.tied_head=false", "model.attention_window=8", SPIKES]
    with pytest.raises(ConfigError, match=r"at most 300 lines; let jaxdist read the data"):
        eject(GPT, [*SMALL, RING, "optim.clip_norm=1", *more])


def test_rotary_frequencies_have_the_bits_of_the_model() -> None:
    lines = re.findall(r"^    ((?:exponent|frequency) = .*)$", eject(GPT), re.M)
    values: dict[str, Any] = {"np": np, "half": 6, "ROPE_THETA": 1e4}
    exec("\n".join(lines), values)
    np.testing.assert_array_equal(values["frequency"], frequencies(1e4, 12))


def test_nothing_stands_there_for_other_configs() -> None:
    text = eject(DIGITS)
    assert "#:" not in text
    assert not [
        word for word in ("CLIP_NORM", "WARMUP", "SMOOTHING", "def decayed") if word in text
    ]


def test_what_it_cannot_write_is_refused_at_once() -> None:
    given = ["parallel.compression={type: topk, fraction: 0.1}", "optim.bf16_moments=true"]
    with pytest.raises(ConfigError) as refused:
        eject(DIGITS, ["parallel.reduce.type=ring", *given])
    for line in ("parallel.compression.type: topk", "optim.bf16_moments: True"):
        assert f"\n  {line}" in str(refused.value)
    for alone in (
        "parallel.reduce={type: tree}",
        "strategy={type: lookahead}",
        "elastic.batch=rescale",
    ):
        with pytest.raises(ConfigError, match=alone.split("=")[0]):
            eject(DIGITS, [alone])


@pytest.mark.parametrize(
    ("path", "overrides", "message"),
    [
        (
            DIGITS,
            [RING, "mesh={data: 4, tensor: 2}"],
            "parallel.reduce with mesh.tensor: use only one",
        ),
        (
            DIGITS,
            ["model={type: import, path: 'my:build'}", "loss={type: import, path: 'my:loss'}"],
            "your own model cannot be written",
        ),
        (DIGITS, ["train.microbatches=2"], "train.microbatches: 2 without mesh.stage"),
        (DIGITS, ["mesh={stage: 2, data: 4}"], "mesh.stage with model.type mlp (supported: gpt)"),
        (
            GPT,
            [*SMALL, *PIPELINE, "model.compute_dtype=bfloat16"],
            "mesh.stage with model.compute_dtype: bfloat16",
        ),
        (DIGITS, ["optim={type: sgd, learning_rate: 0.1, momentum: 0}"], "optim.momentum: 0.0"),
        (GPT, ["data.heldout_fraction=0"], "data.heldout_fraction: 0.0"),
        (GPT, ["data.files=['*.md']"], "or let the file read the data through jaxdist: --keep"),
        (GPT, ["checkpoint.begin_with={run: runs/other}"], "checkpoint.begin_with.run: runs/other"),
        (DIGITS, ["parallel.zero={stage: 1, whole_below: 0}"], "would need padding to be split"),
        (
            GPT,
            [*SMALL, *PIPELINE, "model.layers=5"],
            "model.layers 5 do not divide by mesh.stage 4",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        eject(path, overrides)


@pytest.mark.full
def test_data_that_jaxdist_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("a line of text to learn\n" * 400)
    own = ["data.files=own.txt", "data.heldout_fraction=0.2", "model.layers=1"]
    text = check(ROOT / GPT, [*SMALL, *own, "model.scan_unroll=1"], tmp_path, "data")
    assert "own.txt" in text


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        eject(DIGITS, out=file)
    with pytest.raises(ConfigError, match="cannot be written"):
        eject(DIGITS, out=tmp_path / "no" / "mine.py")
    assert file.read_text() == "mine"
