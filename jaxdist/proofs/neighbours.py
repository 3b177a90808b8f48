"""The neighbours of a plan: random plans that differ from the plan in three settings (`CHANGED`).

A proof also compares some of the neighbours with a single device.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from jaxdist.config import value_at
from jaxdist.parity.cells import possible_cells
from jaxdist.parity.run import remats_of, with_combination
from jaxdist.types import JsonObject

CHANGED = 3
"""The number of settings in which a neighbour differs."""
_PATHS = (
    "mesh parallel.zero.stage parallel.zero.scope parallel.reduce.type train.microbatches "
    "model.remat sharding.rules.residual_seq parallel.pipeline.schedule.type "
    "parallel.pipeline.activations"
)
PATHS = [path.split(".") for path in _PATHS.split()]
"""The paths of the settings that a `Combination` determines, in the order of its fields."""


def neighbours(sections: JsonObject, seed: int) -> Iterator[tuple[str, JsonObject]]:
    """Yield the neighbours of a plan, in an order that depends on the seed.

    Each item is a pair of a text with the changed settings and the sections of the neighbour's
    config. Neighbours are plans for 8 devices with the same model, optimizer and batch. Some
    neighbours cannot be built, for example because the model has no pipeline.

    Args:
      sections: the sections of the plan's reduced config.
      seed: the seed of the order.
    """
    cells = list(possible_cells(remats_of(sections)))
    Random(seed).shuffle(cells)
    for cell in cells:
        other = with_combination(sections, cell)
        changed = [
            f"{name} {value}"
            for (name, value), path in zip(vars(cell).items(), PATHS, strict=True)
            if value_at(sections, path) != value_at(other, path)
        ]
        if len(changed) == CHANGED:
            yield ", ".join(changed), other
