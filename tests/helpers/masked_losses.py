"""Losses of a language model that leave out some targets, in the form in which users write them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import Mean

IGNORED = 63
"""The token whose targets do not count in the loss."""
COUNTS = (7, 1, 8, 0, 8, 8, 8, 8, 0, 0, 0, 0, 1, 0, 0, 8)
"""The numbers of targets that count, by row: unequal in any two shards, and 0 in some shards."""


def _nats_and_valid(module: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    targets = batch["tokens"][:, 1:]
    logits = module(batch["tokens"][:, :-1], batch["segments"])[..., : IGNORED + 1]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return nats, (targets != IGNORED).astype(jnp.float32)


def as_sum(module: Any, batch: Any) -> dict[str, Mean]:
    """Return the total loss of the targets that count, with their number as the weight."""
    nats, valid = _nats_and_valid(module, batch)
    weight = batch["weight"][:, None] * valid
    return {"loss": Mean((nats * weight).sum(), weight.sum())}


def with_penalty(module: Any, batch: Any) -> dict[str, Mean]:
    """Return the loss of `as_sum` plus a penalty on a parameter, multiplied by the weight."""
    fit = as_sum(module, batch)["loss"]
    penalty = jnp.square(module.embedding[...]).sum()
    return {"loss": Mean(fit.total + fit.weight * penalty, fit.weight)}


def as_scalar(module: Any, batch: Any) -> jax.Array:
    """Return the mean loss of the targets that count, as a scalar."""
    nats, valid = _nats_and_valid(module, batch)
    return (nats * valid).sum() / valid.sum()


def tokens_with(counts: tuple[int, ...], length: int) -> np.ndarray:
    """Return tokens int32 `[len(counts), length + 1]`; row i has `counts[i]` targets that count."""
    drawn = np.random.default_rng(0).integers(0, IGNORED, (len(counts), length + 1))
    places = np.arange(length + 1)[None]
    return np.where(places <= np.array(counts)[:, None], drawn, IGNORED).astype(np.int32)


def with_norm_of_all(module: Any, batch: Any) -> dict[str, Mean]:
    """Return the loss of `as_sum` plus a penalty that reads all parameters first."""
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    penalty = sum(jnp.square(leaf).sum() for leaf in leaves)
    fit = as_sum(module, batch)["loss"]
    return {"loss": Mean(fit.total + fit.weight * penalty, fit.weight)}


def with_norms_of_modules(module: Any, batch: Any) -> dict[str, Mean]:
    """Return the loss of `as_sum` plus a penalty on the scales that `nnx.iter_modules` finds.

    In an object that is not a module, `nnx.iter_modules` finds no scale.
    """
    fit = as_sum(module, batch)["loss"]
    found = [node for _, node in nnx.iter_modules(module) if hasattr(node, "scale")]
    penalty = sum((jnp.square(node.scale[...]).sum() for node in found), start=jnp.float32(0))
    return {"loss": Mean(fit.total + fit.weight * penalty, fit.weight)}


def with_sums_of_its_own(module: Any, batch: Any) -> dict[str, Mean]:
    """Return the loss of `as_sum`, whose total the loss itself adds up over the devices."""
    fit = as_sum(module, batch)["loss"]
    return {"loss": Mean(jax.lax.psum(fit.total, "data"), fit.weight)}
