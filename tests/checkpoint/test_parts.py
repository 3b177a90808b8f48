"""Parts of a state by patterns: what they take, and what is refused."""

from __future__ import annotations

import jax
import pytest

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manifest import LeafRecord
from jaxdist.checkpoint.parts import check_part, check_patterns, outline, taken
from jaxdist.config import Document, validate
from jaxdist.errors import CheckpointError, ConfigError

NAMES = [
    "step",
    "params/encoder/0/kernel",
    "params/encoder/1/kernel",
    "params/head/kernel",
    "params/head/bias",
    "opt_state/0/mu/encoder/0/kernel",
]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["params"], [1, 2, 3, 4]),
        (["params/encoder"], [1, 2]),
        (["params/enc"], []),
        (["params/enc*/1"], [2]),
        (["params/*/kernel"], [3]),
        (["params", "!params/*/bias"], [1, 2, 3]),
        (["!opt_state"], [0, 1, 2, 3, 4]),
        (["!opt_state", "!step", "!params/head"], [1, 2]),
        (["step", "params/head"], [0, 3, 4]),
        (["params", "!params"], []),
    ],
    ids=str,
)
def test_what_patterns_take(patterns: list[str], expected: list[int]) -> None:
    assert taken(patterns, NAMES) == [NAMES[i] for i in expected]


@pytest.mark.parametrize(
    ("patterns", "parts"),
    [
        (
            ["param"],
            ["param: x has no array with such a path; choose from step, params/encoder (2 arr"],
        ),
        (["params", "!params/tail", "tail"], ["!params/tail, tail: x has no array"]),
        (["params", "!params"], ["params, !params together select no array of x"]),
    ],
    ids=str,
)
def test_patterns_that_take_nothing_name_what_there_is(
    patterns: list[str], parts: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_patterns(patterns, NAMES, of="x")
    for part in parts:
        assert part in str(caught.value)


def test_a_long_outline_is_cut() -> None:
    assert outline([f"{i}" for i in range(20)]).endswith("10, 11 and 8 more")


def test_what_a_checkpoint_lacks_of_a_part_is_named_with_the_remedy() -> None:
    saved = {
        "params/a": LeafRecord(shape=(2, 3), dtype="float32"),
        "params/b": LeafRecord(shape=(4,), dtype="float32"),
        "step": LeafRecord(shape=(), dtype="int32"),
    }
    shape = jax.ShapeDtypeStruct
    check_part(saved, {"params": {"a": shape((2, 3), "float32")}}, where="runs/x")
    wanted = {"a": shape((2, 5), "float32"), "b": shape((4,), "bfloat16"), "c": shape((), "int32")}
    with pytest.raises(CheckpointError) as caught:
        check_part(saved, {"params": wanted}, where="runs/x")
    for line in [
        "runs/x lacks arrays of the requested parts",
        "params/a: saved float32[2,3], expected float32[2,5]\n",
        "params/b: saved float32[4], expected bfloat16[4]\n",
        "params/c: not saved, expected int32[]\n",
        "the checkpoint has params/a, params/b, step; leave out the arrays that do not fit, "
        "for example with '!params/a'",
    ]:
        assert line in str(caught.value)
    assert "step:" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"parts": []}, ["parts = []"]),
        (
            {"parts": ["params/"]},
            ["parts", "'params/' is not a path of arrays: write names joined by '/'"],
        ),
        ({"parts": ["!"]}, ["'!' is not a path"]),
        ({"parts": ["params / x"]}, ["'params / x' is not a path"]),
        ({"begin_with": {"parts": ["params"]}}, ["begin_with.run", "required"]),
        ({"begin_with": {"run": ""}}, ["begin_with.run = ''"]),
        ({"begin_with": {"run": "runs/x", "parts": ["a//b"]}}, ["begin_with.parts", "'a//b' is"]),
        ({"begin_with": {"run": "runs/x", "step": -1}}, ["begin_with.step = -1"]),
        ({"chunk_bytes": 0}, ["chunk_bytes = 0"]),
    ],
    ids=str,
)
def test_what_is_refused_at_load(section: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Document(section), CheckpointConfig)  # pyright: ignore[reportArgumentType]
    for part in parts:
        assert part in str(caught.value)
