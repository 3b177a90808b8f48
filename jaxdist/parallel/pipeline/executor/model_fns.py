"""The interface of a pipeline's executor: a model as three functions; gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from jaxdist.types import Grads, Params, PyTree, Specs

Activation: TypeAlias = Any
"""A chunk's input and output: a pytree of floating arrays, of the same shapes everywhere."""
Sums: TypeAlias = Any
"""The sums of the head besides the loss, over a batch, as `jaxdist.models.loss.Sums`."""


class Visit(NamedTuple):
    """A microbatch at a chunk.

    Attributes:
      rows: the microbatch; every stage has all of its rows.
      chunk: index of the chunk in the model, int32 scalar.
      key: random key for dropout and the like, different for every visit; None in evaluation.
      frozen: parameters without gradients, of the chunk, and of embedding and head.
    """

    rows: PyTree
    chunk: jax.Array
    key: jax.Array | None
    frozen: tuple[PyTree, PyTree] = ((), ())


@dataclass(frozen=True)
class ModelFns:
    """A model as three functions. The first stage runs `embed`, the last stage runs `head`.

    `shared` are the parameters of embedding and head, which may have some in common.

    Attributes:
      embed: function from (shared, visit) to the first chunk's input.
      blocks: function from (parameters of a chunk, x, visit) to the next x, with equal shapes and
        dtypes.
      head: function from (shared, x, visit) to (the scalar to minimise, sums).
    """

    embed: Callable[[Params, Visit], Activation]
    blocks: Callable[[Params, Activation, Visit], Activation]
    head: Callable[[Params, Activation, Visit], tuple[jax.Array, Sums]]


@dataclass(frozen=True)
class StageSpecs:
    """Partition specs of a stage's values over automatic mesh axes.

    Attributes:
      chunk: specs of a chunk's parameters, without the leading dim that counts a stage's chunks.
      shared: specs of the parameters of embedding and head.
      x: spec of the activations between chunks that have dims (rows, sequence, embed).
    """

    chunk: Specs
    shared: Specs
    x: PartitionSpec


class GradientsAndSums(NamedTuple):
    """Gradients of the minimised scalar, and sums, each over all microbatches.

    Attributes:
      chunk_grads: gradients of this stage's chunks, in float32 or wider.
      shared_grads: gradients of embedding and head, in float32 or wider; equal on all stages.
      sums: equal on all stages.
    """

    chunk_grads: Grads
    shared_grads: Grads
    sums: Sums
