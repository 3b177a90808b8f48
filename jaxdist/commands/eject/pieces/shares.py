"""Step: each device computes on its own rows; messages around a ring sum the gradients."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.ring import DEVICES, all_gather, reduce_scatter

PARAMS = dict[Any, Any](embedding=P("data"))  # sharding of the parameters


def scatter(x: jax.Array, dim: int) -> jax.Array:  #: apart
    """Return this device's share, along `dim`, of the sum of x over all devices."""
    rows = jnp.moveaxis(x, dim, 0)
    return jnp.moveaxis(reduce_scatter(rows.reshape(DEVICES, -1, *rows.shape[1:])), 0, dim)


def gather(share: jax.Array, dim: int) -> jax.Array:
    """Return the whole of a tensor of which each device has a share along `dim`."""
    blocks = all_gather(jnp.moveaxis(share, dim, 0))
    return jnp.moveaxis(blocks.reshape(-1, *blocks.shape[2:]), 0, dim)


def whole(shares: Any, specs: Any, scanned: int = 0) -> Any:  #: ring3
    """Gather parameters where they are used; a scan has taken off their first `scanned` dims.

    The backward pass transposes each message, which sums the gradient into the devices' shares.
    """

    def one(share: jax.Array, spec: P) -> jax.Array:
        return gather(share, [*spec].index("data") - scanned) if "data" in [*spec] else share

    return jax.tree.map(one, shares, specs)
