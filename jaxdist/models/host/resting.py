"""Parameters that rest in the host's memory, and are copied to the device where they are used."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxdist.models.layers import Deferred
from jaxdist.trees import map_with_names
from jaxdist.types import Params, PyTree, Shardings


@partial(jax.tree_util.register_dataclass, data_fields=["resting", "probe"], meta_fields=[])
@dataclass(frozen=True)
class RestingParameter(Deferred):
    """A parameter in the host's memory, whose gradient is on the device.

    A gradient with respect to an array in the host's memory would be in that memory too. The loss
    is therefore differentiated with respect to a second array, the probe.

    Attributes:
      resting: the parameter in the host's memory.
      probe: zeros in the shape of the parameter, which are never read, or None for a parameter
        that is not trained.
    """

    resting: jax.Array
    probe: jax.Array | None

    @classmethod
    def whole(cls, several: Sequence[RestingParameter]) -> list[jax.Array]:
        """Copy parameters to the device; their gradients become gradients of the probes."""
        return [_copied(one.resting, one.probe) for one in several]

    def differentiated(self) -> PyTree:
        return self.probe

    def with_differentiated(self, part: PyTree) -> RestingParameter:
        return replace(self, probe=part)

    def carried(self) -> jax.Array:
        assert self.probe is not None, "a gradient of a trained parameter"
        return self.probe

    @property
    def copied(self) -> bool:
        return True


@jax.custom_vjp
def _copied(resting: jax.Array, probe: jax.Array | None) -> jax.Array:
    del probe
    return jax.device_put(resting, jax.memory.Space.Device)


def _copied_forward(resting: jax.Array, probe: jax.Array | None) -> tuple[jax.Array, None]:
    return _copied(resting, probe), None


def _copied_backward(_: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, cotangent


_copied.defvjp(_copied_forward, _copied_backward)


def deferred(params: Params, resting: Collection[str], frozen: Collection[str]) -> PyTree:
    """Replace each parameter in the host's memory by a placeholder that its first use copies.

    Args:
      params: the parameters of the model.
      resting: the names of the parameters in the host's memory.
      frozen: the names of the parameters that are not trained.
    """

    def placeholder(name: str, leaf: jax.Array) -> jax.Array | RestingParameter:
        if name not in resting:
            return leaf
        probe = None if name in frozen else jnp.zeros(leaf.shape, leaf.dtype)
        return RestingParameter(leaf, probe)

    return map_with_names(placeholder, params)


def constrained(params: Params, shardings: Shardings, resting: Collection[str]) -> PyTree:
    """Set the shardings of all parameters except those in the host's memory."""

    def constrain(name: str, leaf: jax.Array, sharding: Sharding) -> jax.Array:
        return leaf if name in resting else jax.lax.with_sharding_constraint(leaf, sharding)

    return map_with_names(constrain, params, shardings)
