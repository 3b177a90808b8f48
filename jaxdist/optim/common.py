"""The settings that all optimizers share, and a tree of parameters with logical dims."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import optax
from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.optim.batch_scaling import ScaleFromConfig
from jaxdist.optim.layers import layer_dims
from jaxdist.optim.layerwise import LayerwiseRule
from jaxdist.optim.loss_scale import DynamicLossScaleConfig
from jaxdist.optim.safety import SkipSpikesConfig
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.optim.trust_ratio import UNBOUNDED
from jaxdist.trees import map_with_names
from jaxdist.types import Dims, Kwargs, Masks, Params, PyTree, Shardings

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """The settings that every optimizer has."""

    type: Any  # Each optimizer narrows the type to the literal that selects it.
    """The name that selects the optimizer in a config."""
    learning_rate: PositiveFloat | None = None
    """The peak learning rate, which the schedule reaches after the warm-up; null if scale_from
    derives the learning rate."""
    rates: dict[str, PositiveFloat] = Field(default_factory=dict)
    """The factors on the learning rate, by patterns of parameter names, in which `*` matches any
    characters. The first pattern that matches a name applies, and without a match the factor is 1.
    """
    scale_from: ScaleFromConfig | None = None
    """The values that work at another batch size, from which the learning rate and the warm-up are
    derived; null takes both from learning_rate and schedule."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The warm-up and decay of the learning rate."""
    clip_norm: PositiveFloat | None = None
    """The global norm to which larger gradients are scaled down; null never clips."""
    skip_nonfinite: bool = False
    """Whether to skip steps whose gradients contain a NaN or an infinity, instead of ending the
    run."""
    skip_spikes: SkipSpikesConfig | None = None
    """The rule for skipping steps whose gradients are much larger than recent gradients; null skips
    no step for the size of its gradients."""
    max_skipped: Count | None = None
    """The number of consecutive steps that may be skipped before the run ends; null means 20 if
    steps may be skipped."""
    bf16_moments: bool = False
    """Whether to keep the optimizer's moments in bfloat16, with stochastic rounding after each
    step, which halves their memory."""
    master_weights: Literal["bfloat16", "float16"] | None = None
    """The dtype of the model's parameters, if the optimizer's state keeps float32 copies of the
    parameters; null keeps only the model's parameters."""
    loss_scale: DynamicLossScaleConfig | None = None
    """The factor on the loss that keeps float16 gradients from vanishing. Steps whose gradients
    overflow are skipped. null does not scale the loss."""

    @property
    def skips(self) -> bool:
        """Whether a step may be skipped because of its gradients."""
        return self.skip_nonfinite or self.skip_spikes is not None or self.loss_scale is not None

    @abstractmethod
    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Build the update rule from a learning-rate schedule, for the parameters of `tree`."""

    @property
    def whole_matrices(self) -> bool:
        """Whether the rule computes on whole matrices, and so needs the parameters' shardings."""
        return False

    def explain(self, tree: NamedParams) -> tuple[str, ...]:
        """Return a line for each choice that the update rule makes for the parameters of `tree`."""
        return ()

    @property
    def frozen_from(self) -> int | None:
        """The step at which the second moment is frozen, or None if it is never frozen."""
        return None

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.learning_rate is not None and self.scale_from is not None:
            raise ValueError(
                f"set only one of learning_rate ({self.learning_rate:g}) and scale_from "
                f"(learning_rate {self.scale_from.learning_rate:g} at batch "
                f"{self.scale_from.batch_size})"
            )
        if self.scale_from is not None and self.scale_from.warmup and self.schedule.warmup_steps:
            raise ValueError(
                "the warm-up is set twice: optim.schedule.warmup_steps "
                f"{self.schedule.warmup_steps} and {self.scale_from.warmup}; leave either out"
            )
        if self.max_skipped is not None and not self.skips:
            raise ValueError(
                f"max_skipped {self.max_skipped} has no effect, since no setting skips steps: also "
                "set skip_nonfinite, skip_spikes or loss_scale"
            )
        return self


def decay_mask(params: Params, dims: Mapping[str, Dims]) -> Masks:
    """Return a tree that is True for each tensor with two or more dims other than "layers".

    Matrices therefore decay, while biases and norm scales do not, even if the parameters of all
    layers are stacked for a scan.
    """
    return map_with_names(lambda name, _: sum(dim != "layers" for dim in dims[name]) >= 2, params)


@dataclass(frozen=True)
class NamedParams:
    """A tree of parameters, and the logical dims of each parameter by its '/'-joined name.

    Attributes:
      shares: the sharding of each parameter in the optimizer's update, as a tree like the
        parameters, or None if no parameter is split.
    """

    params: Params
    dims: Mapping[str, Dims]
    shares: Shardings | None = None

    @property
    def matrices(self) -> Masks:
        """The result of `decay_mask`, or the single value False if no parameter is a matrix."""
        # `trust_ratio.flags` refuses a tree that is False everywhere, since a user's mask of that
        # kind is a mistake.
        mask = decay_mask(self.params, self.dims)
        return mask if any(jax.tree.leaves(mask)) else False

    @property
    def stacked(self) -> frozenset[str]:
        """The names of the parameters whose first dim counts layers."""
        return frozenset(name for name, dims in self.dims.items() if dims[:1] == ("layers",))

    def masks(self, rule: LayerwiseRule, exclude_vectors: bool | None) -> dict[str, Masks]:
        """Return `decay_mask` and `adapt_mask`; each mask selects matrices or all parameters.

        Args:
          rule: the rule, which decides for each mask if `exclude_vectors` is None.
          exclude_vectors: whether both masks select only the matrices, or None to leave this to
            `rule`.
        """
        decay, adapt = rule.decay_vectors, rule.adapt_vectors
        if exclude_vectors is not None:
            decay = adapt = not exclude_vectors
        return {
            "decay_mask": True if decay else self.matrices,
            "adapt_mask": True if adapt else self.matrices,
        }

    def layer_dims(self, names: Sequence[str]) -> PyTree:
        """Return the result of `jaxdist.optim.layers.layer_dims` for these parameters."""
        return layer_dims(self.params, self.dims, names)


class LayerwiseConfig(OptimizerConfig):
    """The settings that LAMB and LARS share, in addition to the settings of every optimizer."""

    layer_dims: tuple[str, ...] = ("layers",)
    """The names of dims along which each index has a separate norm. Add heads or expert for a norm
    of each head or expert."""
    exclude_vectors: bool | None = None
    """Whether to exclude biases and norm scales from weight decay and from the trust ratio; null
    leaves both to the variant."""
    adapt_undecayed: bool | None = None
    """Whether to scale parameters without weight decay by the trust ratio too; null leaves this to
    the variant."""
    nesterov: bool | None = None
    """Whether to use Nesterov's momentum, which looks one step ahead; null leaves this to the
    variant."""

    def settings(self, rule: LayerwiseRule, tree: NamedParams) -> Kwargs:
        """Return the keyword arguments of `lamb` or `lars`: dims, masks, and the config's settings.

        A setting that is None keeps the variant's value, and "off" removes a bound.

        Args:
          rule: the rule of the variant.
        """
        off = {"max_grad_norm": math.inf, "phi": UNBOUNDED, "ratio_bounds": UNBOUNDED}
        apart = {*OptimizerConfig.model_fields, "layer_dims", "exclude_vectors"}
        values = {name: value for name, value in self if name not in apart and value is not None}
        return {
            "layer_dims": tree.layer_dims(self.layer_dims),
            **tree.masks(rule, self.exclude_vectors),
            **{name: off[name] if value == "off" else value for name, value in values.items()},
        }
