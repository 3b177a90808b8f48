"""The work and speed of kernels for which the TPU compiler gives no estimate.

For a Pallas kernel, libtpu prints only the schedule: for each core, the bundles (VLIW instructions,
one per cycle) of the kernel's loop over blocks. An iteration takes at least one cycle for each of
its bundles, and at least the cycles of its products in the matrix units. `python -m
benchmarks.tpu.splash` and `python -m benchmarks.tpu.grouped` compile the kernels of splash
attention and megablox alone. From the larger number of cycles, they compute the fractions of the
peak in `kernels.toml`. Waits for memory are left out, since the operands of an iteration are
fetched during the previous iteration.

All other kernels are assumed to run at the fraction `OTHERS` of the peak.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from operator import le
from pathlib import Path
from typing import Any

from jaxdist.hlo.estimates import Effort

OTHERS = 0.5
"""The assumed fraction of the peak at which kernels in neither `SPLASH` nor `GROUPED` compute."""

_FLOATS = ("bf16", "f32")
_GROUPED = re.compile(r"(?:^|_)(t?gmm)(?:_|$)")
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")


_TABLE = tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))
SPLASH: Mapping[str, Any] = _TABLE["splash"]
"""The kernels of jax's splash attention for heads of size `HEAD`.

The entry of a kernel has the number of matrix products for a block of queries and a block of keys
("products"), the name of the block length along queries in the kernel's metadata ("side"), and for
each family the fraction of the peak on computed blocks, by block length ("efficiency")."""
GROUPED = {
    name: {(rows, depth, width): share for rows, depth, width, share in tiles}
    for name, tiles in _TABLE["grouped"].items()
}
"""For each kernel of megablox, the fraction of the peak on computed tiles in bfloat16, by tile."""
GROUPED_ROWS = 512
"""The largest number of rows of a tile of megablox."""
FEW_TILES = 7
"""The mean number of tiles per expert, of `GROUPED_ROWS` rows each, below which tiles with half as
many rows are faster. Two experts share one tile at their border, and each computes all of this
tile.
"""
HEAD = 128
"""The size of a head in the compiled kernels of `SPLASH`."""
LANES = 128
"""The number of lanes of a TPU's vector unit, which divides the length of every block."""
LARGEST = {"v6e": 2048, "tpu7x": 2048}
"""The largest length of a kernel's block, for the families on which it is not `LARGEST_ELSEWHERE`.

Blocks of 2,048 need more vector memory than libtpu 0.0.52 gives a kernel by default on v5e and v5p,
and more than v4 has."""
LARGEST_ELSEWHERE = 1024
"""The largest length of a kernel's block on families without an entry in `LARGEST`."""


def splash_block(
    kernel: str,
    family: str,
    length: int,
    *,
    window: int | None = None,
    narrow: bool = True,
    chunks: int = 1,
) -> int:
    """Return the block length with which a kernel of splash attention is fastest.

    Larger blocks fill the matrix units better, but compute more values that the mask discards. If
    no block in the table divides the length, the result is the largest multiple of `LANES` that
    divides the length.

    Args:
      kernel: a key of `SPLASH`.
      family: the family of the chip; a family that is not in the table is treated as v5p.
      length: the length of the sequence.
      window: the number of earlier positions that a query sees, or None for all of them.
      narrow: whether numbers have two bytes; for wider numbers, a block has at most 1,024
        positions.
      chunks: the number of equal parts of the sequence; the block must divide each part.

    >>> splash_block("dq", "v5p", 4096), splash_block("dq", "v6e", 4096)
    (512, 1024)
    >>> splash_block("fwd", "v6e", 65536), splash_block("fwd", "v5p", 640)
    (2048, 640)
    """
    rates = _rates(kernel, family)
    most = LARGEST.get(family, LARGEST_ELSEWHERE) if narrow else LARGEST_ELSEWHERE
    chunk = length // chunks
    fitting = [size for size in rates if size <= most and chunk % size == 0]
    if not fitting:
        return max(n for n in range(LANES, LARGEST_ELSEWHERE + 1, LANES) if chunk % n == 0)
    return min(fitting, key=lambda size: computed_share(length, size, window) / rates[size])


