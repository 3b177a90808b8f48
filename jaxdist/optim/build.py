"""From an optimizer's config to an optax transformation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import optax
from pydantic import Field

from jaxdist.config.importing import load_object
from jaxdist.errors import ConfigError
from jaxdist.optim.common import (
    Beta,
    NamedParams,
    NonNegative,
    OptimizerConfig,
    Positive,
    decay_mask,
)
from jaxdist.optim.lamb import LambConfig
from jaxdist.optim.lars import LarsConfig
from jaxdist.optim.layers import Dims
from jaxdist.optim.schedules import build_schedule

__all__ = [
    "AdamWConfig",
    "ImportedOptimizerConfig",
    "OptimConfig",
    "Optimizer",
    "SgdConfig",
    "build_optimizer",
    "decay_mask",
]


class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    type: Literal["adamw"]
    """Selects this optimizer."""
    b1: Beta = 0.9
    """Decay of the first moment."""
    b2: Beta = 0.999
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay, times the learning rate; biases and norm scales are left out."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """The update rule for a learning-rate schedule on these parameters."""
        return optax.adamw(
            rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=tree.matrices
        )


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"]
    """Selects this optimizer."""
    momentum: Beta = 0.9
    """Decay of the velocity; 0 keeps none."""
    nesterov: bool = False
    """Look ahead along the velocity."""
    weight_decay: NonNegative = 0.0
    """L2 decay added to the gradient; biases and norm scales are left out."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """The update rule for a learning-rate schedule on these parameters."""
        return optax.chain(
            optax.add_decayed_weights(self.weight_decay, tree.matrices),
            optax.sgd(rate, self.momentum or None, self.nesterov),
        )


class ImportedOptimizerConfig(OptimizerConfig):
    """Your own: a function of (learning_rate schedule, **args) that returns an optax transform."""

    type: Literal["import"]
    """Selects this optimizer."""
    path: str
    """Import path of the function, `mypkg.module:name`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """The user's transformation; it is given the schedule, not the parameters."""
        made = load_object(self.path)(rate, **self.args)
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise ConfigError(
                f"optim.path {self.path} returned {type(made).__name__}, "
                "not an optax.GradientTransformation"
            )
        return made


OptimConfig = Annotated[
    AdamWConfig | SgdConfig | LambConfig | LarsConfig | ImportedOptimizerConfig,
    Field(discriminator="type"),
]


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation and the schedule inside it (step to learning rate)."""

    transform: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    clip_norm: float | None


def build_optimizer(
    config: OptimConfig, *, total_steps: int, params: Any, dims: Mapping[str, Dims]
) -> Optimizer:
    """The optimizer for a run of `total_steps` on this tree of parameters."""
    rate = build_schedule(config.schedule, peak=config.learning_rate, total_steps=total_steps)
    transform = config.transform(rate, NamedParams(params, dims))
    return Optimizer(optax.with_extra_args_support(transform), rate, config.clip_norm)
