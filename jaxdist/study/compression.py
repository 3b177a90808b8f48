"""The variants of `--of compression`, and the bytes that a step sends."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from jaxdist.compression.choice import Choice, PerParameter, Stages
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment
from jaxdist.hlo import ledger
from jaxdist.mesh import axis_names
from jaxdist.optim.build import AdamWConfig, OptimConfig, SgdConfig
from jaxdist.parallel.exchange.compressed import Compressed
from jaxdist.study.variants import Variant
from jaxdist.train.step import Program
from jaxdist.types import JsonObject

UNCOMPRESSED = Variant("uncompressed", ("parallel.compression=null",))
WARM_UP = 0.2
"""Of the run, in which all is sent, or of top-k's messages ever less."""


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

    Feedback is classic, but for sign and top-k where the optimizer has momentum (see `Senders`).

    Args:
      experiment: without compression.

    Raises:
      ConfigError: no two devices share the batch, so that no gradient is sent.
    """
    check_sent(experiment)
    warm_up = max(4, round(WARM_UP * experiment.total_steps))
    whole: JsonObject = {"warmup_steps": warm_up}
    sign: JsonObject = {"type": "sign", "block": 64, **whole}
    sparse: JsonObject = {"type": "topk", "fraction": 0.01, **whole}
    sparser: JsonObject = {**sparse, "warmup": "sparser"}
    senders = senders_of(experiment.config.optim, warm_up)
    # A frozen second moment asks for steps that send everything.
    own = sparse if senders.frozen else sparser
    corrected = [compressed("top-k 1%, DGC", sparser, c) for c in senders.corrected]
    variants = (
        compressed("int8", {"type": "quantize", "bits": 8}),
        compressed("int4", {"type": "quantize", "bits": 4}),
        compressed("sign", sign, senders.sign),
        compressed("top-k 1%", own, senders.topk),
        *corrected,
        compressed("PowerSGD rank 4", {"type": "lowrank", "rank": 4, **whole}),
        compressed("sign, no feedback", {**sign, "error_feedback": False}),
        compressed("top-k, no feedback", {**sparser, "error_feedback": False}),
    )
    return VariantSet((UNCOMPRESSED, *variants), (senders.note,))


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
class Fitted:
    """Feedback, and the overrides of the optimizer that go with it; by default classic, none."""

    feedback: JsonObject | bool = True
    optim: tuple[str, ...] = ()


@dataclass(frozen=True)
class Senders:
    """The feedback of sign and of top-k that fits an optimizer.

    Attributes:
      note: says which, and what changes in the optimizer.
      corrected: of top-k with momentum correction, where that is another one.
      frozen: is the optimizer another one, whose second moment is frozen after the warm-up?
    """

    note: str
    sign: Fitted = Fitted()
    topk: Fitted = Fitted()
    corrected: tuple[Fitted, ...] = ()
    frozen: bool = False


def senders_of(optim: OptimConfig, warm_up: int) -> Senders:
    """What a comparison sends signs and few elements with.

    Both are messages of the momentum where the optimizer has one: SGD keeps its own, AdamW becomes
    1-bit Adam (Tang et al., arXiv 2102.02888). Beside SGD's stands top-k whose momentum is on the
    senders (momentum correction with factor masking: Lin et al., arXiv 1712.01887). All other
    feedback is classic.

    Args:
      warm_up: steps after which 1-bit Adam freezes its second moment.
    """
    if isinstance(optim, AdamWConfig) and optim.b1:
        frozen = ("optim.type=onebit_adam", f"optim.freeze_step={warm_up}", "optim.clip_norm=null")
        note = (
            "sign and top-k send the momentum of 1-bit Adam (AdamW whose second moment is frozen "
            f"after {warm_up} steps), and clip on the senders."
        )
        fitted = Fitted(_momentum_of(optim.b1, optim.clip_norm), frozen)
        return Senders(note, fitted, fitted, frozen=True)
    if not (isinstance(optim, SgdConfig) and optim.momentum):
        kind = "sgd without momentum" if isinstance(optim, SgdConfig) else optim.type
        return Senders(
            f"All feedback is classic: {kind} has no momentum that messages could be of."
        )
    note = (
        f"sign and top-k send momentum {optim.momentum:g}, and clip on the senders; top-k by DGC "
        "has it there in place of the optimizer's, with factor masking."
    )
    unclipped = ("optim.clip_norm=null",) if optim.clip_norm else ()
    fitted = Fitted(_momentum_of(optim.momentum, optim.clip_norm), unclipped)
    return Senders(note, fitted, fitted, (_momentum_correction(optim),))


def _momentum_of(b1: float, clip_norm: float | None) -> JsonObject:
    return {"type": "compressed_momentum", "b1": b1, "clip_norm": clip_norm}


def _momentum_correction(optim: SgdConfig) -> Fitted:
    feedback: JsonObject = {
        "type": "momentum",
        "momentum": optim.momentum,
        "nesterov": optim.nesterov,
        "clip_norm": optim.clip_norm,
    }
    # The optimizer's velocity sums weight decay up; without one each step takes that whole.
    decay = optim.weight_decay / (1 - optim.momentum)
    moved = ("optim.momentum=0", "optim.nesterov=false", "optim.clip_norm=null")
    return Fitted(feedback, (*moved, f"optim.weight_decay={decay:.6g}"))


def compressed(name: str, settings: JsonObject, fitted: Fitted | None = None) -> Variant:
    """A variant with these settings of parallel.compression."""
    fitted = fitted or Fitted(settings.get("error_feedback", True))
    found = {**settings, "error_feedback": fitted.feedback}
    return Variant(name, (f"parallel.compression={json.dumps(found)}", *fitted.optim))


def sent_bytes(experiment: Experiment) -> float:
    """What a device sends in one step over the axes that share the batch, after any warm-up.

    Read from the compiled program.
    """
    program, mesh = _without_warm_up(experiment.program), experiment.layout.mesh
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    axis = experiment.layout.axis_of("batch")
    shared = set(axis_names(mesh, axis) if axis else ())
    return sum(
        collective.times_high * collective.sent_bytes
        for collective in ledger(compiled, mesh).collectives
        if shared & set(collective.axes or ())
    )


def _without_warm_up(program: Program) -> Program:
    """Stages of a codec are branches of one program, of which only the last one lasts."""
    exchange = program.exchange
    if not isinstance(exchange, Compressed):
        return program
    messages = replace(exchange.messages, choice=_last(exchange.messages.choice))
    return replace(program, exchange=replace(exchange, messages=messages))


def _last(choice: Choice) -> Choice:
    if isinstance(choice, Stages):
        return choice.stages[-1].codec
    if isinstance(choice, PerParameter):
        rules = tuple(r.model_copy(update={"codec": _last(r.codec)}) for r in choice.rules)
        return choice.model_copy(update={"rules": rules, "otherwise": _last(choice.otherwise)})
    return choice
