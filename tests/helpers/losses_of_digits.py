"""Losses of handwritten digits, as a user would write them."""

from __future__ import annotations

from typing import Any

import jax
import optax

import jaxdist


def scalar(module: Any, batch: Any) -> jax.Array:
    """The mean over rows, as most people would write it."""
    logits = module(batch["image"] / 255.0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def as_sum(module: Any, batch: Any) -> dict[str, jaxdist.Mean]:
    """The same with its weight."""
    logits, weight = module(batch["image"] / 255.0), batch["weight"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"loss": jaxdist.Mean((losses * weight).sum(), weight.sum())}
