from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.data.source import take
from jaxdist.data.synthetic import SyntheticConfig
from jaxdist.errors import DataError

_TOKENS = {"kind": "tokens", "examples": 500, "vocab_size": 50, "window": 40}
_IMAGES = {"kind": "images", "examples": 500, "height": 6, "width": 5, "channels": 2, "classes": 4}


def _dataset(settings: dict[str, Any], **others: Any) -> Any:
    return SyntheticConfig(**{**settings, **others}).build()


@pytest.mark.parametrize("settings", [_TOKENS, _IMAGES])
def test_an_example_depends_on_seed_split_and_index_alone(settings: dict[str, Any]) -> None:
    dataset = _dataset(settings)
    indices = np.array([7, 499, 7])
    batch = take(dataset.train, indices)
    again = take(_dataset(settings, examples=10_000).train, indices)
    for name, values in batch.items():
        np.testing.assert_array_equal(values, again[name])
        np.testing.assert_array_equal(values[0], dataset.train[7][name])
    name = "tokens" if settings is _TOKENS else "image"
    for other in (dataset.heldout, _dataset(settings, seed=1).train):
        assert (take(other, indices)[name] != batch[name]).any()
    with pytest.raises(IndexError, match="example 500 of 500"):
        dataset.train[500]


def test_tokens_are_a_chain_of_few_successors() -> None:
    dataset = _dataset(_TOKENS)
    tokens = take(dataset.train, np.arange(500))["tokens"]
    assert tokens.shape == (500, 41)
    assert tokens.dtype == np.int32
    assert (dataset.vocab_size, dataset.classes) == (50, None)
    assert sorted(set(tokens[:, 0].tolist())) == list(range(50))
    heldout = take(dataset.heldout, np.arange(500))["tokens"]
    pairs = np.concatenate([tokens, heldout])
    successors = {(int(a), int(b)) for row in pairs for a, b in itertools.pairwise(row)}
    assert len(successors) <= 4 * 50


def test_images_are_their_classes_picture_and_noise() -> None:
    dataset = _dataset(_IMAGES)
    batch = take(dataset.train, np.arange(500))
    assert batch["image"].shape == (500, 6, 5, 2)
    assert batch["image"].dtype == np.uint8
    assert (dataset.vocab_size, dataset.classes) == (None, 4)
    means = np.stack([batch["image"][batch["label"] == c].mean(0) for c in range(4)])
    heldout = take(dataset.heldout, np.arange(200))
    distance = ((heldout["image"][:, None] - means) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == heldout["label"]).mean() > 0.95


def test_nothing_held_out() -> None:
    assert _dataset(_TOKENS, heldout_examples=0).heldout is None


def test_a_setting_of_the_other_kind() -> None:
    with pytest.raises(ValidationError, match=r"classes has no effect with kind 'tokens'"):
        SyntheticConfig(kind="tokens", classes=7)
    with pytest.raises(ValidationError, match=r"vocab_size, window has no effect with kind 'im"):
        SyntheticConfig(kind="images", window=7, vocab_size=9)
    config = SyntheticConfig(kind="tokens", window=7)
    assert SyntheticConfig.model_validate(config.model_dump()) == config


def test_pictures_larger_than_the_machine_are_refused_before_one_is_drawn() -> None:
    message = r"64 arrays of noise, each of shape \[32, 32, 2000000000\], need 151,552.0 GB, but"
    with pytest.raises(DataError, match=message):
        SyntheticConfig(kind="images", channels=2_000_000_000).build()


def test_labelled_tokens_have_the_class_of_their_first_token() -> None:
    dataset = _dataset({**_TOKENS, "kind": "labelled_tokens"}, classes=3)
    batch = take(dataset.train, np.arange(100))
    assert dataset.classes == 3
    assert dataset.vocab_size == 50
    assert batch["tokens"].shape == batch["segments"].shape == (100, 40)
    np.testing.assert_array_equal(batch["label"], batch["tokens"][:, 0] % 3)
    with pytest.raises(ValidationError, match=r"height has no effect with kind 'labelled_tokens'"):
        _dataset({**_TOKENS, "kind": "labelled_tokens"}, height=3)
