"""The checks of a run with parameter servers: sizes, shares of a batch, and imported optimizers.

The table of `jaxdist.validity` refuses combinations of settings that are invalid for all values.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxdist.config.importing import user_code
from jaxdist.errors import CompressionError, ConfigError, blamed
from jaxdist.optim.build import (
    ImportedOptimizerConfig,
    Optimizer,
)
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.notices import consistency_notices
from jaxdist.param_server.contract import vectors
from jaxdist.param_server.training.separable import check_separable, server_transform
from jaxdist.train.plan import check_batch
from jaxdist.train.strategy.contract import RunSettings
from jaxdist.trees import flatten_with_names


def ineffective_settings(cluster: Cluster, given: RunSettings) -> tuple[str, ...]:
    """Check the settings of a run; return a sentence about each setting that has no effect.

    Raises:
      ConfigError: values cannot be combined; the error has the setting's path in the complete
        config.
    """
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
    yield from consistency_notices(cluster.consistency, given.optim, cluster.clients)
    left = given.total_steps % cluster.local_steps
    if left:
        more = cluster.clocks(given.total_steps) * cluster.local_steps
        yield (
            f"strategy.consistency: workers push after every {cluster.local_steps} steps, so each "
            f"worker takes {more} steps instead of {given.total_steps} (train.steps)"
        )
    if cluster.codec is None and not cluster.error_feedback:
        yield (
            "strategy.error_feedback has no effect without strategy.codec: leave error_feedback "
            "out, or set codec"
        )


def peak(optimizer: Optimizer, total_steps: int) -> float:
    """Return the largest learning rate of a run."""
    rates = jax.vmap(optimizer.schedule)(jnp.arange(total_steps, dtype=jnp.int32))
    return float(jnp.max(jnp.asarray(rates)))


def _check_separable(given: RunSettings) -> None:
    optim = given.optim
    if isinstance(optim, ImportedOptimizerConfig):
        with blamed("optim", "path"), user_code(f"optim.path {optim.path}"):
            own = server_transform(optim, given.optimizer.schedule, given.params, given.dims)
            check_separable(own, given.params)
