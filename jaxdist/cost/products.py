"""The fraction of the peak that a matrix product reaches on each TPU family.

The fractions are in `products.json`. `python -m benchmarks.tpu.products` writes this file from
products that it compiles separately: with the vector memory of `parallel.xla.preset: default`
("scoped"), and with the vector memory that libtpu gives by default ("own limit").
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("products.json")
Shares = Mapping[tuple[int, int], float]
"""The fraction of the peak for each pair of sizes (contracted dim, columns)."""


OWN_LIMIT, SCOPED = "own limit", "scoped"
"""The names of a family's two tables, by the limit of vector memory: of libtpu, or of the preset
`default`. A family whose limit this preset does not change has only the table `OWN_LIMIT`."""


@cache
def shares(family: str, *, scoped: bool = True) -> Shares | None:
    """Return the fractions of the peak that products reach on a family of chips.

    The result is None for a family that is not in `products.json`.

    Args:
      scoped: the argument of `product_share` with the same name.
    """
    tables = json.loads(TABLE.read_text()).get(family)
    if tables is None:
        return None
    rows = tables.get(SCOPED if scoped else OWN_LIMIT, tables[OWN_LIMIT])
    return {(k, n): share for k, n, share in rows}


@cache
def product_share(
    family: str, contracted: int, columns: int, *, scoped: bool = True
) -> float | None:
    """Return the fraction of peak FLOP/s that a product of many rows reaches, or None if unknown.

    Sizes outside the table are clamped to its edge. Between entries, the fraction is linear in the
    logarithms of both sizes.

    Args:
      family: the family of the chip.
      contracted: the size of the contracted dim.
      columns: the number of columns of the result.
      scoped: whether the product may use the vector memory that the preset `default` grants.

    >>> product_share("h100", 8192, 8192) is None
    True
    """
    table = shares(family, scoped=scoped)
    if table is None:
        return None
    low_k, high_k, part_k = _between(sorted({k for k, _ in table}), contracted)
    low_n, high_n, part_n = _between(sorted({n for _, n in table}), columns)
    low = table[low_k, low_n] * (1 - part_n) + table[low_k, high_n] * part_n
    high = table[high_k, low_n] * (1 - part_n) + table[high_k, high_n] * part_n
    return low * (1 - part_k) + high * part_k


def _between(lengths: list[int], length: int) -> tuple[int, int, float]:
    """Return the lengths below and above `length` in a table, and the position between these two.

    The position is from 0 to 1, and linear in the logarithm of `length`. A `length` outside the
    table is clamped to the edge of the table.

    Args:
      lengths: the lengths in the table, in increasing order.
      length: the length to find.
    """
    length = min(max(length, lengths[0]), lengths[-1])
    # The index is at least 1, since `index - 1` must be in the table.
    index = max(1, bisect.bisect_left(lengths, length))
    low, high = lengths[index - 1], lengths[index]
    return low, high, math.log(length / low) / math.log(high / low)
