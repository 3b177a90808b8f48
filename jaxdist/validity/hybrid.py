"""The rows of the table of validity about synchronous training with tables on servers."""

from __future__ import annotations

from jaxdist.validity.row import FROZEN, ValidityRow

HYBRID = ("strategy: hybrid",)
_NORM = "it needs the norm over all parameters, and the gradients of tables go to servers by row"


def _refused(feature: str, why: str, instead: str, path: str = "") -> ValidityRow:
    return ValidityRow(((feature,), HYBRID), why, instead, tuple((path or feature).split(".")))


HYBRIDS: tuple[ValidityRow, ...] = (
    _refused(
        "train.microbatches",
        "the rows of a whole batch are pulled and pushed at once",
        "set train.microbatches: 1",
    ),
    _refused(
        "stage (a pipeline)",
        "rows are pulled for a model whose layers all devices have",
        "remove mesh.stage",
        "mesh",
    ),
    _refused(
        "a mesh axis besides data and tensor",
        "rows are divided over the axis of the batch",
        "remove the axis",
        "mesh",
    ),
    _refused(
        "deterministic: strict",
        "gradients of rows are added up by servers, and not by logical shard",
        "set parallel.deterministic: null",
        "parallel.deterministic",
    ),
    *(
        _refused(path, "rows are pulled for batches of one size", "leave it out")
        for path in ("train.batch_ramp", "train.phases")
    ),
    _refused(
        "elastic.batch: rescale",
        "rows are pulled for batches of one size",
        "set elastic.batch: same",
        "elastic.batch",
    ),
    _refused(
        "train.check_replicas",
        "a run that goes back to a checkpoint would have to take its servers back too",
        "leave it out",
    ),
    *(_refused(path, "servers train the tables", "train all parameters") for path in FROZEN),
    _refused("optim.clip_norm", _NORM, "set null"),
    _refused("optim.skip_spikes", _NORM, "set null"),
    _refused("optim.max_grad_norm", _NORM, "set max_grad_norm: off"),
    _refused(
        "optim.loss_scale",
        "servers would take scaled gradients of rows",
        "set null, and train in bfloat16 or float32",
    ),
    _refused(
        "an optimizer that evaluates other parameters",
        "tables are evaluated unchanged, and the other parameters would be an average",
        "use another optimizer",
        "optim",
    ),
)
"""The refused combinations with tables on servers."""
