"""The rows of the table of validity about compressed gradients and batches of changing size."""

from __future__ import annotations

from jaxdist.validity.row import ValidityRow

_FEEDBACK = ("parallel", "compression", "error_feedback")
_BY_LAYER = (("zero 2", "zero 3"), ("compression over data, error_feedback: false",))

MESSAGES: tuple[ValidityRow, ...] = (
    ValidityRow(
        (("error_feedback: momentum",), ("an optimizer with momentum",)),
        "momentum would count twice",
        "set optim: {type: sgd, momentum: 0} (or b1: 0), or "
        "parallel.compression.error_feedback: true",
        _FEEDBACK,
    ),
    ValidityRow(
        (("error_feedback: compressed_momentum",), ("an optimizer that is not linear",)),
        "what a message leaves out of the momentum returns later, and the step of this "
        "optimizer is not linear in its gradients",
        "set optim.type: onebit_adam, onebit_lamb or sgd, or "
        "parallel.compression.error_feedback: true",
        _FEEDBACK,
    ),
    ValidityRow(
        (("error_feedback: compressed_momentum",), ("another decay in optim",)),
        "both are the decay of one momentum",
        "set them to the same",
        _FEEDBACK,
    ),
    ValidityRow(
        (("another error_feedback",), ("optim: onebit",)),
        "this optimizer needs its momentum compressed, not the gradient",
        "set error_feedback: {type: compressed_momentum}, with the b1 of optim",
        _FEEDBACK,
    ),
    ValidityRow(
        (("parallel.compression",), ("another optim.freeze_step",)),
        "the second moment is frozen when compression begins",
        "set both to the same",
        ("parallel", "compression", "warmup_steps"),
    ),
    ValidityRow(
        (("parallel.compression: auto",), *_BY_LAYER),
        "links do not choose the codec of gradients that leave layer by layer",
        "name a codec: cast, quantize or adaptive",
        ("parallel", "compression", "type"),
    ),
    *(
        ValidityRow(
            ((f"parallel.compression.{name}",), *_BY_LAYER),
            "a layer's gradients are sent together as soon as they exist",
            "leave it out, or set parallel.zero.stage: 1",
            ("parallel", "compression", name),
        )
        for name in ("rules", "warmup_steps")
    ),
    ValidityRow(
        (("a codec that sums no shards",), *_BY_LAYER),
        (
            "a layer's gradients are summed by shards in the backward pass, in the same way in "
            "every step"
        ),
        "use cast, quantize with rounding nearest, or adaptive, or set parallel.zero.stage: 1",
        ("parallel", "compression"),
    ),
    ValidityRow(
        (("elastic.batch: rescale",), ("no optim.scale_from",)),
        "a batch that changes its size needs a rule for the learning rate",
        "give optim.scale_from, or set elastic.batch: same",
        ("elastic", "batch"),
    ),
    *(
        ValidityRow(
            (("elastic.batch: rescale",), (path,)),
            "both change the size of a batch",
            f"drop {path}, or set elastic.batch: same",
            ("elastic", "batch"),
        )
        for path in ("train.batch_ramp", "train.phases")
    ),
    ValidityRow(
        (("elastic.batch: rescale",), ("deterministic: strict",)),
        "only runs with the same batch size have the same bits on any number of devices",
        "set parallel.deterministic: null, or elastic.batch: same",
        ("elastic", "batch"),
    ),
)
"""The refused combinations of compressed gradients with optimizers, and those with batches of
changing size."""
