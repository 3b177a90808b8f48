"""A trigram model of tokens, which is fitted by counting: the baseline for trained models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ORDERS = (1, 2, 3)
_APART_BLOCKS = 16
_APART_SHARE = 20
_BUCKETS = 64
_STEPS = 40
_DENSE_LIMIT = 2**25
_BELIEF = 10.0
"""The weight of the prior WITTEN_BELL, in tokens.

The prior matters only for buckets with few tokens. A bucket is a range of the ratio c / T of
`TrigramModel`."""

WITTEN_BELL = 1 / (1 + 2 ** ((np.arange(_BUCKETS) + 0.5) / 2))
"""The g of Witten and Bell, T / (T + c), in the middle of each bucket of c / T; see
`TrigramModel`."""


@dataclass(frozen=True)
class Counts:
    """The counts of n-grams.

    An n-gram is stored as a number whose digits in base vocab_size are its tokens.
    """

    grams: np.ndarray
    """The n-grams, sorted, int64 [G]."""
    counts: np.ndarray
    """The count of each n-gram, int64 [G]."""
    contexts: np.ndarray
    """The contexts (n-grams without their last token), sorted, int64 [C]."""
    totals: np.ndarray
    """The total count of each context, int64 [C]."""
    buckets: np.ndarray
    """The bucket of each context, int64 [C]: 2 * log2(count per distinct next token)."""


class TrigramModel:
    """A model of trigrams interpolated with bigrams, unigrams and the uniform distribution.

    With c the count of a context and T the number of distinct tokens seen after it,

        p_n(w | context) = (1 - g) * count(context w) / c + g * p_{n-1}(w | shorter context)

    and g = 1 for an unseen context. Otherwise g depends only on a bucket of c / T. Expectation
    maximization starts from the g of Witten and Bell, and finds the g of each bucket that maximizes
    the likelihood of a slice of the training tokens. This slice is left out of the counts until
    then, but the final counts include all training tokens.

    Source: Jelinek and Mercer (1980); the buckets are from Chen and Goodman, "An empirical study of
    smoothing techniques for language modeling", section 2.2 (1998).

    >>> model = TrigramModel.fit(np.tile([0, 1, 2], 2000), vocab_size=4)
    >>> round(model.loss(np.tile([0, 1, 2], 10)), 2)
    0.0
    """

    def __init__(self, vocab_size: int, orders: Sequence[Counts], back_off: Sequence[np.ndarray]):
        """Make a trigram model from the counts of n-grams.

        Args:
          orders: the counts of 1-grams, 2-grams and 3-grams.
          back_off: for each of these orders, the g of each bucket; see `TrigramModel`.
        """
        self._vocab_size = vocab_size
        self._orders = orders
        self._back_off = back_off

    @classmethod
    def fit(cls, stream: np.ndarray, vocab_size: int) -> TrigramModel:
        """Return the model of a training stream.

        For 30 million bytes this takes about 8 s and 2 GB on a core.

        Args:
          stream: the tokens, integers [N] in [0, vocab_size).
          vocab_size: the number of tokens in the vocabulary, at most 2**20.
        """
        assert 1 <= vocab_size <= 2**20, "three tokens must fit an int64"
        apart, rest = _set_apart(np.asarray(stream))
        lower = np.full(sum(len(piece) - 2 for piece in apart), 1 / vocab_size)
        back_off = []
        for order in _ORDERS:
            bucket, own = _look_up(count(rest, order, vocab_size), apart, order, vocab_size)
            back_off.append(_fit_back_off(bucket, own, lower))
            lower = _interpolate(back_off[-1], bucket, own, lower)
        return cls(vocab_size, [count([stream], n, vocab_size) for n in _ORDERS], back_off)

    def probabilities(self, stream: np.ndarray) -> np.ndarray:
        """Return the probability of each token except the first two, float64 [N - 2]."""
        result = np.full(len(stream) - 2, 1 / self._vocab_size)
        for order, counts, back_off in zip(_ORDERS, self._orders, self._back_off, strict=True):
            bucket, own = _look_up(counts, [stream], order, self._vocab_size)
            result = _interpolate(back_off, bucket, own, result)
        return result

    def loss(self, stream: np.ndarray) -> float:
        """Return the mean of -log p over a stream (integers [N], N > 2), in nats per token."""
        assert len(stream) > 2, "the first two tokens are only contexts"
        return float(-np.log(self.probabilities(stream)).mean())


def count(pieces: Sequence[np.ndarray], order: int, vocab_size: int) -> Counts:
    """Count the n-grams of several parts of a stream; no n-gram crosses the border of a part.

    Args:
      pieces: the parts, integers [N].
      order: the n of the n-grams.
    """
    grams = np.concatenate([_grams(piece, order, vocab_size) for piece in pieces])
    if vocab_size**order <= _DENSE_LIMIT:
        table = np.bincount(grams)
        keys = np.flatnonzero(table)
        counts = table[keys]
    else:
        keys, counts = np.unique(grams, return_counts=True)
    contexts, first, types = np.unique(keys // vocab_size, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(first) else counts
    buckets = np.minimum(2 * np.log2(totals / types), _BUCKETS - 1).astype(np.int64)
    return Counts(keys, counts, contexts, totals, buckets)


def _grams(piece: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Return the n-grams of a part of a stream as numbers, int64 [N - order + 1]."""
    size = max(len(piece) - order + 1, 0)
    grams = np.zeros(size, np.int64)
    for place in range(order):
        grams = grams * vocab_size + piece[place : place + size]
    return grams


