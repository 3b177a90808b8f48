"""The choice of the ranges (of parameters or table rows) that pass to servers that join a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def passed(
    held: Mapping[int, Collection[int]], joining: int, without: Collection[int] = ()
) -> list[tuple[int, int]]:
    """Return the ranges that move to joining servers, as pairs of the range's old server and range.

    If one server joins n other servers, it receives 1 of n + 1 equal parts of all ranges, rounded
    down, and no other range moves. Each range comes from the server that then has the most ranges.

    Args:
      held: the ranges of each server.
      joining: the number of servers that join.
      without: the ranges that stay.

    >>> passed({0: [0, 2, 4], 1: [1, 3, 5]}, joining=1)
    [(0, 4), (1, 5)]
    """
    left = {server: sorted(ranges) for server, ranges in held.items()}
    each = sum(map(len, left.values())) // (len(left) + joining)
    found: list[tuple[int, int]] = []
    for _ in range(each * joining):
        free = {one: [at for at in ranges if at not in without] for one, ranges in left.items()}
        giver = max(free, key=lambda one: (bool(free[one]), len(left[one]), -one))
        if not free[giver]:
            break
        found.append((giver, free[giver][-1]))
        left[giver].remove(free[giver][-1])
    return found
