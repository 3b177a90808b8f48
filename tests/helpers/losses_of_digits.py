"""Losses on handwritten digits, in the form in which a user would write them."""

from __future__ import annotations

from typing import Any

import jax
import optax

import jaxdist


def scalar(module: Any, batch: Any) -> jax.Array:
    """Return the mean over rows as a scalar, as most people would write the loss."""
    logits = module(batch["image"] / 255.0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def as_sum(module: Any, batch: Any) -> dict[str, jaxdist.Mean]:
    """Return the same mean as a total with its weight."""
    logits, weight = module(batch["image"] / 255.0), batch["weight"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"loss": jaxdist.Mean((losses * weight).sum(), weight.sum())}
