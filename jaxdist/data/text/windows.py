"""The division of a stream of tokens into windows of fixed length, with document numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxdist.data.source import BatchSource, Example


def join_documents(
    documents: Sequence[np.ndarray], *, end_of_document: int, vocab_size: int
) -> np.ndarray:
    """Join documents to a stream, with a separator before each document and another at the end.

    The result is uint16, or uint32 for a vocabulary that uint16 cannot hold.

    >>> join_documents([np.array([1, 2]), np.array([3])], end_of_document=9, vocab_size=10)
    array([9, 1, 2, 9, 3, 9], dtype=uint16)
    """
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    stream = np.full(sum(map(len, documents)) + len(documents) + 1, end_of_document, dtype)
    start = 1
    for document in documents:
        stream[start : start + len(document)] = document
        start += len(document) + 1
    return stream


class WindowSource(BatchSource):
    """Windows of a stream: example i reads tokens [i*L, i*L + L] and predicts the last L of them.

    `tokens` is int32 [L + 1]: the inputs are `tokens[:-1]`, and the targets are `tokens[1:]`.
    `segments` is int32 [L]: for each input, the number of separators in the window up to and
    including this input. A separator is the first input of the document after it, so inputs with
    equal numbers are in the same document.

    >>> stream = np.array([9, 1, 2, 9, 3, 9, 4])
    >>> source = WindowSource(stream, window=3, end_of_document=9)
    >>> source[0]["tokens"].tolist(), source[0]["segments"].tolist()
    ([9, 1, 2, 9], [1, 1, 1])
    >>> source[1]["tokens"].tolist(), source[1]["segments"].tolist()
    ([9, 3, 9, 4], [1, 1, 2])
    """

    def __init__(self, stream: np.ndarray, *, window: int, end_of_document: int):
        """Store a stream that is read as windows; the last, incomplete window is left out.

        Args:
          stream: the tokens, integers [N] with N > `window`.
          window: the length of a window, L.
          end_of_document: the token that separates documents.
        """
        self._stream = np.asarray(stream)
        self._window = window
        self._end_of_document = end_of_document

    def __len__(self) -> int:
        return max(len(self._stream) - 1, 0) // self._window

    def take(self, indices: np.ndarray) -> Example:
        """Return `tokens` int32 [N, L + 1] and `segments` int32 [N, L] of the windows `indices`."""
        places = indices[:, None] * self._window + np.arange(self._window + 1)
        tokens = self._stream[places].astype(np.int32)
        separators = tokens[:, :-1] == self._end_of_document
        return {"tokens": tokens, "segments": np.cumsum(separators, axis=1, dtype=np.int32)}
