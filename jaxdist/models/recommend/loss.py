"""The losses of recommenders: the squared error of ratings, and the cross-entropy of clicks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from jaxdist.config.schema import Config
from jaxdist.models.mean import Mean, Ranking, RootMean
from jaxdist.models.recommend.tables import PULLED, Scored
from jaxdist.types import PyTree

_NEEDS = {"ids": ("fields",), "target": ()}


class SquaredErrorConfig(Config):
    """Squared error of a score; evaluation also measures the root of its mean, the RMSE."""

    needs: ClassVar[Mapping[str, tuple[str, ...] | None]] = _NEEDS
    type: Literal["squared_error"]
    """The name that selects this loss in a config."""

    def build(self) -> Callable[..., PyTree]:
        """Return the loss function, which calls the module as `module(ids, dense, pulled)`."""
        return squared_error


class ClickConfig(Config):
    """Cross-entropy of a click, in nats, from a logit; evaluation also measures the AUC."""

    needs: ClassVar[Mapping[str, tuple[str, ...] | None]] = _NEEDS
    type: Literal["click"]
    """The name that selects this loss in a config."""

    def build(self) -> Callable[..., PyTree]:
        """Return the loss function, which calls the module as `module(ids, dense, pulled)`."""
        return click


def squared_error(module: PyTree, batch: Mapping[str, jax.Array]) -> PyTree:
    """Compute the mean squared error, to which the penalty on looked-up rows is added.

    Args:
      batch: ids int32 `[B, F]`, target float32 `[B]` and weight float32 `[B]`; dense features,
        float32 `[B, C]`, are optional.
    """
    scored, weight = _scored(module, batch), batch["weight"]
    error_B = jnp.square(scored.score - batch["target"])
    count = weight.sum()
    return {
        "loss": Mean(((error_B + scored.penalty) * weight).sum(), count),
        "rmse": RootMean((error_B * weight).sum(), count),
    }


def click(module: PyTree, batch: Mapping[str, jax.Array]) -> PyTree:
    """Compute the mean cross-entropy of targets from 0 to 1, plus the penalty on looked-up rows."""
    scored, weight, target = _scored(module, batch), batch["weight"], batch["target"]
    nats_B = optax.sigmoid_binary_cross_entropy(scored.score, target)
    count = weight.sum()
    return {
        "loss": Mean(((nats_B + scored.penalty) * weight).sum(), count),
        "log_loss": Mean((nats_B * weight).sum(), count),
        "auc": Ranking(scored.score, target, weight),
    }


def _scored(module: PyTree, batch: Mapping[str, jax.Array]) -> Scored:
    found = module(batch["ids"], batch.get("dense"), batch.get(PULLED))
    return found if isinstance(found, Scored) else Scored(found, jnp.zeros_like(found))
