"""The combinations of plan settings to compare, and a choice that covers all pairs of settings.

Each of the combinations must give the same results as a single device.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.config.describe import tags
from jaxdist.mesh import DCN, ICI, MeshConfig, Split
from jaxdist.models.remat import ByKind
from jaxdist.parallel.pipeline.executor.ticks import Activations
from jaxdist.parallel.plan import ParallelConfig
from jaxdist.parallel.zero import STAGES, Stage
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.schedule import loop
from jaxdist.types import Json, JsonObject
from jaxdist.validity.features import Facts
from jaxdist.validity.table import violations

DEVICES = 8
"""The number of fake devices of every mesh."""
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
"""The meshes to compare, by their names in the printed tables."""
REDUCTIONS: tuple[str | None, ...] = (
    None,
    *tags(ReduceConfig),
)
"""The types of reductions: every algorithm of jaxdist, and None, with which XLA sums gradients."""
SCHEDULES: Mapping[str, type[Any]] = {
    name: schedule for name, schedule in tags(PipelineScheduleConfig).items() if name != "csv"
}
"""The config class of every generated pipeline schedule, by the schedule's type."""
Scope = Literal["all", "ici"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
REMATS: Mapping[str, ByKind | tuple[ByKind, ...]] = {
    **{policy: policy for policy in get_args(ByKind)},
    "some": ("full", "none"),
}
"""The values of a model's `remat`, by their names in the printed tables. "some" means `full` in
every other layer."""
Residual = Literal["whole", "split"]
SEQUENCES: tuple[Residual, ...] = get_args(Residual)
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
CHUNKS = 2
"""The number of chunks on each stage, for pipeline schedules with a setting `chunks`."""
_PIPELINES: list[tuple[str | None, Activations | None]] = [
    *itertools.product(SCHEDULES, ACTIVATIONS)
]
_NO_PIPELINE: list[tuple[str | None, Activations | None]] = [(None, None)]


def cuts_of(*, tensor: bool, sequence: bool, microbatches: bool) -> tuple[str, ...]:
    """Return the names of the sums whose terms a plan adds in another order than a single device.

    The result always contains the name of the sums over devices.

    Args:
      tensor: whether an axis splits the dims of layers.
      sequence: whether an axis splits the sequence between the layers.
      microbatches: whether the batch is computed in several microbatches.
    """
    found = {"in matmuls": tensor, "over the sequence": sequence, "over microbatches": microbatches}
    return "over devices", *(name for name, cut in found.items() if cut)


def plan_cuts(sections: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the names of the sums that a config adds in another order than a single device."""
    return cuts_of(
        tensor=sections["mesh"].get("tensor", 1) > 1,
        sequence="residual_seq" in sections["sharding"]["rules"],
        microbatches=sections["train"]["microbatches"] > 1,
    )


@dataclass(frozen=True)
class Combination:
    """A combination of the settings of a plan.

    Attributes:
      mesh: a key of `MESHES`.
      stage, scope: the ZeRO stage and its scope.
      reduce: one of `REDUCTIONS`; with None, XLA sums gradients.
      microbatches: the number of microbatches of a batch.
      remat: a key of `REMATS`.
      sequence: "split" if axis tensor splits the sequence between layers, otherwise "whole".
      schedule: a key of `SCHEDULES`, or None if the mesh has no axis stage.
      activations: "recompute" if a pipeline's backward pass computes activations again, "stash" if
        it reads stored activations, or None if the mesh has no axis stage.
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
        """The names of the sums whose terms the plan adds in another order than a single device."""
        return cuts_of(
            tensor="tensor" in self.mesh,
            sequence=self.sequence == "split",
            microbatches=self.microbatches > 1,
        )

    @property
    def parallel(self) -> JsonObject:
        """The section `parallel` of a config, in which ZeRO also splits small tensors."""
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
        """The sharding rules that the combination adds to the rules of the config."""
        return {"residual_seq": "tensor"} if self.sequence == "split" else {}


@cache
def placement_kind(schedule: str) -> str:
    """Return a name for the placement of a schedule's chunks on stages.

    The other settings of a plan depend only on this property of a schedule.

    >>> placement_kind("1f1b"), placement_kind("interleaved"), placement_kind("zb_v")
    ('one chunk a stage', 'chunks in a loop', 'chunks in a V')
    """
    chosen = SCHEDULES[schedule]
    fields = {"chunks": CHUNKS} if "chunks" in chosen.model_fields else {}
    placement = chosen(**fields).build(2, 4).placement
    if len(placement) == 2:
        return "one chunk a stage"
    return "chunks in a loop" if placement == loop(2, len(placement)) else "chunks in a V"


@cache
def combination_facts(cell: Combination) -> Facts:
    """Return the facts about a combination from which the validity table judges it."""
    return facts(MESHES[cell.mesh], cell.parallel)


def facts(mesh: Mapping[str, Json], parallel: Mapping[str, Json]) -> Facts:
    """Return the facts about a config from which the validity table judges it.

    Args:
      mesh: the section `mesh`.
      parallel: the section `parallel`.
    """
    config = ParallelConfig.model_validate(parallel)
    sizes: dict[str, int] = {}
    for axis, size in MeshConfig.model_validate(mesh).sizes().items():
        if isinstance(size, Split):
            sizes |= {axis + DCN: size.dcn, axis + ICI: size.ici}
        else:
            sizes[axis] = size
    return Facts(
        mesh=sizes,
        batch_axes=tuple(name for name in sizes if name.startswith("data")),
        reduce=config.reduce,
        zero=config.zero,
        compression=config.compression,
    )


def possible_cells(remats: Sequence[str] = tuple(REMATS)) -> Iterator[Combination]:
    """Yield every combination that the validity table allows, in a fixed order.

    A pipeline has twice as many microbatches as stages, which is enough for every schedule.

    Args:
      remats: the keys of `REMATS` that the model supports, as `remats_of` returns them.
    """
    plans = itertools.product(MESHES, STAGES, SCOPES, REDUCTIONS)
    for mesh, stage, scope, reduce in plans:
        # Without ZeRO the scope has no effect. Another scope would give the same program, and is
        # left out.
        if scope != "all" and not stage:
            continue
        if violations(combination_facts(Combination(mesh, stage, scope, reduce, 1, "none"))):
            continue
        stages = MESHES[mesh].get("stage", 1)
        counts = (2 * stages,) if stages > 1 else (1, 2)
        # XLA refuses a split sequence in a pipeline, because the branches of the pipeline have
        # different layouts.
        split = "tensor" in MESHES[mesh] and stages == 1
        sequences = SEQUENCES if split else SEQUENCES[:1]
        pipelines = _PIPELINES if stages > 1 else _NO_PIPELINE
        others = itertools.product(counts, remats, sequences, pipelines)
        for count, remat, sequence, (schedule, activations) in others:
            yield Combination(
                mesh, stage, scope, reduce, count, remat, sequence, schedule, activations
            )


def valid_cells(remats: Sequence[str] = tuple(REMATS)) -> list[Combination]:
    """Return the combinations of a full run, in a fixed order.

    Without a pipeline, the combinations are all of `possible_cells` with a whole sequence. With a
    pipeline, the same holds for the combinations without `reduce` and remat whose ZeRO stage is at
    most 2. Enough other combinations are added to cover every pair of settings.

    Args:
      remats: the keys of `REMATS` that the model supports.
    """
    cells = list(possible_cells(remats))
    full = {cell for cell in cells if _crossed(cell)}
    full.update(cover(cells, given=full))
    return [cell for cell in cells if cell in full]


def _crossed(cell: Combination) -> bool:
    plain = cell.reduce is None and cell.remat == "none"
    # In a pipeline, ZeRO 3 differs from ZeRO 2 only by a gather of the parameters before each step,
    # so ZeRO 3 is combined with only some of the other settings.
    return cell.sequence == "whole" and (cell.schedule is None or (plain and cell.stage < 3))


SettingPairs = frozenset[tuple[Any, ...]]


def pairs(cell: Combination) -> SettingPairs:
    """Return every pair of settings of a combination.

    A pair in a combination with a pipeline is distinct from the same pair without a pipeline. A
    reduction is paired with the schedule's `placement_kind` instead of the schedule, since the
    reduction depends only on the placement of chunks.
    """
    found = set(itertools.combinations(vars(cell).items(), 2))
    if cell.schedule is None:
        return frozenset(found)
    reduce = ("reduce", cell.reduce)
    found.remove((reduce, ("schedule", cell.schedule)))
    found.add((reduce, ("kind", placement_kind(cell.schedule))))
    return frozenset((*two, "pipeline") for two in found)


def cover(
    cells: Sequence[Combination],
    given: Iterable[Combination] = (),
    settings: Callable[[Combination], SettingPairs] = pairs,
) -> list[Combination]:
    """Return few combinations that together cover every pair of settings in `cells`.

    The choice is greedy: the next combination is always the first combination in `cells` with the
    largest number of missing pairs. Equal arguments therefore give equal results.

    Args:
      cells: the combinations to choose from.
      given: the combinations that are already chosen, whose pairs need not be covered again.
      settings: a function from a combination to the items to cover.

    >>> cells = [Combination("data 8", 0, "all", None, m, r) for m in (1, 2) for r in REMATS]
    >>> len(cells), len(cover(cells)), cover(cells[:1], cells)
    (10, 10, [])
    """
    having = [settings(cell) for cell in cells]
    missing = set().union(*having) - set().union(*map(settings, given))
    # The number of missing pairs that a cell covers never increases, so an earlier number is an
    # upper bound. Only the cell at the top of the heap needs to be counted again.
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
