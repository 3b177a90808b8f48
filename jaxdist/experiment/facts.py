"""The facts about a config that the table of valid combinations reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxdist.config.document import shown
from jaxdist.experiment.config import ExperimentConfig
from jaxdist.models.build import offloads_of
from jaxdist.models.functional import Functional
from jaxdist.optim.common import OptimizerConfig
from jaxdist.optim.lamb import LAMB_RULES, LambConfig
from jaxdist.parallel.plan import ParallelConfig, plan_facts
from jaxdist.sharding import Dims, Layout
from jaxdist.train.strategy.config import ParameterServer
from jaxdist.trees import flatten_with_names
from jaxdist.validity.features import Facts, OptimFacts

OFF: Mapping[str, object] = {
    "model.freeze": [],
    "model.lora": None,
    "model.experts": None,
    "parallel.zero": ParallelConfig().model_dump(mode="json")["zero"],
    "train.batch_ramp": None,
    "train.phases": None,
    "train.check_replicas": None,
    "checkpoint.local": None,
    "elastic.batch": "same",
    "optim.rates": {},
    "optim.scale_from": None,
    "optim.clip_norm": None,
    "optim.skip_spikes": None,
    "optim.loss_scale": None,
    "optim.master_weights": None,
    "optim.skip_nonfinite": False,
    "model.type": "gpt",
    "model.attention": "auto",
    "model.attention_window": None,
    "loss.type": "next_token",
    "sharding.collective_matmul": False,
    "sharding.context": "auto",
    "sharding.context_order": "auto",
}
"""The settings that the table of valid combinations reads, and the value that turns each setting
off."""


def config_facts(
    config: ExperimentConfig, layout: Layout, dims: Mapping[str, Dims] | None = None
) -> Facts:
    """Return the facts about a config that need no model.

    Args:
      dims: the logical dims of each parameter, by name, or None if they are not known yet.
    """
    offloads = offloads_of(config.model)
    strategy = config.strategy
    return replace(
        plan_facts(config.parallel, layout, dims or {}, offloads=offloads),
        microbatches=config.train.microbatches,
        workers=strategy.workers if isinstance(strategy, ParameterServer) else 1,
        strategy=strategy.type,
        settings=_settings(config),
        optim=_optim_facts(config.optim),
    )


def model_facts(
    config: ExperimentConfig, layout: Layout, dims: Mapping[str, Dims], model: Functional
) -> Facts:
    """Return the facts about a config, including the facts that require its model."""
    buffers = tuple(name for name, _ in flatten_with_names(model.buffers))
    return replace(config_facts(config, layout, dims), buffers=buffers)


def _settings(config: ExperimentConfig) -> dict[str, str]:
    values = config.model_dump(mode="json")
    found: dict[str, str] = {}
    for path, off in OFF.items():
        section, name = path.split(".")
        # Only some models have the settings of experts or attention, and the section `loss` is null
        # if the model's default loss is used.
        value = (values[section] or {}).get(name, off)
        if value != off:
            found[path] = value if isinstance(value, str) else shown(value)
    if (axis := config.sharding.rules.get("embed")) in ("context", "expert"):
        found["sharding.rules.embed"] = axis
    clip = _lamb_clip(config.optim)
    if clip is not None:
        found["optim.max_grad_norm"] = clip
    if isinstance(config.strategy, ParameterServer):
        found |= config.strategy.settings
    return found


def _lamb_clip(optim: OptimizerConfig) -> str | None:
    """Return, as text, the global norm to which LAMB clips gradients.

    The result is None for another optimizer, or if LAMB does not clip.
    """
    if not isinstance(optim, LambConfig):
        return None
    clip = optim.max_grad_norm or LAMB_RULES[optim.variant].max_grad_norm
    if clip == "off" or not math.isfinite(clip):
        return None
    return (
        f"{clip:g} (of optim.variant {optim.variant})" if not optim.max_grad_norm else f"{clip:g}"
    )


def _optim_facts(optim: OptimizerConfig) -> OptimFacts:
    return OptimFacts(
        type=optim.type,
        momentum=getattr(optim, "momentum", getattr(optim, "b1", 0.0)),
        freeze_step=optim.frozen_from,
    )
