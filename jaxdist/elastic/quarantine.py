"""Which hosts are to take part where some ask to be left out: a function of plain data.

A host of which a process was stuck asks so for a while: what stood still may stand still again. The
others begin without it, where they are enough and can work together; else it takes part at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

Fits = Callable[[Sequence[str]], bool]


def all_fit(hosts: Sequence[str]) -> bool:
    """Any hosts can work together."""
    return True


def able(
    alive: Iterable[str],
    quarantined: Collection[str],
    least: int,
    most: int,
    fits: Fits = all_fit,
) -> tuple[str, ...]:
    """The hosts that may take part, in their order; so many of them at most will.

    >>> able("abc", {"b"}, 2, 4), able("abc", {"b"}, 3, 4)
    (('a', 'c'), ('a', 'b', 'c'))

    Args:
      alive: in the order in which they came.
      aside: those that ask to be left out.
      least: so many must take part.
      fits: whether some can work together, such as in a mesh; asked only where it decides.
    """
    everyone = tuple(alive)
    ready = tuple(host for host in everyone if host not in quarantined)
    if len(ready) == len(everyone):
        return everyone
    return ready if len(ready) >= least and fits(ready[:most]) else everyone
