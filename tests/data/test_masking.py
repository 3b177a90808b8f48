"""Masked windows: what is hidden, how often, and what it depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.data.source import ArraySource
from jaxdist.data.text.dataset import TextConfig
from jaxdist.data.text.masking import MaskedWindows, MaskingConfig

TOKENS = np.random.default_rng(0).integers(0, 50, (200, 65)).astype(np.int32)
MASK, END = 50, 49


def masked(**settings: Any) -> MaskedWindows:
    segments = np.zeros((200, 64), np.int32)
    source = ArraySource(tokens=TOKENS, segments=segments)
    return MaskedWindows(source, MaskingConfig(**settings), MASK, 50, (END, MASK))


def test_kept_tokens_are_the_texts_and_targets_are_what_was_hidden() -> None:
    source = masked()
    found = source.draw(np.arange(200), np.arange(200, dtype=np.uint64))
    assert found["positions"].shape == (200, 10)
    assert (np.diff(found["positions"], axis=1) > 0).all()
    np.testing.assert_array_equal(
        np.take_along_axis(TOKENS, found["positions"], 1), found["targets"]
    )
    hidden = found["tokens"].copy()
    np.put_along_axis(hidden, found["positions"], found["targets"], 1)
    np.testing.assert_array_equal(hidden, TOKENS[:, :-1])
    assert END not in found["targets"]


def test_eight_in_ten_become_the_mask_and_one_in_ten_a_random_token() -> None:
    source = masked()
    keys = np.arange(20_000, dtype=np.uint64)
    found = source.draw(np.arange(20_000) % 200, keys)
    shown = np.take_along_axis(found["tokens"], found["positions"], 1)
    kept = shown == found["targets"]
    assert abs((shown == MASK).mean() - 0.8) < 0.003
    # A random token is the same as the hidden one once in 50 times.
    assert abs(kept.mean() - 0.1 - 0.1 / 50) < 0.003
    others = shown[(shown != MASK) & ~kept]
    assert set(others) == set(range(50))


def test_every_position_is_hidden_equally_often() -> None:
    found = masked().draw(np.full(20_000, 3), np.arange(20_000, dtype=np.uint64))
    counts = np.bincount(found["positions"].ravel(), minlength=64)
    usable = TOKENS[3, :64] != END
    share = counts[usable] / 20_000
    assert counts[~usable].sum() == 0
    assert abs(share - 10 / usable.sum()).max() < 0.015


def test_evaluation_hides_the_same_and_each_draw_others() -> None:
    source = masked()
    again = [source.take(np.array([5, 9]))["positions"] for _ in range(2)]
    np.testing.assert_array_equal(*again)
    first, second = (
        source.draw(np.array([5]), np.array([key], np.uint64))["positions"] for key in (1, 2)
    )
    assert (first != second).any()


def test_a_tokenizer_without_a_mask_gets_one_more_token() -> None:
    data = TextConfig(masking=MaskingConfig(), window=64).build()
    assert data.vocab_size == 258
    found = data.train[0]
    assert {name: value.shape for name, value in found.items()} == {
        "tokens": (64,), "segments": (64,), "positions": (10,), "targets": (10,)
    }  # fmt: skip
    assert (found["tokens"] == 257).any()
    assert "10 of 64 tokens are predicted" in data.description


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0}, "greater than 0"),
        ({"rate": 1}, "less than 1"),
        ({"masked": 0.8, "random": 0.3}, "add up to more than 1"),
        ({"masked": 0, "random": 0}, "masked 0 and random 0 hide nothing"),
    ],
)
def test_rates_that_hide_nothing_or_all_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MaskingConfig(**settings)
