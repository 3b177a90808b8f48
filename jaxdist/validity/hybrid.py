"""The rows of the table of validity about synchronous training with tables on servers."""

from __future__ import annotations

from jaxdist.validity.row import FROZEN, ValidityRow

HYBRID = ("strategy: hybrid",)
_NORM = (
    "it needs the norm of all gradients, but the gradients of embedding tables go to servers row "
    "by row"
)


def _refused(feature: str, why: str, instead: str, path: str = "") -> ValidityRow:
    return ValidityRow(((feature,), HYBRID), why, instead, tuple((path or feature).split(".")))


HYBRIDS: tuple[ValidityRow, ...] = (
    _refused(
        "train.microbatches",
        "a step pulls and pushes the table rows of a whole batch at once",
        "set train.microbatches: 1",
    ),
    _refused(
        "stage (a pipeline)",
        "rows of the tables are pulled to all devices, but in a pipeline each device has only "
        "some layers",
        "remove mesh.stage",
        "mesh",
    ),
    _refused(
        "a mesh axis besides data and tensor",
        "rows of the tables are split over the data axis, and no other axis may split them",
        "remove the axis",
        "mesh",
    ),
    _refused(
        "deterministic: strict",
        "servers add up the gradients of rows in an order that is not the order of logical shards",
        "set parallel.deterministic: null",
        "parallel.deterministic",
    ),
    *(
        _refused(
            path,
            "rows of the tables are pulled for batches of a fixed size",
            "leave the setting out",
        )
        for path in ("train.batch_ramp", "train.phases")
    ),
    _refused(
        "elastic.batch: rescale",
        "rows of the tables are pulled for batches of a fixed size",
        "set elastic.batch: same",
        "elastic.batch",
    ),
    _refused(
        "train.check_replicas",
        "a run whose replicas differ returns to a checkpoint, but its servers cannot return with "
        "it",
        "leave the setting out",
    ),
    _refused(
        "checkpoint.local",
        "snapshots hold the state of this machine's devices, but not the tables on servers",
        "leave the setting out, and set a smaller checkpoint.every",
    ),
    *(
        _refused(
            path,
            "servers train all rows of the tables that a batch uses, so no parameter can be frozen",
            "leave the setting out, which trains all parameters",
        )
        for path in FROZEN
    ),
    _refused("optim.clip_norm", _NORM, "set null"),
    _refused("optim.skip_spikes", _NORM, "set null"),
    _refused("optim.max_grad_norm", _NORM, "set optim.max_grad_norm: off"),
    _refused(
        "optim.loss_scale",
        "servers would receive gradients that are multiplied by the loss scale",
        "set optim.loss_scale: null, and train in bfloat16 or float32",
    ),
    _refused(
        "an optimizer that evaluates other parameters",
        "an evaluation would combine the current tables with averages of the other parameters",
        "use an optimizer that evaluates the parameters that it trains, such as adamw",
        "optim",
    ),
)
"""The refused combinations with tables on servers."""