def grouped_tiles(
    rows: int, depth: int, width: int, *, experts: int, narrow: bool
) -> tuple[int, int, int]:
    """Return the tile of megablox for a product `[rows, depth]` by `[depth, width]` of each expert.

    Wider tiles take less time to start and await copies. A chip with two cores divides the tiles
    along `width` between the cores (along `depth` in the backward pass), so an even number of tiles
    is preferred.

    Args:
      rows: the number of rows of all experts.
      depth: the number of input features of an expert.
      width: the number of output features of an expert.
      experts: the number of experts.
      narrow: whether numbers have two bytes; for wider numbers, a side of a tile has at most 512.

    >>> grouped_tiles(32768, 4096, 14336, experts=8, narrow=True)
    (512, 1024, 1024)
    >>> grouped_tiles(131072, 7168, 2048, experts=256, narrow=True)
    (256, 1024, 512)
    """
    sides = [n for n in (1024, 512, 256, LANES) if narrow or n <= GROUPED_ROWS]
    fitting = [n for n in sides if width % n == 0]
    even = [n for n in fitting if not (width // n % 2 or (depth % n == 0 and depth // n % 2))]
    most = GROUPED_ROWS // (2 if rows < FEW_TILES * GROUPED_ROWS * experts else 1)
    return (
        next(n for n in sides if n <= most and rows % n == 0),
        next(n for n in sides if depth % n == 0),
        (even or fitting)[0],
    )


def computed_share(length: int, block: int, window: int | None = None) -> float:
    """Return the fraction of blocks that have an unmasked element, and are therefore computed.

    Args:
      length: the length of the sequence.
      block: the length of a block.
      window: the number of earlier positions that a query sees, or None for all of them.

    >>> computed_share(4096, 1024), computed_share(4096, 1024, window=1023)
    (0.625, 0.4375)
    """
    turns = max(1, length // block)
    most = turns if window is None else min(turns, 1 + math.ceil(window / block))
    return sum(min(turn, most) for turn in range(1, turns + 1)) / turns**2


def kernel_work(effort: Effort, family: str) -> tuple[float, float, str]:
    """Return the FLOPs of a kernel's call, its fraction of the peak, and the assumption as text.

    The mask of splash attention is assumed to be causal, so that n (n + 1) / 2 of n x n blocks are
    computed.

    Args:
      effort: the call, as read from the program.
      family: the family of the chip, for example "v5e".
    """
    found = _SPLASH.match(effort.kernel)
    if found is None and (grouped := _GROUPED.search(effort.kernel)):
        return _grouped_work(effort, grouped[1])
    if found is None:
        return effort.flops, OTHERS, f"{effort.what}: {OTHERS:.0%} of peak"
    kernel = SPLASH[found[1]]
    block = effort.blocks.get(kernel["side"], 512)
    query, key = [s for s in effort.operands if len(s.dims) > 2 and s.dtype in _FLOATS][:2]
    # A fused backward kernel also computes the gradient of the queries, a part for each block of
    # keys. The gradients of the keys may have the shape of the queries too, but not a dim of parts.
    parts = [r for r in effort.results if len(r.dims) > len(key.dims)]
    fused = found[1] == "dkv" and any(r.dims[-3:] == query.dims[-3:] for r in parts)
    products = kernel["products"] + int(fused)
    # Devices that share a sequence are assumed to compute equal numbers of its causal blocks.
    share_computed = computed_share(key.dims[-2], block)
    flops = products * 2.0 * query.elements * key.dims[-2] * share_computed
    share = splash_share(found[1], family, block, query.dims[-1])
    words = f"{found[0]}, blocks of {block}: causal blocks at {share:.0%} of peak"
    return flops, share, words


def _grouped_work(effort: Effort, kernel: str) -> tuple[float, float, str]:
    """Return what `kernel_work` returns, for a product of rows with the kernels of their experts.

    A tile whose rows belong to several experts is computed once for each of these experts. The
    program has room for one such tile between any two successive experts, and all of this room is
    counted.
    """
    floats = [s for s in effort.operands if s.dtype in _FLOATS]
    tiles = max(s.dims[0] for s in effort.operands if s.dtype == "s32" and s.dims)
    kernels = next(s for s in (*floats, *effort.results) if len(s.dims) == 3)
    experts, *widths = kernels.dims
    rows, filled = floats[0].dims[0], tiles - experts + 1
    narrow = floats[0].dtype == "bf16"
    _, *sides = grouped_tiles(rows, *widths, experts=experts, narrow=narrow)
    tile = rows // filled, max(sides), min(sides)
    # A tile that is not in the table gets the largest fraction among the tiles of the table that
    # are at most as large in each dim.
    within = [of for one, of in GROUPED[kernel].items() if all(map(le, one, tile))]
    share = max(within, default=OTHERS)
    flops = effort.flops * tiles / filled
    return flops, share, f"{kernel} of {experts} experts: {tiles} tiles at {share:.0%} of peak"


def splash_share(kernel: str, family: str, block: int, head_dim: int) -> float:
    """Return the fraction of the peak at which a splash attention kernel computes its blocks.

    The result is the fraction of the nearest block length in `SPLASH`. Heads smaller than `HEAD`
    fill proportionally less of the matrix units.

    Args:
      kernel: a key of `SPLASH`.
      family: the family of the chip; a family that is not in the table is treated as v5p.
      block: the length of a block.
      head_dim: the size of a head.
    """
    by_block = _rates(kernel, family)
    nearest = min(by_block, key=lambda size: abs(size - block))
    return by_block[nearest] * min(1.0, head_dim / HEAD)


@cache
def _rates(kernel: str, family: str) -> Mapping[int, float]:
    """Return a kernel's fraction of the peak for each compiled block length."""
    by_family = SPLASH[kernel]["efficiency"]
    rates = by_family.get(family, by_family["v5p"])
    return {int(block): share for block, share in rates.items()}