def _look_up(
    counts: Counts, pieces: Sequence[np.ndarray], order: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return two numbers for each token after the first two tokens of each part.

    The first number is the bucket of the token's context, or -1 for an unseen context. The second
    number is the count of the token after this context, divided by the count c of the context.
    """
    grams = np.concatenate(
        [_grams(piece[_ORDERS[-1] - order :], order, vocab_size) for piece in pieces]
    )
    context, known = _find(counts.contexts, grams // vocab_size)
    gram, seen = _find(counts.grams, grams)
    share = counts.counts[gram] / counts.totals[context]
    return np.where(known, counts.buckets[context], -1), np.where(known & seen, share, 0.0)


def _find(sorted_values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each wanted value in the sorted values, and whether it is present."""
    places = np.minimum(np.searchsorted(sorted_values, wanted), len(sorted_values) - 1)
    return places, sorted_values[places] == wanted


def _interpolate(
    back_off: np.ndarray, bucket: np.ndarray, own: np.ndarray, lower: np.ndarray
) -> np.ndarray:
    share = np.where(bucket >= 0, back_off[bucket], 1.0)
    return (1 - share) * own + share * lower


def _fit_back_off(bucket: np.ndarray, own: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Return the g of each bucket, float64 [64], that fits the given tokens and `_BELIEF` best.

    `TrigramModel` defines g and the buckets.

    Args:
      bucket: the bucket of each token's context, or -1.
      own: for each token, its count after its context, divided by the count c of the context.
      lower: the probability of each token by the lower order.
    """
    known = bucket >= 0
    bucket, own, lower = bucket[known], own[known], lower[known]
    believed = np.bincount(bucket, minlength=_BUCKETS) + _BELIEF
    back_off = WITTEN_BELL
    for _ in range(_STEPS):
        share = back_off[bucket]
        blame = share * lower / ((1 - share) * own + share * lower)
        back_off = (np.bincount(bucket, blame, _BUCKETS) + _BELIEF * WITTEN_BELL) / believed
    return back_off


def _set_apart(stream: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return 16 short blocks, together a twentieth of the stream, and the parts between blocks.

    If the blocks of a short stream would be shorter than a trigram, the results are the first two
    tokens and the whole stream.
    """
    length = len(stream) // (_APART_SHARE * _APART_BLOCKS)
    starts = [len(stream) * number // _APART_BLOCKS for number in range(_APART_BLOCKS)]
    if length < _ORDERS[-1]:
        return [stream[:2]], [stream]
    apart = [stream[start : start + length] for start in starts]
    ends = [*starts[1:], len(stream)]
    return apart, [stream[a + length : b] for a, b in zip(starts, ends, strict=True)]
