"""The variants of `--of compression`: one of each codec, with feedback and without."""

from __future__ import annotations

import json
from dataclasses import dataclass

from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment
from jaxdist.mesh import axis_names
from jaxdist.optim.build import SgdConfig
from jaxdist.study.variants import Variant
from jaxdist.types import JsonObject

UNCOMPRESSED = Variant("uncompressed", ("parallel.compression=null",))
WARM_UP = 0.1
"""Of the run, in which all is sent, or of sparse messages ever less."""


@dataclass(frozen=True)
class VariantSet:
    """What `--of` names.

    Attributes:
      variants: the first is what the others are compared with.
      notes: how they fit this config, a sentence each.
    """

    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()


def compression_variants(experiment: Experiment) -> VariantSet:
    """Gradient compression of an experiment: int8, int4, sign, 1% of top-k, and rank 4.

    Feedback is classic. Where the optimizer is SGD with momentum, that momentum moves to the
    senders for top-k (momentum correction with factor masking: Lin et al., arXiv 1712.01887) and
    for sign (Zheng et al., arXiv 1905.10936): the comparison is at the same momentum.

    Args:
      experiment: without compression.

    Raises:
      ConfigError: no two devices share the batch, so that no gradient is sent.
    """
    check_sent(experiment)
    warm_up = max(1, round(WARM_UP * experiment.total_steps))
    signs: JsonObject = {"type": "sign", "block": 64, "warmup_steps": warm_up}
    sparse: JsonObject = {"type": "topk", "warmup": "sparser", "warmup_steps": max(4, 2 * warm_up)}
    note, masked = _sender_momentum(experiment, masking=True)
    _, unmasked = _sender_momentum(experiment, masking=False)
    variants = (
        _compressed("int8", {"type": "quantize", "bits": 8}),
        _compressed("int4", {"type": "quantize", "bits": 4}),
        _compressed("sign", signs, unmasked),
        _compressed("top-k 1%", sparse, masked),
        _compressed("PowerSGD rank 4", {"type": "lowrank", "rank": 4, "warmup_steps": warm_up}),
        _compressed("sign, no feedback", {**signs, "error_feedback": False}),
        _compressed("top-k, no feedback", {**sparse, "error_feedback": False}),
    )
    return VariantSet((UNCOMPRESSED, *variants), (note,))


SETS = {"compression": compression_variants}
"""What `--of` may name: from the experiment of the config to its variants."""


def check_sent(experiment: Experiment) -> None:
    """Raises ConfigError where no gradient is sent."""
    layout = experiment.layout
    axis = layout.axis_of("batch")
    shape = layout.mesh.shape
    sizes = {name: shape[name] for name in (axis_names(layout.mesh, axis) if axis else ())}
    if all(size == 1 for size in sizes.values()):
        raise ConfigError(
            f"--of compression: one device has the whole batch (mesh {dict(shape)}), so that no "
            "gradient is sent; set mesh.data above 1, or play devices: --devices 4"
        )


@dataclass(frozen=True)
class _Momentum:
    """Feedback with momentum, and what then changes in the optimizer; nothing of others."""

    feedback: JsonObject | None = None
    optim: tuple[str, ...] = ()


def _sender_momentum(experiment: Experiment, *, masking: bool) -> tuple[str, _Momentum]:
    """Momentum of the senders in place of the optimizer's, and what to say of it."""
    optim = experiment.config.optim
    if not (isinstance(optim, SgdConfig) and optim.momentum):
        kind = "sgd without momentum" if isinstance(optim, SgdConfig) else optim.type
        note = f"All feedback is classic: {kind} has no momentum that senders could take over."
        return note, _Momentum()
    feedback: JsonObject = {
        "type": "momentum",
        "momentum": optim.momentum,
        "nesterov": optim.nesterov,
        "clip_norm": optim.clip_norm,
        "masking": masking,
    }
    # The optimizer's velocity sums weight decay up; without one each step takes that whole.
    decay = optim.weight_decay / (1 - optim.momentum)
    moved = ("optim.momentum=0", "optim.nesterov=false", "optim.clip_norm=null")
    note = (
        f"sign and top-k have momentum {optim.momentum:g} on the senders (top-k with factor "
        "masking) in place of the optimizer's, and clip there."
    )
    return note, _Momentum(feedback, (*moved, f"optim.weight_decay={decay:.6g}"))


def _compressed(name: str, settings: JsonObject, momentum: _Momentum | None = None) -> Variant:
    if momentum is not None and momentum.feedback is not None:
        settings = {**settings, "error_feedback": momentum.feedback}
    others = momentum.optim if momentum is not None else ()
    return Variant(name, (f"parallel.compression={json.dumps(settings)}", *others))
