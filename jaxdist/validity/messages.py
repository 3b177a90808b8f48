"""The rows of the table of validity about compressed gradients and batches of changing size."""

from __future__ import annotations

from jaxdist.validity.row import ValidityRow

_FEEDBACK = ("parallel", "compression", "error_feedback")
_BY_LAYER = (("zero 2", "zero 3"), ("compression over data, error_feedback: false",))

MESSAGES: tuple[ValidityRow, ...] = (
    ValidityRow(
        (("error_feedback: momentum",), ("an optimizer with momentum",)),
        "both the optimizer and the error feedback would apply momentum to the gradient",
        "set optim: {type: sgd, momentum: 0} (or b1: 0), or "
        "parallel.compression.error_feedback: true",
        _FEEDBACK,
    ),
    ValidityRow(
        (("error_feedback: compressed_momentum",), ("an optimizer that is not linear",)),
        "the part of the momentum that a message omits is added to a later message, which is "
        "right only if the optimizer's update is linear in its input",
        "set optim.type: onebit_adam, onebit_lamb or sgd, or "
        "parallel.compression.error_feedback: true",
        _FEEDBACK,
    ),
    ValidityRow(
        (("error_feedback: compressed_momentum",), ("another decay in optim",)),
        "both settings are the decay of the same momentum",
        "give both settings the same value",
        _FEEDBACK,
    ),
    ValidityRow(
        (("another error_feedback",), ("optim: onebit",)),
        "this optimizer compresses the momentum, not the gradient",
        "set error_feedback: {type: compressed_momentum}, with the b1 of optim",
        _FEEDBACK,
    ),
    ValidityRow(
        (("parallel.compression",), ("another optim.freeze_step",)),
        "this optimizer freezes its second moment in the step in which compression begins",
        "give both settings the same value",
        ("parallel", "compression", "warmup_steps"),
    ),
    ValidityRow(
        (("parallel.compression: auto",), *_BY_LAYER),
        "gradients that are sent layer by layer need a codec that the config names, and auto "
        "chooses a codec only after it has measured the links",
        "name a codec: cast, quantize or adaptive",
        ("parallel", "compression", "type"),
    ),
    *(
        ValidityRow(
            ((f"parallel.compression.{name}",), *_BY_LAYER),
            "here all gradients of a layer are sent together, with the same codec in every step",
            "leave the setting out, or set parallel.zero.stage: 1",
            ("parallel", "compression", name),
        )
        for name in ("rules", "warmup_steps")
    ),
    ValidityRow(
        (("a codec that cannot add up shards",), *_BY_LAYER),
        (
            "here the backward pass reduce-scatters the gradients of each layer, with the same "
            "computation in every step"
        ),
        "use cast, quantize with rounding nearest, or adaptive, or set parallel.zero.stage: 1",
        ("parallel", "compression"),
    ),
    ValidityRow(
        (("elastic.batch: rescale",), ("no optim.scale_from",)),
        "if the batch size changes with the number of hosts, a rule must scale the learning rate "
        "with it",
        "set optim.scale_from, or set elastic.batch: same",
        ("elastic", "batch"),
    ),
    *(
        ValidityRow(
            (("elastic.batch: rescale",), (path,)),
            "both settings change the batch size",
            f"leave {path} out, or set elastic.batch: same",
            ("elastic", "batch"),
        )
        for path in ("train.batch_ramp", "train.phases")
    ),
    ValidityRow(
        (("elastic.batch: rescale",), ("deterministic: strict",)),
        "only runs with the same batch size compute the same bits on every number of devices",
        "set parallel.deterministic: null, or elastic.batch: same",
        ("elastic", "batch"),
    ),
)
"""The refused combinations of compressed gradients with optimizers or with batches of changing
size."""
