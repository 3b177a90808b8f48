"""The quarantine of hosts: which hosts take part in a generation, computed from plain data.

A host with a stuck process asks to be left out for a while, because a process that was stuck once
may be stuck again. If enough other hosts are left and they can form a mesh, they start without this
host. Otherwise the host takes part at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

Fits = Callable[[Sequence[str]], bool]


def all_fit(hosts: Sequence[str]) -> bool:
    """Return True, since by default any set of hosts can work together."""
    return True


def able(
    alive: Iterable[str],
    quarantined: Collection[str],
    least: int,
    most: int,
    fits: Fits = all_fit,
) -> tuple[str, ...]:
    """Return the hosts that may take part, in order; a generation uses the first `most` of them.

    >>> able("abc", {"b"}, 2, 4), able("abc", {"b"}, 3, 4)
    (('a', 'c'), ('a', 'b', 'c'))

    Args:
      alive: the hosts with a valid registration, in the order in which they joined.
      quarantined: the hosts that ask to be left out.
      least: the smallest number of hosts of a generation.
      most: the largest number of hosts of a generation.
      fits: the function that returns whether hosts can work together, for example in a mesh. The
        function is called only if a host is quarantined.
    """
    everyone = tuple(alive)
    ready = tuple(host for host in everyone if host not in quarantined)
    if len(ready) == len(everyone):
        return everyone
    return ready if len(ready) >= least and fits(ready[:most]) else everyone
