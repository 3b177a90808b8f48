"""The exact combinations that a plan can be made of, and a few that have every two settings."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.compression.config import Compression, CompressionConfig
from jaxdist.mesh import DCN, ICI, MeshConfig, Split
from jaxdist.models.remat import ByKind
from jaxdist.parallel.pipeline.executor.ticks import Activations
from jaxdist.parallel.zero import STAGES, Stage, ZeroConfig
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.csv_form import Csv
from jaxdist.pipeline_schedules.schedule import loop
from jaxdist.types import Json, JsonObject
from jaxdist.validity.features import Facts
from jaxdist.validity.table import violations

DEVICES = 8
MESHES: Mapping[str, Mapping[str, Json]] = {
    "data 8": {"data": 8},
    "data 4, tensor 2": {"data": 4, "tensor": 2},
    "data 2, tensor 4": {"data": 2, "tensor": 4},
    "data 2 dcn x 4 ici": {"data": {"dcn": 2, "ici": 4}},
    "data 4, stage 2": {"data": 4, "stage": 2},
    "data 2, stage 4": {"data": 2, "stage": 4},
    "data 2, stage 2, tensor 2": {"data": 2, "stage": 2, "tensor": 2},
    "stage 4, tensor 2": {"stage": 4, "tensor": 2},
}
"""By the name that the tables show."""
REDUCTIONS: tuple[str | None, ...] = (
    None,
    *(algorithm.model_fields["type"].default for algorithm in get_args(get_args(ReduceConfig)[0])),
)
"""None leaves the axis to XLA; every algorithm of ours, by type."""
SCHEDULES: Mapping[str, type[Any]] = {
    schedule.model_fields["type"].default: schedule
    for schedule in get_args(get_args(PipelineScheduleConfig)[0])
    if schedule is not Csv
}
"""Every schedule of a pipeline that is generated, by type."""
Scope = Literal["all", "ici"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
REMATS: Mapping[str, ByKind | tuple[ByKind, ...]] = {
    **{policy: policy for policy in get_args(ByKind)},
    "some": ("full", "none"),
}
"""What a model's `remat` is, by the name that the tables show; some is every other layer."""
Residual = Literal["whole", "split"]
SEQUENCES: tuple[Residual, ...] = get_args(Residual)
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
CHUNKS = 2
"""On each stage, where a schedule leaves the choice; the others have 1 or 2."""
_REDUCE: TypeAdapter[Any] = TypeAdapter(ReduceConfig)
_COMPRESSION = TypeAdapter[Compression](CompressionConfig)
_PIPELINES: list[tuple[str | None, Activations | None]] = [
    *itertools.product(SCHEDULES, ACTIVATIONS)
]
_NO_PIPELINE: list[tuple[str | None, Activations | None]] = [(None, None)]


def cuts_of(*, tensor: bool, sequence: bool, microbatches: bool) -> tuple[str, ...]:
    """Which sums are added up in another order than on one device.

    Args:
      tensor: whether an axis splits the dims of layers.
      sequence: whether it splits the sequence between them.
    """
    found = {"in matmuls": tensor, "over the sequence": sequence, "over microbatches": microbatches}
    return "over devices", *(name for name, cut in found.items() if cut)


@dataclass(frozen=True)
class Combination:
    """One combination.

    Attributes:
      mesh: a key of `MESHES`.
      stage, scope: of ZeRO.
      reduce: one of `REDUCTIONS`.
      microbatches: pieces that the batch is computed in.
      remat: a key of `REMATS`.
      sequence: "split" over the tensor axis between layers, or "whole".
      schedule: a key of `SCHEDULES`; None where the mesh has no stages.
      activations: what a pipeline's backward pass starts from; None as for `schedule`.
    """

    mesh: str
    stage: Stage
    scope: Scope
    reduce: str | None
    microbatches: int
    remat: str
    sequence: Residual = "whole"
    schedule: str | None = None
    activations: Activations | None = None

    @property
    def cuts(self) -> tuple[str, ...]:
        """Those of `cuts_of`."""
        return cuts_of(
            tensor="tensor" in self.mesh,
            sequence=self.sequence == "split",
            microbatches=self.microbatches > 1,
        )

    @property
    def parallel(self) -> JsonObject:
        """The section of a config; small tensors are split too."""
        section: JsonObject = {
            "reduce": None if self.reduce is None else {"type": self.reduce},
            "zero": {"stage": self.stage, "scope": self.scope, "whole_below": 64},
        }
        if self.schedule is not None:
            chosen = "chunks" in SCHEDULES[self.schedule].model_fields
            schedule = {"type": self.schedule, **({"chunks": CHUNKS} if chosen else {})}
            section["pipeline"] = {"schedule": schedule, "activations": self.activations}
        return section

    @property
    def rules(self) -> dict[str, str]:
        """Sharding rules, beside those of the config."""
        return {"residual_seq": "tensor"} if self.sequence == "split" else {}


