"""The rows of the table of validity about sequences that are split over several devices."""

from __future__ import annotations

from jaxdist.validity.row import ValidityRow

_ORDERS = ("sharding.context_order: zigzag or striped",)

CONTEXT: tuple[ValidityRow, ...] = (
    ValidityRow(
        (("mesh.context",), ("a model without attention",)),
        "its devices would share sequences, which this model does not have, or splits by itself",
        "remove mesh.context",
        ("mesh", "context"),
    ),
    ValidityRow(
        (("mesh.context",), ("sharding.collective_matmul",)),
        "pieces of the sequence go round one axis, and two axes split it",
        "set sharding.collective_matmul: false, or remove mesh.context",
        ("sharding", "collective_matmul"),
    ),
    ValidityRow(
        (
            ("mesh.context",),
            (
                "sharding.context: gather or gather_ulysses",
                "sharding.context: ring or ring_ulysses",
            ),
            ("a kernel for whole sequences",),
        ),
        "each device would attend piece by piece, in blocks",
        "set model.attention: auto, or sharding.context: ulysses",
        ("sharding", "context"),
    ),
    ValidityRow(
        (
            ("mesh.context",),
            ("sharding.context: ring or ring_ulysses",),
            ("model.attention: splash",),
        ),
        "keys that rotate are computed in blocks, without the kernel",
        "set sharding.context: auto",
        ("sharding", "context"),
    ),
    ValidityRow(
        (
            ("mesh.context",),
            ("stage (a pipeline)",),
            ("sharding.context: ring or ring_ulysses",),
        ),
        "keys that rotate among the devices of a stage would wait for those of other stages",
        "set sharding.context: auto",
        ("sharding", "context"),
    ),
    ValidityRow(
        (("mesh.context",), _ORDERS, ("sharding.context: ulysses",)),
        "each device has whole sequences of some heads, so that all have equal work already",
        "set sharding.context_order: auto",
        ("sharding", "context_order"),
    ),
    ValidityRow(
        (("mesh.context",), _ORDERS, ("model.attention_window",)),
        "a window gives devices with consecutive positions equal work, and few keys of others",
        "set sharding.context_order: auto",
        ("sharding", "context_order"),
    ),
    ValidityRow(
        (
            ("mesh.context",),
            _ORDERS,
            ("a loss other than next_token", "a model whose attention is not causal"),
        ),
        "the order balances the work of causal attention, and only next_token moves its targets "
        "together with the tokens",
        "set sharding.context_order: auto",
        ("sharding", "context_order"),
    ),
)
