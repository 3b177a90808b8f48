"""The rows of the table of validity about sequences that are split over several devices."""

from __future__ import annotations

from jaxdist.validity.row import ValidityRow

_ORDERS = ("sharding.context_order: zigzag or striped",)

CONTEXT: tuple[ValidityRow, ...] = (
    ValidityRow(
        (("mesh.context",), ("a model without attention",)),
        "mesh.context splits the sequences of attention over devices, but this model has no "
        "attention that jaxdist can split",
        "remove mesh.context",
        ("mesh", "context"),
    ),
    ValidityRow(
        (("mesh.context",), ("sharding.collective_matmul",)),
        "a collective matmul sends shards of the sequence round a single mesh axis, but here both "
        "the tensor and the context axis split the sequence",
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
        "on this axis a device attends to shards of the sequence in turn, but this attention "
        "kernel needs whole sequences",
        "set model.attention: auto, or sharding.context: ulysses",
        ("sharding", "context"),
    ),
    ValidityRow(
        (
            ("mesh.context",),
            ("sharding.context: ring or ring_ulysses",),
            ("model.attention: splash",),
        ),
        "a ring computes attention in blocks of the keys that rotate, without this kernel",
        "set sharding.context: auto",
        ("sharding", "context"),
    ),
    ValidityRow(
        (
            ("mesh.context",),
            ("stage (a pipeline)",),
            ("sharding.context: ring or ring_ulysses",),
        ),
        "keys that rotate among the devices of one stage would wait for the devices of "
        "other stages",
        "set sharding.context: auto",
        ("sharding", "context"),
    ),
    ValidityRow(
        (("mesh.context",), _ORDERS, ("sharding.context: ulysses",)),
        "with ulysses each device has whole sequences of some heads, so all devices have equal "
        "work in any order",
        "set sharding.context_order: auto",
        ("sharding", "context_order"),
    ),
    ValidityRow(
        (("mesh.context",), _ORDERS, ("model.attention_window",)),
        "with a window, devices have equal work if each has consecutive positions, and need few "
        "keys of other devices",
        "set sharding.context_order: auto",
        ("sharding", "context_order"),
    ),
    ValidityRow(
        (
            ("mesh.context",),
            _ORDERS,
            ("a loss other than next_token", "a model whose attention is not causal"),
        ),
        "the order balances the work of causal attention, and only the loss next_token reorders "
        "its targets with the tokens",
        "set sharding.context_order: auto",
        ("sharding", "context_order"),
    ),
)
