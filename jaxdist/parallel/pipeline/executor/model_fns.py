"""The types of the arguments and results of a pipeline's executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxdist.types import Grads, Params, PyTree, Specs

Activation: TypeAlias = Any
"""A chunk's input or output: a pytree of floating arrays, with the same shapes for all chunks."""
Sums: TypeAlias = Any
"""The sums of loss and metrics that the head returns, a `jaxdist.models.loss.Sums`."""


class Visit(NamedTuple):
    """A pass of a microbatch through a chunk.

    Attributes:
      rows: the microbatch, with all of its rows on every stage.
      chunk: the index of the chunk in the model, an int32 scalar.
      key: the random key for random layers such as dropout, different for every visit, or None in
        evaluation.
      frozen: a pair. The first element has the frozen parameters and the buffers of the chunk, and
        the second has the frozen parameters of embedding and head.
    """

    rows: PyTree
    chunk: jax.Array
    key: jax.Array | None
    frozen: tuple[PyTree, PyTree] = ((), ())


@dataclass(frozen=True)
class ModelFns:
    """A model as three functions.

    The stage of the first chunk runs `embed`, and the stage of the last chunk runs `head`. The
    argument `shared` has the parameters of embedding and head, which may have parameters in common.
    The argument `visit`, a `Visit`, describes the pass of a microbatch through a chunk.

    Attributes:
      embed: the function from (shared, visit) to the input of the first chunk.
      blocks: the function from (parameters of a chunk, input x of the chunk, visit) to the output
        of the chunk, which has the shapes and dtypes of x.
      head: the function from (shared, output of the last chunk, visit) to (the scalar to minimize,
        sums).
    """

    embed: Callable[[Params, Visit], Activation]
    blocks: Callable[[Params, Activation, Visit], Activation]
    head: Callable[[Params, Activation, Visit], tuple[jax.Array, Sums]]


@dataclass(frozen=True)
class StageSpecs:
    """The partition specs of a stage's values over auto mesh axes.

    Attributes:
      chunk: the specs of a chunk's parameters, without the first dim, which counts the chunks of a
        stage.
      shared: the specs of the parameters of embedding and head.
      x: the spec of activations between chunks, for leaves with the dims (rows, sequence, embed),
        or a tree with the spec of each leaf.
    """

    chunk: Specs
    shared: Specs
    x: Specs


class GradientsAndSums(NamedTuple):
    """The gradients and the sums of a batch, added up over all microbatches.

    Attributes:
      chunk_grads: the gradients of this stage's chunks, in float32 or wider.
      shared_grads: the gradients of embedding and head, in float32 or wider, equal on all stages.
      sums: the sums of the head, equal on all stages.
    """

    chunk_grads: Grads
    shared_grads: Grads
    sums: Sums
