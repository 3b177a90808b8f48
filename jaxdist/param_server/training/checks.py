"""Whether a config and parameter servers go together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxdist.config.importing import user_code
from jaxdist.errors import CompressionError, ConfigError, blamed
from jaxdist.optim.build import (
    ImportedOptimizerConfig,
    OptimConfig,
    Optimizer,
)
from jaxdist.optim.lamb import LAMB_RULES, LambConfig
from jaxdist.optim.onebit import OnebitConfig
from jaxdist.parallel.plan import ParallelConfig
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.notices import notices
from jaxdist.param_server.contract import vectors
from jaxdist.param_server.training.separable import check_separable, server_transform
from jaxdist.sharding import Layout
from jaxdist.train.plan import TrainConfig, check_batch
from jaxdist.train.strategy.contract import RunSettings
from jaxdist.trees import flatten_with_names


def check(cluster: Cluster, given: RunSettings) -> tuple[str, ...]:
    """Return the settings that do nothing with parameter servers, a sentence each.

    Raises:
      ConfigError: what does not go together, with the path of the setting in the whole config.
    """
    _check_parallel(given.parallel, given.layout)
    _check_train(given.train)
    _check_optimizer(given.optim)
    if given.optimizer.eval_params is not None:
        raise ConfigError(
            "this optimizer has other parameters evaluated than it trains, and what workers "
            "of strategy.type parameter_server evaluate are the trained ones: take another "
            "optimizer, or strategy.type: synchronous",
            setting=("optim",),
        )
    if given.buffers:
        raise ConfigError(
            f"the model keeps {given.buffers[0]} besides its parameters, which workers would "
            "each change for themselves: take a model without running statistics (layer norms "
            "in the place of batch norms), or strategy.type: synchronous",
            setting=("model",),
        )
    with blamed("strategy"):
        _check_batch(cluster, given)
        cluster.check_cluster(learning_rate=peak(given.optimizer, given.total_steps))
        cluster.placed(given.params, given.optim)
        _check_messages(cluster, given)
    _check_separable(given)
    return tuple(_notices(cluster, given))


def _check_batch(cluster: Cluster, given: RunSettings) -> None:
    train, size = given.train, given.train.batch_size
    for share in sorted(set(cluster.shares(size))):
        try:
            check_batch(share, train.microbatches_of(share), given.layout)
        except ValueError as error:
            raise ConfigError(
                f"a worker's share of {share} examples: {error}", setting=("workers",)
            ) from error


def _check_messages(cluster: Cluster, given: RunSettings) -> None:
    if cluster.codec is None:
        return
    whole = vectors(given.dims)
    for name, leaf in flatten_with_names(given.params):
        if name in whole:
            continue
        try:
            cluster.codec.check(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), name)
        except CompressionError as error:
            raise ConfigError(str(error), setting=("codec",)) from error


def _notices(cluster: Cluster, given: RunSettings) -> Iterator[str]:
    yield from notices(cluster.consistency, given.optim, cluster.clients)
    left = given.total_steps % cluster.local_steps
    if left:
        more = cluster.clocks(given.total_steps) * cluster.local_steps
        yield (
            f"strategy.consistency: workers push after every {cluster.local_steps} steps, so that "
            f"they take {more} rather than {given.total_steps} (train.steps)"
        )
    if cluster.codec is None and not cluster.error_feedback:
        yield "strategy.error_feedback has no effect without strategy.codec"


def peak(optimizer: Optimizer, total_steps: int) -> float:
    """The largest learning rate of a run."""
    rates = jax.vmap(optimizer.schedule)(jnp.arange(total_steps, dtype=jnp.int32))
    return float(jnp.max(jnp.asarray(rates)))


def _check_separable(given: RunSettings) -> None:
    optim = given.optim
    if isinstance(optim, LambConfig):
        clip = optim.max_grad_norm or LAMB_RULES[optim.variant].max_grad_norm
        if clip != "off" and math.isfinite(clip):
            raise ConfigError(
                f"optim.variant {optim.variant} clips the norm over all parameters to {clip:g}, "
                "and a server has its own alone: set max_grad_norm: off",
                setting=("optim", "max_grad_norm"),
            )
    if isinstance(optim, ImportedOptimizerConfig):
        with blamed("optim", "path"), user_code(f"optim.path {optim.path}"):
            own = server_transform(optim, given.optimizer.schedule, given.params, given.dims)
            check_separable(own, given.params)


def _check_parallel(parallel: ParallelConfig, layout: Layout) -> None:
    """What a worker's mesh may do: compute its gradient, on axes data and tensor."""
    for name in ("compression", "zero"):
        if getattr(parallel, name) != getattr(ParallelConfig(), name):
            instead = "strategy.codec" if name == "compression" else "strategy.servers"
            raise ConfigError(
                "with strategy.type parameter_server gradients go to servers, which hold the "
                f"optimizer's state: set parallel.{name} back to its default, and see {instead}",
                setting=("parallel", name),
            )
    if parallel.deterministic is not None:
        raise ConfigError(
            "with strategy.type parameter_server gradients are added up by servers, in the order "
            "of workers, and not by logical shard: set parallel.deterministic back to null (the "
            "order of what came is kept, and `jaxdist replay` has its bits)",
            setting=("parallel", "deterministic"),
        )
    for axis, size in layout.mesh.shape.items():
        kind = axis.removesuffix("_dcn").removesuffix("_ici")
        if size > 1 and kind not in ("data", "tensor"):
            raise ConfigError(
                f"mesh axis {kind} of {size} devices: with strategy.type parameter_server the mesh "
                "is one worker's, with axes data and tensor",
                setting=("mesh", kind),
            )


def _check_train(train: TrainConfig) -> None:
    for name in ("batch_ramp", "phases"):
        if getattr(train, name) is not None:
            raise ConfigError(
                f"{name} changes the batch within a run, and workers of strategy.type "
                "parameter_server have no step in common at which: leave it out",
                setting=("train", name),
            )
    if train.check_replicas is not None:
        raise ConfigError(
            "check_replicas compares devices that take every step together, and workers of "
            "strategy.type parameter_server hold other parameters than each other: leave it out",
            setting=("train", "check_replicas"),
        )


def _check_optimizer(optim: OptimConfig) -> None:
    reasons = {
        "clip_norm": "needs the norm over all parameters, and a server has its own alone: set "
        "null, or take lamb or lars, whose norms are of one tensor",
        "skip_spikes": "needs the norm over all parameters, and a server has its own alone: set "
        "null; pushes that hold a NaN or an infinity are dropped without it",
        "loss_scale": "would have to be the same on all workers: train in bfloat16 or float32",
        "master_weights": "is not there on servers, which hold float32 parameters: set null",
    }
    for name, reason in reasons.items():
        if getattr(optim, name) is not None:
            raise ConfigError(
                f"{name} with strategy.type parameter_server {reason}", setting=("optim", name)
            )
    if optim.skip_nonfinite:
        raise ConfigError(
            "skip_nonfinite has no effect with strategy.type parameter_server, whose servers drop "
            "pushes that hold a NaN or an infinity, and count them: set false",
            setting=("optim", "skip_nonfinite"),
        )
    if isinstance(optim, OnebitConfig):
        raise ConfigError(
            f"optim.type {optim.type} compresses what devices of one mesh exchange: take adamw or "
            "lamb, and strategy.codec: {type: sign}",
            setting=("optim", "type"),
        )
