"""The fraction of the peak that a matrix product reaches on each TPU family.

The fractions are in `products.json`. `python -m benchmarks.tpu.products` writes this file from
products that it compiles separately: with the vector memory of `parallel.xla.preset: default`
("scoped"), and with the vector memory that libtpu gives by default ("own limit").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

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
    depths, widths = (sorted(set(sizes)) for sizes in zip(*table, strict=True))
    along = [_interpolated(columns, widths, [table[k, n] for n in widths]) for k in depths]
    return _interpolated(contracted, depths, along)


def _interpolated(size: int, sizes: list[int], known: list[float]) -> float:
    return float(np.interp(np.log(size), np.log(sizes), known))
