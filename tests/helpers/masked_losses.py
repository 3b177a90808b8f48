"""Losses of a language model that leave out some targets, as a user would write them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import Mean

IGNORED = 63
"""The target that does not count."""
COUNTS = (7, 1, 8, 0, 8, 8, 8, 8, 0, 0, 0, 0, 1, 0, 0, 8)
"""Targets that count, by row: unequal in any microbatch and shard, and none in a quarter."""


def _nats_and_valid(module: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    targets = batch["tokens"][:, 1:]
    logits = module(batch["tokens"][:, :-1], batch["segments"])[..., : IGNORED + 1]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return nats, (targets != IGNORED).astype(jnp.float32)


def as_sum(module: Any, batch: Any) -> dict[str, Mean]:
    """The total of all targets that count, and their number."""
    nats, valid = _nats_and_valid(module, batch)
    weight = batch["weight"][:, None] * valid
    return {"loss": Mean((nats * weight).sum(), weight.sum())}


def with_penalty(module: Any, batch: Any) -> dict[str, Mean]:
    """The same, and a penalty on a parameter, once for each unit of weight."""
    fit = as_sum(module, batch)["loss"]
    penalty = jnp.square(module.embedding[...]).sum()
    return {"loss": Mean(fit.total + fit.weight * penalty, fit.weight)}


def as_scalar(module: Any, batch: Any) -> jax.Array:
    """The mean of the targets that count."""
    nats, valid = _nats_and_valid(module, batch)
    return (nats * valid).sum() / valid.sum()


def tokens_with(counts: tuple[int, ...], length: int) -> np.ndarray:
    """Tokens int32 `[len(counts), length + 1]` of which each row has so many targets that count."""
    drawn = np.random.default_rng(0).integers(0, IGNORED, (len(counts), length + 1))
    places = np.arange(length + 1)[None]
    return np.where(places <= np.array(counts)[:, None], drawn, IGNORED).astype(np.int32)


def with_norm_of_all(module: Any, batch: Any) -> dict[str, Mean]:
    """The same, and a penalty on all parameters, which reads them before it calls the model."""
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    penalty = sum(jnp.square(leaf).sum() for leaf in leaves)
    fit = as_sum(module, batch)["loss"]
    return {"loss": Mean(fit.total + fit.weight * penalty, fit.weight)}


def with_norms_of_modules(module: Any, batch: Any) -> dict[str, Mean]:
    """The same by a walk over the modules, which finds none in what is no module."""
    fit = as_sum(module, batch)["loss"]
    found = [node for _, node in nnx.iter_modules(module) if hasattr(node, "scale")]
    penalty = sum((jnp.square(node.scale[...]).sum() for node in found), start=jnp.float32(0))
    return {"loss": Mean(fit.total + fit.weight * penalty, fit.weight)}


def with_sums_of_its_own(module: Any, batch: Any) -> dict[str, Mean]:
    """The same, added up over the devices by the user."""
    fit = as_sum(module, batch)["loss"]
    return {"loss": Mean(jax.lax.psum(fit.total, "data"), fit.weight)}
