"""The train step with compressed gradients that the hosts of the lab time.

The step is written by hand, so that only the reduction differs between contenders. It trains a ReLU
network by plain gradient descent, with gradients reduced by `compressed_all_reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pydantic import TypeAdapter

from jaxdist.collectives.operations import XLA
from jaxdist.collectives.split import gather_leaves, scatter_leaves
from jaxdist.compression import (
    Codec,
    CodecConfig,
    PerParameter,
    compressed_all_reduce,
    init_state,
)
from jaxdist.compression.cost import shard_shapes
from jaxdist.types import Json, Params, PyTree

WIDTHS = (256, 1024, 1024, 256)
"""The widths of the layers: 1.57 million parameters."""
ROWS = 8
"""The rows of the batch of one host."""
LEARNING_RATE = 1e-2
_CODECS = TypeAdapter[Codec](CodecConfig)


@dataclass(frozen=True)
class Contender:
    """A way to reduce the gradients, which the bench times.

    Attributes:
      name: the name of its figure.
      codec: the codec as in a config, or None to send nothing, so that each host uses its own
        gradients.
      inside: whether to sum exactly inside a site first, and send encoded shards between sites.
    """

    name: str
    codec: Mapping[str, Json] | None
    inside: bool = False

    @property
    def choice(self) -> PerParameter | None:
        """The codec of each parameter: `codec` for matrices, none for vectors."""
        if self.codec is None:
            return None
        return PerParameter(otherwise=_CODECS.validate_python(dict(self.codec)))  # pyright: ignore


def first_params(widths: Sequence[int] = WIDTHS) -> Params:
    """Return float32 weights, drawn from the same seed as the weights of torch; biases are zero."""
    random = np.random.default_rng(0)
    return {
        f"layer{index}": {
            "kernel": (random.standard_normal((rows, columns)) / math.sqrt(rows)).astype("float32"),
            "bias": np.zeros(columns, "float32"),
        }
        for index, (rows, columns) in enumerate(pairwise(widths))
    }


def batch(host: int, rows: int, widths: Sequence[int] = WIDTHS) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of one host, equal to the inputs and targets of torch."""
    random = np.random.default_rng(1 + host)
    inputs = random.standard_normal((rows, widths[0])).astype("float32")
    return inputs, np.tanh(inputs[:, : widths[-1]])


def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean square of the error."""
    x, last = inputs, len(params) - 1
    for index in range(len(params)):
        layer = params[f"layer{index}"]
        x = x @ layer["kernel"] + layer["bias"][None]
        x = jax.nn.relu(x) if index < last else x
    return jnp.square(x - targets).mean()


class Training:
    """A contender's program and state on this host; a call takes steps and returns the loss."""

    def __init__(self, contender: Contender, mesh: Mesh, axes: tuple[str, str], rows: int):
        self._mesh, self._axes, self._contender = mesh, axes, contender
        own = batch(jax.process_index(), rows)
        self._batch = [self._placed(x, P(axes)) for x in own]
        params = jax.tree.map(lambda x: self._placed(x, P()), first_params())
        self._carry = (params, self._first_state(params))
        specs = (P(), P(axes))
        mapped = jax.shard_map(
            self._step,
            mesh=mesh,
            in_specs=(specs, P(axes), P(axes)),
            out_specs=(specs, P(axes)),
            check_vma=False,
        )
        lowered = jax.jit(mapped, donate_argnums=0).lower(self._carry, *self._batch)
        self._run = lowered.compile()

    def __call__(self, steps: int) -> float:
        """Take steps, and return the loss of this host before the last step."""
        value = None
        for _ in range(steps):
            self._carry, value = self._run(self._carry, *self._batch)
        assert value is not None
        return float(np.asarray(value.addressable_shards[0].data)[0])

    def _placed(self, x: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_process_local_data(NamedSharding(self._mesh, spec), x)

    def _first_state(self, params: Params) -> PyTree:
        choice = self._contender.choice
        if choice is None:
            return ()
        parties = self._mesh.shape[self._axes[0]] if self._contender.inside else self._mesh.size
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        if self._contender.inside:
            like = shard_shapes(like, self._mesh.shape[self._axes[1]])
        # A new state has an equal row for each host, and each host places its own row.
        state = init_state(like, parties, codec=choice)
        return jax.tree.map(lambda x: self._placed(np.asarray(x[:1]), P(self._axes)), state)

    def _step(self, carry: PyTree, inputs: jax.Array, targets: jax.Array) -> PyTree:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        grads, state = self._reduced(grads, state)
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        return (params, state), value[None]

    def _reduced(self, grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        choice = self._contender.choice
        if choice is None:
            return grads, state
        if not self._contender.inside:
            found = compressed_all_reduce(grads, state, self._axes, codec=choice, op="mean")
            return found.grads, found.state
        across, inside = self._axes
        count, (leaves, structure) = jax.lax.axis_size(inside), jax.tree.flatten(grads)
        dims = [0] * len(leaves)
        # Divided before the sum, as `compressed_all_reduce` averages over sites only.
        means = [leaf / count for leaf in leaves]
        shards = structure.unflatten(scatter_leaves(means, dims, inside, algorithm=XLA))
        found = compressed_all_reduce(shards, state, across, codec=choice, op="mean")
        summed = jax.tree.leaves(found.grads)
        whole = gather_leaves(summed, dims, inside, algorithm=XLA)
        return structure.unflatten(whole), found.state
