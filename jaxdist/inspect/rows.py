"""The rows of tables of collectives, and the format of numbers in tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxdist.hlo.records import Collective, Ledger


@dataclass(frozen=True)
class CollectiveRow:
    """The collectives of a kind over the same mesh axes, in a step on a device.

    Attributes:
      axes: the mesh axes that each group of devices spans, or None if the groups are not a product
        of axes.
      kind: the kind of collective, or an empty string for all kinds together.
      times_low, times_high: the least and the largest number of executions, which differ if a
        conditional decides about executions.
      bounded: whether `times_high` is a bound. The value is False if the collectives are in a loop
        of unknown length, which counts as a single iteration.
      dtypes: the sent dtypes, sorted.
      payload_bytes: the bytes of the full tensors, summed over the executions.
      sent_bytes: the bytes that the busiest device sends.
      overlapped_bytes: the part of `sent_bytes` that is sent while the device computes.
    """

    axes: tuple[str, ...] | None
    kind: str
    times_low: int
    times_high: int
    bounded: bool
    dtypes: tuple[str, ...]
    payload_bytes: int
    sent_bytes: float
    overlapped_bytes: float

    @property
    def exposed_bytes(self) -> float:
        """The number of bytes that are sent while the device waits."""
        return self.sent_bytes - self.overlapped_bytes

    @property
    def label(self) -> str:
        """The mesh axes over which the row's collectives send, as text."""
        return "other groups" if self.axes is None else " x ".join(self.axes) or "one device"

    @property
    def times(self) -> str:
        """The number of executions as text, which is a range for a collective in a conditional."""
        if not self.bounded:
            return f"{self.times_low:,} or more"
        low, high = self.times_low, self.times_high
        return f"{high:,}" if low == high else f"{low:,}-{high:,}"


def _sum(axes: tuple[str, ...] | None, kind: str, found: Sequence[Collective]) -> CollectiveRow:
    return CollectiveRow(
        axes=axes,
        kind=kind,
        times_low=sum(c.times_low for c in found),
        times_high=sum(c.times_high for c in found),
        bounded=all(c.bounded for c in found),
        dtypes=tuple(sorted({dtype for c in found for dtype in c.dtypes})),
        payload_bytes=sum(c.times_high * c.payload_bytes for c in found),
        sent_bytes=math.fsum(c.times_high * c.sent_bytes for c in found),
        overlapped_bytes=math.fsum(c.times_high * c.sent_bytes for c in found if c.overlapped),
    )


def _order(axes: tuple[str, ...] | None, ledger: Ledger) -> tuple[bool, int, list[int]]:
    """Return a key that sorts axes: single axes in mesh order, then several axes, then None."""
    names = list(ledger.axes)
    return axes is None, len(axes or ()), [names.index(axis) for axis in axes or ()]


def by_axes(ledger: Ledger, together: tuple[str, ...] = ()) -> list[CollectiveRow]:
    """Return a row for each set of mesh axes that collectives span.

    Args:
      ledger: the ledger with the collectives.
      together: mesh axes. All collectives over any of these axes share a row. For example, a
        reduction inside the fast network that precedes a reduction across the slow network is part
        of a reduction over both networks.
    """

    def span(collective: Collective) -> tuple[str, ...] | None:
        axes = collective.axes
        return together if axes and set(axes) <= set(together) else axes

    spans = sorted({span(c) for c in ledger.collectives}, key=lambda axes: _order(axes, ledger))
    return [_sum(axes, "", [c for c in ledger.collectives if span(c) == axes]) for axes in spans]


def by_kind(ledger: Ledger) -> list[CollectiveRow]:
    """Return a row for each set of mesh axes and each kind of collective.

    Within a set, the rows are sorted by sent bytes, and the largest comes first.
    """
    rows: list[CollectiveRow] = []
    for whole in by_axes(ledger):
        mine = [c for c in ledger.collectives if c.axes == whole.axes]
        kinds = [_sum(whole.axes, k, [c for c in mine if c.kind == k]) for k in _kinds(mine)]
        rows += sorted(kinds, key=lambda row: -row.sent_bytes)
    return rows


def _kinds(collectives: Iterable[Collective]) -> list[str]:
    return sorted({collective.kind for collective in collectives})


def show_bytes(size_bytes: float) -> str:
    """Return a size as text, with three digits and a decimal unit.

    >>> show_bytes(7340032), show_bytes(0), show_bytes(999.6), show_bytes(16.9e9)
    ('7.34 MB', '0 B', '1 kB', '16.9 GB')
    """
    return show_number(size_bytes, "B")


def show_number(value: float, unit: str = "") -> str:
    """Return a number as text, with three digits and a decimal prefix.

    >>> show_number(6140461056, "FLOP"), show_number(12)
    ('6.14 GFLOP', '12')
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        rounded = float(f"{value:.3g}")
        if abs(rounded) < 1000:
            return f"{rounded:g} {prefix}{unit}".rstrip()
        value /= 1000
    return f"{value:.3g} E{unit}"


def show_ratio(value: float, reference: float | None) -> str:
    """Return `value` divided by `reference` as text, or a dash if `reference` is None or 0.

    >>> show_ratio(3, 2), show_ratio(3, 0), show_ratio(3, None)
    ('1.500', '-', '-')
    """
    return f"{value / reference:.3f}" if reference else "-"
