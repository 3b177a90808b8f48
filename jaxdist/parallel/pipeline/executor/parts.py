"""What the executor of a pipeline takes and gives: a model in three parts, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax


class Visit(NamedTuple):
    """One microbatch at one chunk.

    Attributes:
      rows: the microbatch; every stage has it.
      chunk: of the model, int32 scalar.
      key: of random layers, another for every visit; None is evaluation.
    """

    rows: Any
    chunk: jax.Array
    key: jax.Array | None


@dataclass(frozen=True)
class Parts:
    """A model in three parts, of which a stage runs those that it has.

    Attributes:
      embed: (shared, visit) to x, a pytree of floating arrays; the first chunk's input.
      blocks: (parameters of a chunk, x, visit) to the next x, of the same shapes and dtypes.
      head: (shared, x, visit) to (what is minimised, a scalar; a pytree of sums).
    """

    embed: Callable[[Any, Visit], Any]
    blocks: Callable[[Any, Any, Visit], Any]
    head: Callable[[Any, Any, Visit], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Specs:
    """How automatic mesh axes split what a stage holds: trees of `jax.sharding.PartitionSpec`.

    Attributes:
      chunk: of the parameters of a chunk, without the dim that counts a stage's chunks.
      x: of what goes from chunk to chunk, where it has rows, a sequence and embed.
    """

    chunk: Any
    shared: Any
    x: Any


class Found(NamedTuple):
    """What a step finds: the sums and the gradients of what is minimised, over all microbatches.

    Attributes:
      chunk_grads: of this stage's chunks; float32 or wider, as are those of the shared.
      shared_grads: the same on all stages.
      sums: the same on all stages.
    """

    chunk_grads: Any
    shared_grads: Any
    sums: Any
