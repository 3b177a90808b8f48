"""What the configs of all optimizers share, and what they know of the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import jax
from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.optim.layers import Dims, layer_dims
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.optim.trust_ratio import UNBOUNDED, Rule
from jaxdist.trees import flatten_with_names

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """The settings that every optimizer has."""

    learning_rate: Positive
    """Peak learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Warm-up and decay of the learning rate."""
    clip_norm: Positive | None = None
    """Scale the gradient down to this global norm when it is larger; null never clips."""


def decay_mask(params: Any, dims: Mapping[str, Dims]) -> Any:
    """True where weights decay: tensors with two or more dims besides "layers".

    So matrices decay, while biases and norm scales do not, stacked for a scan or not.
    """
    flags = [
        sum(dim != "layers" for dim in dims[name]) >= 2 for name, _ in flatten_with_names(params)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


@dataclass(frozen=True)
class NamedParams:
    """A tree of parameters and the logical dims of each, by '/'-joined name."""

    params: Any
    dims: Mapping[str, Dims]

    @property
    def matrices(self) -> Any:
        """The tree of `decay_mask`; False where no parameter is a matrix."""
        mask = decay_mask(self.params, self.dims)
        return mask if any(jax.tree.leaves(mask)) else False

    def masks(self, rule: Rule, exclude_vectors: bool | None) -> dict[str, Any]:
        """`decay_mask` and `adapt_mask`: the matrices, or all where the rule takes vectors too."""
        decay, adapt = rule.decay_vectors, rule.adapt_vectors
        if exclude_vectors is not None:
            decay = adapt = not exclude_vectors
        return {
            "decay_mask": True if decay else self.matrices,
            "adapt_mask": True if adapt else self.matrices,
        }

    def layer_dims(self, names: Sequence[str]) -> Any:
        """The tree of `jaxdist.optim.layers.layer_dims`."""
        return layer_dims(self.params, self.dims, names)


def given(config: Config, rule: type) -> dict[str, Any]:
    """The settings of a config that are fields of a rule and not null; "off" is no bound."""
    off = {"max_grad_norm": math.inf, "phi": UNBOUNDED, "ratio_bounds": UNBOUNDED}
    values = {field.name: getattr(config, field.name, None) for field in fields(rule)}
    return {
        name: off[name] if value == "off" else value
        for name, value in values.items()
        if value is not None
    }
