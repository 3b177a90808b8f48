"""The neighbours of a plan: random plans that differ from the plan in `CHANGED` settings.

A proof also compares some of the neighbours with a single device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

from jaxdist.parity.cells import MESHES, REMATS, possible_cells
from jaxdist.parity.run import remats_of, with_combination
from jaxdist.types import Json, JsonObject

CHANGED = 3
"""The number of settings in which a neighbour differs."""


def neighbours(sections: JsonObject, seed: int) -> Iterator[tuple[str, JsonObject]]:
    """Yield the neighbours of a plan, in an order that depends on the seed.

    Each item is a pair of a text with the changed settings and the sections of the neighbour's
    config. Neighbours are plans for 8 devices with the same model, optimizer and batch. Some
    neighbours cannot be built, for example because the model has no pipeline.

    Args:
      sections: the sections of the plan's reduced config.
      seed: the seed of the order.
    """
    own = combination_settings(sections)
    cells = list(possible_cells(remats_of(sections)))
    Random(seed).shuffle(cells)
    for cell in cells:
        changed = [f"{name} {value}" for name, value in vars(cell).items() if value != own[name]]
        if len(changed) == CHANGED:
            yield ", ".join(changed), with_combination(sections, cell)


def combination_settings(sections: Mapping[str, Json]) -> dict[str, Json]:
    """Return the settings of a config under the names of the fields of a `Combination`.

    A mesh that is none of `MESHES` is returned as text.
    """
    parallel, mesh, train = sections["parallel"], dict(sections["mesh"]), sections["train"]
    mesh.pop("fake_devices", None)
    zero, pipeline = parallel["zero"], parallel.get("pipeline") or {}
    remat = sections["model"].get("remat")
    kind = next((name for name, kind in REMATS.items() if kind == remat), "none")
    return {
        "mesh": next((name for name, sizes in MESHES.items() if sizes == mesh), str(mesh)),
        "stage": zero["stage"],
        "scope": zero["scope"] if zero["stage"] else "all",
        "reduce": parallel["reduce"] and parallel["reduce"]["type"],
        "microbatches": train["microbatches"],
        "remat": "some" if isinstance(remat, list) else kind,
        "sequence": "split" if "residual_seq" in sections["sharding"]["rules"] else "whole",
        "schedule": pipeline.get("schedule", {}).get("type") if mesh.get("stage") else None,
        "activations": pipeline.get("activations") if mesh.get("stage") else None,
    }
