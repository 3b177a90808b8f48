"""Variants of the command line, and those that come along."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, build, load
from jaxdist.study.compression import compression_variants
from jaxdist.study.variants import Variant, parse_variants, split_overrides

PIECES = (
    "a.b=1",
    "model.hidden=[16, 8]",
    "parallel.compression={type: sign, warmup_steps: 2}",
    'data.files=["x y=1.txt", z]',
    "note=two words",
    "optim={type: sgd, schedule: {type: linear, power: 1}}",
    "empty=",
)


def test_settings_are_separated_by_spaces_outside_brackets() -> None:
    draw = random.Random(3)
    for _ in range(200):
        chosen = [draw.choice(PIECES) for _ in range(draw.randint(1, 5))]
        between = [" " * draw.randint(1, 3) for _ in chosen]
        text = "".join(f"{gap}{piece}" for gap, piece in zip(between, chosen, strict=True))
        assert split_overrides(text) == tuple(chosen), text


def test_variants_have_names_and_settings() -> None:
    assert parse_variants(["a=x=1", "b = y={c: 1, d: 2} z=3"], taken=["c"]) == (
        Variant("a", ("x=1",)),
        Variant("b", ("y={c: 1, d: 2}", "z=3")),
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["quick"], "--variant 'quick' lacks a name or settings: write NAME='section.key=value"),
        (["quick=optim"], "'quick=optim' lacks a name or settings"),
        (["=optim.b1=0"], "lacks a name or settings"),
        (["quick="], "lacks a name or settings"),
        (["a=x=1", "a=x=2"], "--variant 'a' is the name of another variant"),
        (["sign=x=1"], "--variant 'sign' is the name of another variant"),
        ([f"{'n' * 21}=x=1"], r"(21 characters) does not fit a table: at most 20"),
        (["a|b=x=1"], "at most 20 printable characters without '|'"),
    ],
)
def test_what_is_no_variant_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_variants(texts, taken=["sign"])
    assert message in str(caught.value)


def built(config: Path, *overrides: str) -> Experiment:
    document, settings = load(config, overrides)
    return build(settings, document)


def settings_of(variant: Variant) -> dict[str, str]:
    return dict(override.split("=", 1) for override in variant.overrides)


SGD = "optim={type: sgd, momentum: 0.75, nesterov: true, clip_norm: 2, weight_decay: 0.01, %s}"


def test_momentum_goes_into_the_messages(config: Path) -> None:
    found = compression_variants(built(config, SGD % "learning_rate: 0.1", "train.epochs=10"))
    assert found.variants[0] == Variant("uncompressed", ("parallel.compression=null",))
    by_name = {variant.name: settings_of(variant) for variant in found.variants}
    topk = by_name["top-k 1%, DGC"]
    sent = json.loads(topk.pop("parallel.compression"))
    assert sent["error_feedback"] == {
        "type": "momentum",
        "momentum": 0.75,
        "nesterov": True,
        "clip_norm": 2.0,
    }
    assert topk == {
        "optim.momentum": "0",
        "optim.nesterov": "false",
        "optim.clip_norm": "null",
        "optim.weight_decay": "0.04",  # 0.01 / (1 - 0.75), which the velocity summed up to
    }
    assert (sent["warmup"], sent["warmup_steps"]) == ("sparser", 45), "a fifth of 225 steps"
    for name in ("sign", "top-k 1%"):
        feedback = json.loads(by_name[name].pop("parallel.compression"))["error_feedback"]
        assert feedback == {"type": "compressed_momentum", "b1": 0.75, "clip_norm": 2.0}
        assert by_name[name] == {"optim.clip_norm": "null"}
    assert [*by_name["PowerSGD rank 4"]] == ["parallel.compression"]
    alone = json.loads(by_name["top-k, no feedback"]["parallel.compression"])
    assert alone["error_feedback"] is False
    assert "sign and top-k send momentum 0.75" in found.notes[0]


def test_adamw_becomes_1_bit_adam(config: Path) -> None:
    optim = "optim={type: adamw, b1: 0.8, learning_rate: 0.1, clip_norm: 1}"
    found = compression_variants(built(config, optim, "train.epochs=10"))
    by_name = {variant.name: settings_of(variant) for variant in found.variants}
    for name in ("sign", "top-k 1%"):
        sent = json.loads(by_name[name].pop("parallel.compression"))
        feedback = {"type": "compressed_momentum", "b1": 0.8, "clip_norm": 1.0}
        assert sent["error_feedback"] == feedback
        assert (sent["warmup_steps"], sent.get("warmup", "whole")) == (45, "whole")
        assert by_name[name] == {
            "optim.type": "onebit_adam",
            "optim.freeze_step": "45",
            "optim.clip_norm": "null",
        }
    for name in ("int4", "PowerSGD rank 4"):
        assert [*by_name[name]] == ["parallel.compression"]
    assert "the momentum of 1-bit Adam" in found.notes[0]


@pytest.mark.parametrize(
    "optim",
    [
        "{type: sgd, momentum: 0, learning_rate: 0.1}",
        "{type: lamb, learning_rate: 0.1}",
        "{type: adamw, b1: 0, learning_rate: 0.1}",
    ],
)
def test_without_momentum_to_send_feedback_is_classic(config: Path, optim: str) -> None:
    found = compression_variants(built(config, f"optim={optim}"))
    assert "All feedback is classic" in found.notes[0]
    for variant in found.variants[1:]:
        (name,) = settings_of(variant)
        assert name == "parallel.compression"


def test_where_nothing_is_sent_there_is_nothing_to_compare(config: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"a single device computes the whole batch .*--devices 4"
    ):
        compression_variants(built(config, "mesh={data: 1, tensor: 8}"))