@cache
def kind_of(schedule: str) -> str:
    """Where the chunks of a schedule lie, which is what the other parts of a plan see of it.

    >>> kind_of("1f1b"), kind_of("interleaved"), kind_of("zb_v")
    ('one chunk a stage', 'chunks in a loop', 'chunks in a V')
    """
    chosen = SCHEDULES[schedule]
    fields = {"chunks": CHUNKS} if "chunks" in chosen.model_fields else {}
    placement = chosen(**fields).build(2, 4).placement
    if len(placement) == 2:
        return "one chunk a stage"
    return "chunks in a loop" if placement == loop(2, len(placement)) else "chunks in a V"


@cache
def facts_of(cell: Combination) -> Facts:
    """What the table of validity asks of a combination."""
    reduce = None if cell.reduce is None else {"type": cell.reduce}
    return facts(MESHES[cell.mesh], reduce, ZeroConfig(stage=cell.stage, scope=cell.scope))


def facts(
    mesh: Mapping[str, Json],
    reduce: JsonObject | None,
    zero: ZeroConfig,
    compression: JsonObject | None = None,
) -> Facts:
    """What the table of validity asks of sections of a config."""
    sizes: dict[str, int] = {}
    for axis, size in MeshConfig.model_validate(mesh).sizes().items():
        if isinstance(size, Split):
            sizes |= {axis + DCN: size.dcn, axis + ICI: size.ici}
        else:
            sizes[axis] = size
    return Facts(
        mesh=sizes,
        batch_axes=tuple(name for name in sizes if name.startswith("data")),
        reduce=None if reduce is None else _REDUCE.validate_python(reduce),
        zero=zero,
        compression=None if compression is None else _COMPRESSION.validate_python(compression),
    )


def possible_cells(remats: Sequence[str] = tuple(REMATS)) -> Iterator[Combination]:
    """Every combination that the table of validity allows, in a fixed order.

    A pipeline has twice as many microbatches as stages, which is enough for every schedule.

    Args:
      remats: what the model can recompute; a model without remat has "none" alone.
    """
    plans = itertools.product(MESHES, STAGES, SCOPES, REDUCTIONS)
    for mesh, stage, scope, reduce in plans:
        # The scope of no stage would be the same program again.
        if scope != "all" and not stage:
            continue
        if violations(facts_of(Combination(mesh, stage, scope, reduce, 1, "none"))):
            continue
        stages = MESHES[mesh].get("stage", 1)
        counts = (2 * stages,) if stages > 1 else (1, 2)
        # XLA refuses a pipeline with a split sequence (branches that lie differently).
        split = "tensor" in MESHES[mesh] and stages == 1
        sequences = SEQUENCES if split else SEQUENCES[:1]
        pipelines = _PIPELINES if stages > 1 else _NO_PIPELINE
        others = itertools.product(counts, remats, sequences, pipelines)
        for count, remat, sequence, (schedule, activations) in others:
            yield Combination(
                mesh, stage, scope, reduce, count, remat, sequence, schedule, activations
            )


def valid_cells(remats: Sequence[str] = tuple(REMATS)) -> list[Combination]:
    """The combinations of a full run, in a fixed order.

    All of `possible_cells` without stages and with a whole sequence; all schedules, meshes,
    activations and ZeRO stages of pipelines; and of the rest enough to have every two settings.
    """
    cells = list(possible_cells(remats))
    full = {cell for cell in cells if _crossed(cell)}
    full.update(cover(cells, given=full))
    return [cell for cell in cells if cell in full]


def _crossed(cell: Combination) -> bool:
    plain = cell.reduce is None and cell.remat == "none"
    return cell.sequence == "whole" and (cell.schedule is None or plain)


SettingPairs = frozenset[tuple[Any, ...]]


def pairs(cell: Combination) -> SettingPairs:
    """Every two settings of a combination, of pipelines apart from the others.

    A reduction meets a schedule by its kind: it sees where the chunks lie, and no more.
    """
    found = set(itertools.combinations(vars(cell).items(), 2))
    if cell.schedule is None:
        return frozenset(found)
    reduce = ("reduce", cell.reduce)
    found.remove((reduce, ("schedule", cell.schedule)))
    found.add((reduce, ("kind", kind_of(cell.schedule))))
    return frozenset((*two, "pipeline") for two in found)


def cover(
    cells: Sequence[Combination],
    given: Iterable[Combination] = (),
    settings: Callable[[Combination], SettingPairs] = pairs,
) -> list[Combination]:
    """Few of the cells that together have every two settings that any of them has.

    Greedy: the cell with the most pairs that are still missing, of equals the first, so that equal
    arguments give equal results.

    Args:
      given: cells whose pairs need not be covered again.
      settings: what of a cell is to be covered, `pairs` or something else.

    >>> cells = [Combination("data 8", 0, "all", None, m, r) for m in (1, 2) for r in REMATS]
    >>> len(cells), len(cover(cells)), cover(cells[:1], cells)
    (10, 10, [])
    """
    having = [settings(cell) for cell in cells]
    missing = set().union(*having) - set().union(*map(settings, given))
    # What a cell adds only becomes less, so that an old figure is a bound of the present one.
    bounds = [(-len(own), index) for index, own in enumerate(having)]
    heapq.heapify(bounds)
    chosen: list[Combination] = []
    while missing:
        bound, index = bounds[0]
        adds = len(having[index] & missing)
        if adds < -bound:
            heapq.heapreplace(bounds, (-adds, index))
        else:
            chosen.append(cells[index])
            missing -= having[index]
    return chosen
