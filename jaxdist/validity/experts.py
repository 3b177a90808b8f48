"""The rows of the table of validity about mixtures of experts."""

from __future__ import annotations

from jaxdist.validity.row import ValidityRow

_SETTING = ("model", "experts")
_EXPERTS = ("model.experts",)

EXPERTS: tuple[ValidityRow, ...] = (
    ValidityRow(
        (_EXPERTS, ("strategy: parameter_server",)),
        "the load of experts is summed over the devices of a single mesh, but each worker has a "
        "mesh of its own",
        "set strategy.type: synchronous",
        _SETTING,
    ),
    ValidityRow(
        (("mesh axis expert",), ("deterministic: strict",)),
        "an expert multiplies the tokens of several logical shards in one product, whose rounding "
        "depends on the number of devices",
        "remove mesh.expert, or set parallel.deterministic: null",
        ("parallel", "deterministic"),
    ),
    ValidityRow(
        (("sharding.rules.embed: context or expert",), ("stage (a pipeline)",)),
        "this axis already splits the activations that pass from stage to stage",
        "remove that rule, or leave out mesh.stage",
        ("sharding", "rules"),
    ),
)
"""The refused combinations with experts, and with the mesh axes that share parameters."""
