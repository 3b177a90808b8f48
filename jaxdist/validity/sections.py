"""The features that only a few rows use, and which the matrix does not show."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxdist.compression import CompressedMomentum, MomentumCorrection, NoFeedback
from jaxdist.compression.config import CompressAuto
from jaxdist.validity.features import FEATURES, Facts, Feature, has_strategy, shown_mesh

LINEAR = ("sgd", "onebit_adam", "onebit_lamb")
"""The optimizers whose steps are linear in the momentum. An optimizer with a second moment is
linear only if that moment is frozen."""


def _setting(path: str) -> Feature:
    return Feature(lambda f: path in f.settings, lambda f: f"{path} {f.settings[path]}")


def _value(path: str, *values: str) -> Feature:
    return Feature(lambda f: f.settings.get(path) in values, lambda f: f"{path} {f.settings[path]}")


def _feedback(facts: Facts) -> str:
    found = None if facts.compression is None else facts.compression.feedback
    kind = getattr(found, "type", "false" if isinstance(found, NoFeedback) else "true")
    decay = f", b1 {found.b1:g}" if isinstance(found, CompressedMomentum) else ""
    return f"parallel.compression.error_feedback {kind}{decay}"


def _feeds_back(kind: type) -> Feature:
    return Feature(
        lambda f: f.compression is not None and isinstance(f.compression.feedback, kind), _feedback
    )


def _other_feedback(facts: Facts) -> bool:
    found = facts.compression
    return found is not None and not isinstance(found.feedback, CompressedMomentum)


def _decays_apart(facts: Facts) -> bool:
    found = None if facts.compression is None else facts.compression.feedback
    if not isinstance(found, CompressedMomentum) or facts.optim.type not in LINEAR:
        return False
    return found.b1 != facts.optim.momentum


def _begins_apart(facts: Facts) -> bool:
    found, freeze = facts.compression, facts.optim.freeze_step
    return found is not None and freeze is not None and found.warmup_steps != freeze


def _sums_no_shards(facts: Facts) -> bool:
    found = facts.compression
    if found is None or isinstance(found, CompressAuto):
        return False
    return found.codec.exchange != "scatter" or found.codec.unbiased


def _warmup(facts: Facts) -> str:
    found = 0 if facts.compression is None else facts.compression.warmup_steps
    return f"parallel.compression.warmup_steps {found}"


def _optim(facts: Facts) -> str:
    return f"optim.type {facts.optim.type}"


def _codec(facts: Facts) -> str:
    found = facts.compression
    assert found is not None
    assert not isinstance(found, CompressAuto)
    why = (
        ("would round with the same random numbers in every step")
        if found.codec.unbiased
        else "cannot add up shards"
    )
    # The text ends with a comma, since the message continues after this relative clause.
    return f"parallel.compression.type {getattr(found, 'type', '')}, which {why},"


_PATHS = (
    "parallel.zero",
    "train.batch_ramp",
    "train.phases",
    "model.freeze",
    "model.lora",
    "model.experts",
    "train.check_replicas",
    "checkpoint.local",
    "optim.clip_norm",
    "optim.rates",
    "optim.skip_spikes",
    "optim.loss_scale",
    "optim.master_weights",
    "optim.skip_nonfinite",
    "optim.max_grad_norm",
    "strategy.codec",
    "strategy.consistency.backups",
    "strategy.consistency.value_bound",
    "strategy.consistency.delay_compensation",
)

SECTIONS: Mapping[str, Feature] = {
    **{path: _setting(path) for path in _PATHS},
    "strategy: hybrid": has_strategy("hybrid"),
    "elastic.batch: rescale": _value("elastic.batch", "rescale"),
    "strategy.consistency: elastic": _value("strategy.consistency.type", "elastic"),
    "strategy.aggregation: racks": _value("strategy.aggregation.type", "racks"),
    "strategy.aggregation: secure": _value("strategy.aggregation.type", "secure"),
    "strategy.consistency besides bsp": Feature(
        lambda f: f.settings.get("strategy.consistency.type", "bsp") != "bsp",
        lambda f: f"strategy.consistency.type {f.settings['strategy.consistency.type']}",
    ),
    "no optim.scale_from": Feature(
        lambda f: "optim.scale_from" not in f.settings, "optim.scale_from null"
    ),
    "a mesh axis besides data and tensor": Feature(
        lambda f: bool(_beside(f)),
        lambda f: " and ".join(
            f"mesh axis {name} of {n} devices" for name, n in _beside(f).items()
        ),
    ),
    "mesh axis expert": Feature(
        lambda f: any(n > 1 for name, n in f.mesh.items() if _kind(name) == "expert"), shown_mesh
    ),
    "parallel.zero.prefetch": Feature(lambda f: f.zero.prefetch, "parallel.zero.prefetch true"),
    "parallel.zero.offload": Feature(
        lambda f: f.zero.stage > 0 and f.zero.offload, "parallel.zero.offload true"
    ),
    "parallel.zero.offload_parameters": Feature(
        lambda f: f.zero.stage > 0 and bool(f.zero.offload_parameters),
        lambda f: f"parallel.zero.offload_parameters {', '.join(f.zero.offload_parameters)}",
    ),
    "a strategy besides synchronous": Feature(
        lambda f: f.strategy != "synchronous", lambda f: f"strategy.type {f.strategy}"
    ),
    "strategy: lookahead": has_strategy("lookahead"),
    "optim: onebit": Feature(lambda f: f.optim.freeze_step is not None, _optim),
    "optim: muon": Feature(lambda f: f.optim.type == "muon", _optim),
    "an optimizer that evaluates other parameters": Feature(
        lambda f: f.optim.averages,
        "an optimizer that evaluates other parameters than it trains",
    ),
    "an optimizer with momentum": Feature(
        lambda f: f.optim.momentum > 0,
        lambda f: f"{_optim(f)}, which itself has momentum {f.optim.momentum:g}",
    ),
    "an optimizer that is not linear": Feature(
        lambda f: bool(f.optim.type) and f.optim.type not in LINEAR, _optim
    ),
    "another decay in optim": Feature(
        _decays_apart, lambda f: f"{_optim(f)}, b1 {f.optim.momentum:g}"
    ),
    "another optim.freeze_step": Feature(
        _begins_apart, lambda f: f"optim.freeze_step {f.optim.freeze_step}"
    ),
    "state of the model besides parameters": Feature(
        lambda f: bool(f.buffers),
        lambda f: f"a model that keeps {f.buffers[0]} besides its parameters",
    ),
    "error_feedback: momentum": _feeds_back(MomentumCorrection),
    "error_feedback: compressed_momentum": _feeds_back(CompressedMomentum),
    "another error_feedback": Feature(_other_feedback, _feedback),
    "parallel.compression: auto": Feature(
        lambda f: isinstance(f.compression, CompressAuto),
        "parallel.compression.type auto",
    ),
    "parallel.compression.rules": Feature(
        lambda f: f.compression is not None and bool(f.compression.rules),
        "parallel.compression.rules",
    ),
    "parallel.compression.warmup_steps": Feature(
        lambda f: f.compression is not None and f.compression.warmup_steps > 0, _warmup
    ),
    "parallel.compression": Feature(lambda f: f.compression is not None, _warmup),
    "a codec that cannot add up shards": Feature(_sums_no_shards, _codec),
    "mesh.context": Feature(
        lambda f: bool(_context(f)), lambda f: f"mesh.context of {math.prod(_context(f))}"
    ),
    "sharding.context: gather or gather_ulysses": _value(
        "sharding.context", "gather", "gather_ulysses"
    ),
    "sharding.context: ring or ring_ulysses": _value("sharding.context", "ring", "ring_ulysses"),
    "sharding.context: ulysses": _value("sharding.context", "ulysses"),
    "sharding.context_order: zigzag or striped": _value(
        "sharding.context_order", "zigzag", "striped"
    ),
    "sharding.rules.embed: context or expert": _value("sharding.rules.embed", "context", "expert"),
    "a kernel for whole sequences": _value("model.attention", "plain", "cudnn"),
    "model.attention: splash": _value("model.attention", "splash"),
    "sharding.collective_matmul": Feature(
        lambda f: "sharding.collective_matmul" in f.settings,
        "sharding.collective_matmul true",
    ),
    "model.attention_window": _setting("model.attention_window"),
    "a loss other than next_token": _setting("loss.type"),
    "a model without attention": _value("model.type", "cnn", "import", "mlp", "resnet"),
    "a model without tables": Feature(
        lambda f: f.settings.get("model.type") not in ("mf", "dlrm"),
        lambda f: f"model.type {f.settings.get('model.type', 'gpt')}",
    ),
    "a model whose attention is not causal": _value("model.type", "bert"),
}
"""The features of other sections of a config. Some features depend on two settings."""


def _beside(facts: Facts) -> dict[str, int]:
    """Return the mesh axes of a size above 1 that a worker of a parameter server must not have."""
    return {
        name: size
        for name, size in facts.mesh.items()
        if size > 1 and _kind(name) not in ("data", "tensor")
    }


def _kind(name: str) -> str:
    return name.removesuffix("_dcn").removesuffix("_ici")


def _context(facts: Facts) -> list[int]:
    """Return the sizes above 1 of the mesh axes that split sequences."""
    return [n for name, n in facts.mesh.items() if name.startswith("context") and n > 1]


EVERY: Mapping[str, Feature] = {**FEATURES, **SECTIONS}
"""All features that a row may name."""
