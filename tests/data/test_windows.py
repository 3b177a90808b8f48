from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.data.text.windows import WindowSource, join_documents

_END = 9
_documents = st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=8)


def _stream(documents: list[list[int]]) -> np.ndarray:
    arrays = [np.array(document, int) for document in documents]
    return join_documents(arrays, end_of_document=_END, vocab_size=10)


@given(_documents, st.integers(1, 7))
def test_windows_give_the_stream_back(documents: list[list[int]], window: int) -> None:
    stream = _stream(documents)
    source = WindowSource(stream, window=window, end_of_document=_END)
    targets = [source[index]["tokens"][1:] for index in range(len(source))]
    again = np.concatenate([stream[:1], *targets])
    np.testing.assert_array_equal(again, stream[: len(again)])
    assert 0 <= len(stream) - len(again) < window
    for index in range(len(source) - 1):
        assert source[index]["tokens"][-1] == source[index + 1]["tokens"][0]


@given(_documents, st.integers(1, 9))
def test_equal_segments_are_one_document(documents: list[list[int]], window: int) -> None:
    """The document of each position, found by hand, partitions a window as `segments` do."""
    stream = _stream(documents)
    document = [-1]
    for token in stream:
        document.append(document[-1] + (token == _END))
    owner = np.array(document[1:])
    source = WindowSource(stream, window=window, end_of_document=_END)
    for index in range(len(source)):
        segments = source[index]["segments"]
        mine = owner[index * window :][:window]
        np.testing.assert_array_equal(
            segments[:, None] == segments[None, :], mine[:, None] == mine[None, :]
        )


@given(_documents)
def test_documents_can_be_told_apart_again(documents: list[list[int]]) -> None:
    stream = _stream(documents).tolist()
    pieces: list[list[int]] = []
    for token in stream[:-1]:
        if token == _END:
            pieces.append([])
        else:
            pieces[-1].append(token)
    assert pieces == documents
    assert stream[-1] == _END


def test_a_batch_at_once_equals_one_by_one() -> None:
    source = WindowSource(np.arange(100) % 10, window=7, end_of_document=_END)
    indices = np.array([3, 0, 13, 3])
    batch = source.take(indices)
    assert batch["tokens"].dtype == batch["segments"].dtype == np.int32
    for row, index in enumerate(indices.tolist()):
        for name, values in source[index].items():
            np.testing.assert_array_equal(batch[name][row], values)


@pytest.mark.parametrize(("length", "windows"), [(0, 0), (1, 0), (7, 0), (8, 1), (14, 1), (15, 2)])
def test_how_many_windows(length: int, windows: int) -> None:
    source = WindowSource(np.zeros(length, int), window=7, end_of_document=_END)
    assert len(source) == windows
    with pytest.raises(IndexError, match=f"example {windows} of {windows}"):
        source[windows]


def test_the_dtype_holds_the_vocabulary() -> None:
    for vocab_size, dtype in [(257, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32)]:
        stream = join_documents(
            [np.array([vocab_size - 2])], end_of_document=vocab_size - 1, vocab_size=vocab_size
        )
        assert stream.dtype == dtype
        assert stream.tolist() == [vocab_size - 1, vocab_size - 2, vocab_size - 1]
