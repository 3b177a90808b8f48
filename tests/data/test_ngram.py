from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data.text import ngram
from jaxdist.data.text.documents import python_stdlib
from jaxdist.data.text.ngram import WITTEN_BELL, TrigramModel, count


def _half(size: int) -> np.ndarray:
    return np.full(size, 0.5)


def test_counts_by_hand() -> None:
    bigrams = count([np.array([0, 1, 0, 1, 1])], 2, vocab_size=2)
    assert bigrams.grams.tolist() == [0b01, 0b10, 0b11]
    assert bigrams.counts.tolist() == [2, 1, 1]
    assert bigrams.contexts.tolist() == [0, 1]
    assert bigrams.totals.tolist() == [2, 2]


def test_pieces_are_not_joined() -> None:
    bigrams = count([np.array([0, 0]), np.array([1, 1])], 2, vocab_size=2)
    assert bigrams.grams.tolist() == [0b00, 0b11]


def test_probabilities_by_hand() -> None:
    """Every g is one half; the stream is 0 1 0 1 1, and p(1 | 0 1), p(0 | 0 1) are asked for."""
    stream = np.array([0, 1, 0, 1, 1])
    orders = [count([stream], n, 2) for n in (1, 2, 3)]
    model = TrigramModel(2, orders, [_half(64)] * 3)
    one, zero = 0.5 * 3 / 5 + 0.25, 0.5 * 2 / 5 + 0.25  # unigram and uniform
    one, zero = 0.5 * 1 / 2 + one / 2, 0.5 * 1 / 2 + zero / 2  # after 1: 0 once, 1 once
    one, zero = 0.5 * 1 / 2 + one / 2, 0.5 * 1 / 2 + zero / 2  # after 0 1: 0 once, 1 once
    assert model.probabilities(np.array([0, 1, 1])).tolist() == pytest.approx([one])
    assert model.probabilities(np.array([0, 1, 0])).tolist() == pytest.approx([zero])
    expected = -(np.log(one) + np.log(model.probabilities(np.array([1, 1, 0]))[0])) / 2
    assert model.loss(np.array([0, 1, 1, 0])) == pytest.approx(expected)


@settings(max_examples=30)
@given(
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
    st.sampled_from([3, 50, 3000]),
    st.booleans(),
)
def test_probabilities_sum_to_one(vocab_size: int, seed: int, length: int, dense: bool) -> None:
    random = np.random.default_rng(seed)
    used = random.integers(1, vocab_size + 1)  # some tokens may never be seen
    with pytest.MonkeyPatch.context() as patch:
        if not dense:
            patch.setattr(ngram, "_DENSE_LIMIT", 0)
        model = TrigramModel.fit(random.integers(used, size=length), vocab_size)
    for context in [(0, 0), (0, vocab_size - 1), tuple(random.integers(vocab_size, size=2))]:
        each = [model.probabilities(np.array([*context, token]))[0] for token in range(vocab_size)]
        assert sum(each) == pytest.approx(1)
        assert min(each) > 0


def test_both_ways_of_counting_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = np.random.default_rng(0).integers(5, size=2000)
    dense = count([stream], 3, 5)
    monkeypatch.setattr(ngram, "_DENSE_LIMIT", 0)
    sparse = count([stream], 3, 5)
    for name in ("grams", "counts", "contexts", "totals", "buckets"):
        np.testing.assert_array_equal(getattr(dense, name), getattr(sparse, name))


def test_a_second_order_chain_is_learned_to_its_entropy() -> None:
    """Each token is the sum of the two before it, or with probability 0.2 any of eight."""
    random = np.random.default_rng(0)
    tokens = [0, 1]
    for noise, other in zip(random.random(60_000), random.integers(8, size=60_000), strict=True):
        tokens.append(int(other) if noise < 0.2 else (tokens[-1] + tokens[-2]) % 8)
    stream = np.array(tokens)
    right, wrong = 0.8 + 0.2 / 8, 0.2 / 8
    entropy = -(right * np.log(right) + 7 * wrong * np.log(wrong))
    loss = TrigramModel.fit(stream[:50_000], 8).loss(stream[50_000:])
    assert loss == pytest.approx(entropy, abs=0.02)


def test_unseen_tokens_are_never_impossible() -> None:
    model = TrigramModel.fit(np.zeros(10_000, int), 257)
    assert np.isfinite(model.loss(np.full(10, 256)))


@pytest.mark.full
def test_fitted_weights_beat_fixed_ones() -> None:
    files = [file for file in python_stdlib() if "/" not in file.name][:120]
    texts = [np.frombuffer(file.path.read_bytes(), np.uint8) for file in files]
    train, heldout = np.concatenate(texts[::2]), np.concatenate(texts[1::20])
    fitted = TrigramModel.fit(train, 257)
    orders = [count([train], n, 257) for n in (1, 2, 3)]
    for back_off in (_half(64), WITTEN_BELL):
        fixed = TrigramModel(257, orders, [back_off] * 3)
        assert fitted.loss(heldout) < fixed.loss(heldout)
