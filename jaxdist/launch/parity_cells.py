"""The exact combinations that a plan can be made of, and a few that have every two settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from jaxdist.collectives.build import ReduceConfig
from jaxdist.mesh import DCN, ICI
from jaxdist.models.layers import Remat
from jaxdist.parallel.validity import Facts, violations
from jaxdist.parallel.zero import Stage, ZeroConfig

DEVICES = 8
MESHES: Mapping[str, Mapping[str, Any]] = {
    "data 8": {"data": 8},
    "data 4, tensor 2": {"data": 4, "tensor": 2},
    "data 2, tensor 4": {"data": 2, "tensor": 4},
    "data 2 dcn x 4 ici": {"data": {"dcn": 2, "ici": 4}},
}
"""By the name that the tables show."""
REDUCTIONS: tuple[str | None, ...] = (
    None,
    *(algorithm.model_fields["type"].default for algorithm in get_args(get_args(ReduceConfig)[0])),
)
"""None leaves the axis to XLA; every algorithm of ours, by type."""
Scope = Literal["all", "ici"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
REMATS: tuple[Remat, ...] = get_args(Remat)
_REDUCE: TypeAdapter[Any] = TypeAdapter(ReduceConfig)


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
      mesh: a key of `MESHES`.
      stage, scope: of ZeRO.
      reduce: one of `REDUCTIONS`.
      microbatches: pieces that the batch is computed in.
      remat: what the backward pass recomputes.
    """

    mesh: str
    stage: Stage
    scope: Scope
    reduce: str | None
    microbatches: int
    remat: Remat

    @property
    def cuts(self) -> tuple[str, ...]:
        """Which sums are added up in another order than on one device."""
        tensor = ("in matmuls",) if "tensor" in self.mesh else ()
        return "over devices", *tensor, *(("over microbatches",) if self.microbatches > 1 else ())

    @property
    def parallel(self) -> dict[str, Any]:
        """The section of a config; small tensors are split too."""
        return {
            "reduce": None if self.reduce is None else {"type": self.reduce},
            "zero": {"stage": self.stage, "scope": self.scope, "whole_below": 64},
        }


def facts_of(cell: Cell) -> Facts:
    """What the table of validity asks of a combination."""
    sizes: dict[str, int] = {}
    for axis, size in MESHES[cell.mesh].items():
        sizes |= (
            {axis: size}
            if isinstance(size, int)
            else {axis + DCN: size["dcn"], axis + ICI: size["ici"]}
        )
    return Facts(
        mesh=sizes,
        batch_axes=tuple(name for name in sizes if name.startswith("data")),
        reduce=None if cell.reduce is None else _REDUCE.validate_python({"type": cell.reduce}),
        zero=ZeroConfig(stage=cell.stage, scope=cell.scope),
    )


def valid_cells(remats: Sequence[Remat] = REMATS) -> list[Cell]:
    """Every combination that the table of validity allows, in a fixed order.

    Args:
      remats: what the model can recompute; a model without remat has "none" alone.
    """
    cells = (
        Cell(*choice)
        for choice in itertools.product(MESHES, get_args(Stage), SCOPES, REDUCTIONS, (1, 2), remats)
    )
    # The scope of no stage would be the same program again.
    return [c for c in cells if (c.stage or c.scope == "all") and not violations(facts_of(c))]


def pairs(cell: Cell) -> frozenset[tuple[Any, Any]]:
    """Every two settings of a combination."""
    return frozenset(itertools.combinations(asdict(cell).items(), 2))


def cover(cells: Sequence[Cell], given: Iterable[Cell] = ()) -> list[Cell]:
    """Few of the cells that together have every two settings that any of them has.

    Greedy: the cell with the most pairs that are still missing, of equals the first, so that equal
    arguments give equal results.

    Args:
      given: cells whose pairs need not be covered again.

    >>> cells = [Cell("data 8", 0, "all", None, m, r) for m in (1, 2) for r in REMATS]
    >>> len(cells), len(cover(cells)), cover(cells[:1], cells)
    (6, 6, [])
    """
    having = {cell: pairs(cell) for cell in cells}
    missing = set().union(*having.values()) - set().union(*map(pairs, given))
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(having[cell] & missing))
        chosen.append(best)
        missing -= having[best]
    return chosen
