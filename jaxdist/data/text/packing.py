"""The packing of documents into windows, such that no document is spread over two windows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxdist.data.source import BatchSource, Example


def pack_lengths(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Return, for each window, the indices of the parts that are packed into the window.

    The parts are assigned one by one, the longest first. Each part goes to the window with the
    least remaining room that is sufficient. This method, best fit decreasing, needs at most about
    11/9 of the smallest possible number of windows (Johnson et al. 1974, SIAM J. Comput. 3).

    Args:
      lengths: the length of each part, at most `window`.
      window: the length of a window.

    >>> pack_lengths([3, 2, 6, 5, 4], 8)
    [[2, 1], [3, 0], [4]]
    """
    windows: list[list[int]] = []
    rooms: list[int] = []  # The different free lengths of windows, in increasing order.
    with_room: dict[int, list[int]] = defaultdict(list)
    for piece in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(rooms, lengths[piece])
        if at < len(rooms):
            room = rooms[at]
            own = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        else:
            room, own = window, len(windows)
            windows.append([])
        windows[own].append(piece)
        left = room - lengths[piece]
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(own)
    return windows


def laid_out(
    windows: Sequence[Sequence[np.ndarray]], width: int, filler: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay pieces of text next to each other in windows.

    Args:
      windows: the tokens of each piece, by window.
      width: the number of tokens of a window.
      filler: the token that fills up a window.

    Returns:
      The tokens, int32 [N, width], and the number of each token's piece in its window, counted
      from 1, or 0 for filler, int32 [N, width].

    >>> laid_out([[np.array([5, 6]), np.array([7])]], 4, 9)
    (array([[5, 6, 7, 9]], dtype=int32), array([[1, 1, 2, 0]], dtype=int32))
    """
    tokens = np.full((len(windows), width), filler, np.int32)
    segments = np.zeros(tokens.shape, np.int32)
    for row, pieces in enumerate(windows):
        whole = np.concatenate(pieces)
        tokens[row, : len(whole)] = whole
        numbers = np.arange(1, len(pieces) + 1)
        segments[row, : len(whole)] = np.repeat(numbers, [len(piece) for piece in pieces])
    return tokens, segments


class PackedSource(BatchSource):
    """A source of windows that hold documents of a stream, with the document of each position.

    A document consists of its separator and its tokens. A document that is longer than a window is
    cut into parts of the length of a window and a shorter rest; each part counts as a document.

    `tokens` is int32 [L + 1]; its last token is always a separator. `segments`, int32 [L], has for
    each position the number of its document in the window, counted from 1. The padding at the end
    consists of separators and has the number 0.

    Attributes:
      padding: the fraction of all inputs that is padding.
    """

    def __init__(self, stream: np.ndarray, *, window: int, end_of_document: int):
        """Pack the documents of a stream.

        Args:
          stream: the tokens, integers [N], with a separator before each document.
          window: the length of a window, L.
          end_of_document: the token that separates documents.
        """
        self._stream = np.asarray(stream)
        self._window, self._end_of_document = window, end_of_document
        starts = np.flatnonzero(self._stream == end_of_document)
        # A separator at the end of the stream, or before another separator, begins no document.
        ends = np.append(starts[1:], len(self._stream))
        self._pieces = [
            (int(at), min(window, int(end - at)))
            for start, end in zip(starts, ends, strict=True)
            if end - start > 1
            for at in range(start, end, window)
        ]
        self._windows = pack_lengths([length for _, length in self._pieces], window)
        full = len(self._windows) * window
        self.padding = 1 - sum(length for _, length in self._pieces) / full if full else 0.0

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, indices: np.ndarray) -> Example:
        """Return `tokens` int32 [N, L + 1] and `segments` int32 [N, L] of the windows `indices`."""
        windows = [
            [self._stream[start : start + length] for start, length in pieces]
            for pieces in ([self._pieces[at] for at in self._windows[i]] for i in indices)
        ]
        tokens, segments = laid_out(windows, self._window + 1, self._end_of_document)
        return {"tokens": tokens, "segments": segments[:, :-1]}
