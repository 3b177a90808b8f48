"""Neighbours of a plan: random plans that differ from the plan in `CHANGED` settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

from jaxdist.parity.cells import MESHES, REMATS, Combination, possible_cells
from jaxdist.parity.run import remats_of
from jaxdist.types import Json, JsonObject

CHANGED = 3
"""The number of settings in which a neighbour differs."""


def neighbours(sections: JsonObject, seed: int) -> Iterator[tuple[str, JsonObject]]:
    """Yield neighbours of a config's reduced size, as pairs of changed settings and sections.

    Neighbours are plans for 8 devices with the same model, optimizer and batch. Some neighbours may
    be refused, for example because the model has no pipeline.
    """
    own = settings_of(sections)
    cells = list(possible_cells(remats_of(sections)))
    Random(seed).shuffle(cells)
    for cell in cells:
        changed = [f"{name} {value}" for name, value in vars(cell).items() if value != own[name]]
        if len(changed) == CHANGED:
            yield ", ".join(changed), with_combination(sections, cell)


def settings_of(sections: Mapping[str, Json]) -> dict[str, Json]:
    """Return the settings of a config in the form of a `Combination`, as far as possible."""
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


def with_combination(sections: JsonObject, cell: Combination) -> JsonObject:
    """Return sections of a config in which the plan's settings are those of a combination."""
    model, rules = dict(sections["model"]), dict(sections["sharding"]["rules"])
    if "remat" in model:
        remat = REMATS[cell.remat]
        model["remat"] = [*remat][: model["layers"]] if isinstance(remat, tuple) else remat
    rules.pop("residual_seq", None)
    return {
        **sections,
        "model": model,
        "mesh": {**MESHES[cell.mesh], "fake_devices": 8},
        "sharding": {**sections["sharding"], "rules": {**rules, **cell.rules}},
        "train": {**sections["train"], "microbatches": cell.microbatches},
        "parallel": cell.parallel,
    }
