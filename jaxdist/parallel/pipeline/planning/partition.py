"""The partition of a model's layers into chunks such that the slowest chunk is as fast as possible.

The search is dynamic programming over pairs of a number of chunks and a number of layers. A chunk
has any number of consecutive layers, at least one. The chunks with the embedding and the head get
fewer layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from jaxdist.columns import aligned

ROUNDING = 1e-9
"""The relative difference up to which two sums of times count as equal."""


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's layers, which are measured or estimated.

    All times must be in one unit, which may be any unit.

    Attributes:
      seconds: for each layer, the time of the forward and the backward pass of a microbatch.
      first_seconds: the time per microbatch of the embedding, which is in the first chunk.
      last_seconds: the time per microbatch of the head and the loss, which are in the last chunk.
    """

    seconds: Sequence[float]
    first_seconds: float = 0.0
    last_seconds: float = 0.0


@dataclass(frozen=True)
class Partition:
    """A division of a model's layers into chunks, with the costs of the chunks.

    Attributes:
      placement: the stage of each chunk.
      counts: for each chunk, the number of its layers.
      seconds: for each chunk, its time per microbatch, in the unit of `LayerCosts`.
      even_seconds: the time of the slowest chunk if the numbers of layers of any two chunks
        differed by at most 1.
      searched: whether a search found the division, so that no other division has a faster slowest
        chunk. Otherwise the caller gave the division.
    """

    placement: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    even_seconds: float
    searched: bool

    @property
    def bounds(self) -> tuple[int, ...]:
        """The bounds of the chunks: chunk c has the layers `bounds[c]` to `bounds[c + 1] - 1`."""
        return (0, *accumulate(self.counts))

    def explain(self) -> str:
        """Format the division as a table, followed by lines that compare it with other divisions.

        >>> print(partition(LayerCosts([1.0] * 6, last_seconds=2.0), placement=(0, 1)).explain())
        chunk  stage  layers   time
            0      0  0-3 (4)     4
            1      1  4-5 (2)     4
        slowest: chunk 0, 4; mean 4; even counts would give 5
        no other division into chunks has a faster slowest chunk
        """
        rows = [
            [str(chunk), str(stage), f"{low}-{high - 1} ({high - low})", f"{seconds:.4g}"]
            for chunk, (stage, (low, high), seconds) in enumerate(
                zip(self.placement, pairwise(self.bounds), self.seconds, strict=True)
            )
        ]
        lines = aligned(["chunk", "stage", "layers", "time"], rows, left=[2])
        near = max(self.seconds) * (1 - ROUNDING)
        slowest = next(chunk for chunk, time in enumerate(self.seconds) if time >= near)
        mean = sum(self.seconds) / len(self.seconds)
        lines.append(
            f"slowest: chunk {slowest}, {self.seconds[slowest]:.4g}; mean {mean:.4g}; even counts "
            f"would give {self.even_seconds:.4g}"
        )
        if self.searched:
            lines.append("no other division into chunks has a faster slowest chunk")
        return "\n".join(lines)


def partition(layers: LayerCosts, placement: Sequence[int]) -> Partition:
    """Divide layers into chunks such that the slowest chunk is as fast as possible.

    If several divisions have an equally fast slowest chunk, the most even of them is chosen. The
    search takes O(chunks * layers^2) steps.

    Args:
      layers: the costs of the layers, of which there are at least as many as chunks.
      placement: the stage of each chunk, from the schedule.

    >>> partition(LayerCosts([1.0] * 5 + [3.0]), placement=(0, 1)).counts
    (4, 2)
    """
    problem = _Problem(layers, len(placement))
    fastest = problem.search(float("inf"), np.maximum, lambda time: time)
    limit = max(problem.seconds(fastest)) * (1 + ROUNDING)
    # Among the fastest divisions, the division with the least sum of squared times is the most
    # even.
    return problem.result(placement, problem.search(limit, np.add, np.square), searched=True)


def weigh(layers: LayerCosts, placement: Sequence[int], counts: Sequence[int]) -> Partition:
    """Compute the costs of the chunks for given numbers of layers.

    Args:
      layers: the costs of the layers.
      placement: the stage of each chunk, from the schedule.
      counts: the number of layers of each chunk. The sum must be the number of all layers.

    >>> weigh(LayerCosts([1.0] * 5 + [3.0]), placement=(0, 1), counts=(3, 3)).seconds
    (3.0, 5.0)
    """
    assert sum(counts) == len(layers.seconds), (counts, len(layers.seconds))
    return _Problem(layers, len(placement)).result(placement, counts, searched=False)


class _Problem:
    """A search for the best division of layers into chunks, with cumulative sums of their times."""

    def __init__(self, layers: LayerCosts, chunks: int) -> None:
        self.size, self.chunks = len(layers.seconds), chunks
        assert self.size >= chunks, "see jaxdist.parallel.pipeline.planning.plan"
        self.sums = np.concatenate([[0.0], np.cumsum(np.asarray(layers.seconds, float))])
        self.extra = np.zeros(chunks)
        self.extra[0] += layers.first_seconds
        self.extra[-1] += layers.last_seconds

    def seconds(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the time of each chunk if the chunks have these numbers of layers."""
        return tuple((np.diff(self.sums[[0, *accumulate(counts)]]) + self.extra).tolist())

    def search(
        self,
        limit: float,
        combine: Callable[..., np.ndarray],
        value: Callable[[np.ndarray], np.ndarray],
    ) -> tuple[int, ...]:
        """Find the division that minimizes a combination of the costs of its chunks.

        Args:
          limit: the largest time of a chunk. Some division must be within the limit.
          combine: the function that combines the costs of two sets of chunks.
          value: the function from the times of chunks to their costs.

        Returns:
          The number of layers of each chunk.
        """
        best = np.full(self.size + 1, np.inf)
        best[0] = 0.0
        starts = np.zeros((self.chunks, self.size + 1), int)
        for chunk in range(self.chunks):
            found = np.full(self.size + 1, np.inf)
            left = self.chunks - 1 - chunk
            for high in range(chunk + 1, self.size - left + 1):
                low = np.arange(chunk, high)
                times = self.sums[high] - self.sums[low] + self.extra[chunk]
                total = combine(best[low], value(times))
                total[times > limit] = np.inf
                at = int(np.argmin(total))
                found[high], starts[chunk, high] = total[at], low[at]
            best = found
        bounds = [self.size]
        for chunk in reversed(range(self.chunks)):
            bounds.append(int(starts[chunk, bounds[-1]]))
        return tuple(high - low for low, high in pairwise(reversed(bounds)))

    def result(
        self, placement: Sequence[int], counts: Sequence[int], *, searched: bool
    ) -> Partition:
        more = self.size % self.chunks
        even = [self.size // self.chunks + (chunk < more) for chunk in range(self.chunks)]
        costs = self.seconds(counts), max(self.seconds(even))
        return Partition(tuple(placement), tuple(counts), *costs, searched)
