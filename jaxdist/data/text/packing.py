"""Whole documents packed into windows, without a document that is spread over two windows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxdist.data.source import Example, take_one


def pack_lengths(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Place the pieces, the longest first, into the windows that they fill most.

    This is best fit decreasing, which needs at most 11/9 of the least number of windows (Johnson
    et al. 1974, SIAM J. Comput. 3).

    Args:
      lengths: length of each piece, at most `window`.

    >>> pack_lengths([3, 2, 6, 5, 4], 8)
    [[2, 1], [3, 0], [4]]
    """
    windows: list[list[int]] = []
    rooms: list[int] = []  # the distinct free lengths, sorted
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


class PackedSource:
    """Windows of whole documents of a stream, with the document of each position.

    A document is its separator and its tokens. A document that is longer than a window is cut into
    pieces of a window, and the rest, which count as documents of their own.

    `tokens` is int32 [L + 1], of which the last is a separator, and `segments` int32 [L]: documents
    are numbered from 1, and 0 is the padding at the end, which consists of separators.

    Attributes:
      padding: the fraction of all inputs that is padding.
    """

    def __init__(self, stream: np.ndarray, *, window: int, end_of_document: int):
        """Pack `stream`, integers [N], in which each document has a separator before it."""
        self._stream = np.asarray(stream)
        self._window, self._end_of_document = window, end_of_document
        starts = np.flatnonzero(self._stream == end_of_document)
        # The separator at the very end of the stream begins no document, nor does one before
        # another.
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

    def __getitem__(self, index: int) -> Example:
        return take_one(self, index)

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
