"""The types that a pipeline's executor takes and returns: a model as three functions, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from jaxdist.types import Grads, Params, PyTree, Specs

Activation: TypeAlias = Any
"""A chunk's input or output: a pytree of floating arrays, with the same shapes for all chunks."""
Sums: TypeAlias = Any
"""The sums that the head returns besides the loss, in the form of `jaxdist.models.loss.Sums`."""


class Visit(NamedTuple):
    """The visit of a microbatch to a chunk.

    Attributes:
      rows: the microbatch, with all of its rows on every stage.
      chunk: index of the chunk in the model, int32 scalar.
      key: random key for random layers such as dropout, different for every visit, or None in
        evaluation.
      frozen: the frozen parameters of the chunk, and those of embedding and head.
    """

    rows: PyTree
    chunk: jax.Array
    key: jax.Array | None
    frozen: tuple[PyTree, PyTree] = ((), ())


@dataclass(frozen=True)
class ModelFns:
    """A model as three functions. The first stage runs `embed`, the last stage runs `head`.

    The argument `shared` has the parameters of embedding and head; both may use the same parameter.

    Attributes:
      embed: function from (shared, visit) to the first chunk's input.
      blocks: function from (parameters of a chunk, its input x, visit) to the chunk's output, with
        the shapes and dtypes of x.
      head: function from (shared, x, visit) to (the scalar to minimise, sums).
    """

    embed: Callable[[Params, Visit], Activation]
    blocks: Callable[[Params, Activation, Visit], Activation]
    head: Callable[[Params, Activation, Visit], tuple[jax.Array, Sums]]


@dataclass(frozen=True)
class StageSpecs:
    """The partition specs of a stage's values over automatic mesh axes.

    Attributes:
      chunk: specs of a chunk's parameters, without the leading dim that counts a stage's chunks.
      shared: specs of the parameters of embedding and head.
      x: spec of those activations between chunks that have dims (rows, sequence, embed).
    """

    chunk: Specs
    shared: Specs
    x: PartitionSpec


class GradientsAndSums(NamedTuple):
    """The gradients of the minimised scalar, and the head's sums, over all microbatches.

    Attributes:
      chunk_grads: gradients of this stage's chunks, in float32 or wider.
      shared_grads: gradients of embedding and head, in float32 or wider; equal on all stages.
      sums: sums of the head; equal on all stages.
    """

    chunk_grads: Grads
    shared_grads: Grads
    sums: Sums
