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
        shape = (len(indices), self._window + 1)
        tokens = np.full(shape, self._end_of_document, np.int32)
        segments = np.zeros((len(indices), self._window), np.int32)
        for row, index in enumerate(indices):
            place = 0
            for number, piece in enumerate(self._windows[int(index)], 1):
                start, length = self._pieces[piece]
                here = slice(place, place + length)
                tokens[row, here] = self._stream[start : start + length]
                segments[row, here] = number
                place += length
        return {"tokens": tokens, "segments": segments}
