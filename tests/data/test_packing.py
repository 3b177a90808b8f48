"""Documents packed into windows: all of them once, whole, with little padding."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxdist.data.text.dataset import TextConfig
from jaxdist.data.text.packing import PackedSource, pack_lengths
from jaxdist.data.text.windows import join_documents

END = 9


@given(st.lists(st.integers(1, 12), max_size=40))
def test_every_piece_is_in_one_window_that_holds_it(lengths: list[int]) -> None:
    windows = pack_lengths(lengths, 12)
    assert sorted(piece for own in windows for piece in own) == [*range(len(lengths))]
    assert all(sum(lengths[piece] for piece in own) <= 12 for own in windows)
    # No two windows fit into one, or best fit would have put them together.
    assert sum(2 * sum(lengths[piece] for piece in own) <= 12 for own in windows) <= 1


@given(st.lists(st.lists(st.integers(0, 8), max_size=20), min_size=1, max_size=8))
def test_windows_give_the_documents_back(documents: list[list[int]]) -> None:
    arrays = [np.array(document, int) for document in documents]
    source = PackedSource(
        join_documents(arrays, end_of_document=END, vocab_size=10), window=7, end_of_document=END
    )
    found: Counter[tuple[int, ...]] = Counter()
    padding = 0
    for i in range(len(source)):
        example = source[i]
        tokens, segments = example["tokens"][:-1], example["segments"]
        padding += (segments == 0).sum()
        assert (tokens[segments == 0] == END).all()
        for number in range(1, segments.max() + 1):
            (at,) = np.nonzero(segments == number)
            assert (np.diff(at) == 1).all()
            found[tuple(tokens[at])] += 1
    whole = [[END, *document] for document in documents if document]
    assert found == Counter(tuple(w[i : i + 7]) for w in whole for i in range(0, len(w), 7))
    if len(source):
        assert source.padding == pytest.approx(padding / (7 * len(source)))


@pytest.mark.full
def test_two_percent_of_real_documents_is_padding_at_most() -> None:
    found = TextConfig(masking={}, packing="documents", window=128).build()
    assert found.train.source.padding < 0.02
    assert f"{found.train.source.padding:.2%} are padding" in found.description


def test_packing_without_hidden_tokens_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"data.packing: documents works only with data.masking"
    ):
        TextConfig(packing="documents")
