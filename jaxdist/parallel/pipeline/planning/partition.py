"""The partition of a model's layers into chunks such that the slowest chunk is as fast as possible.

The search is dynamic programming over pairs of a number of chunks and a number of layers, and it
respects the memory of each stage. A chunk has any number of consecutive layers, at least one. The
chunks with the embedding and the head get fewer layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.check import live_microbatches
from jaxdist.pipeline_schedules.schedule import Schedule

ROUNDING = 1e-9
"""The relative difference up to which two sums, of times or of bytes, count as equal."""


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's layers, which are measured or estimated.

    All times must be in one unit, which may be any unit.

    Attributes:
      seconds: for each layer, the time of the forward and the backward pass of a microbatch.
      state_bytes: for each layer, the bytes of weights, gradients and optimizer state, or None if
        they are 0 for all layers.
      activation_bytes: for each layer, the bytes of a microbatch's activations that the backward
        pass needs, or None if they are 0 for all layers.
      first_seconds: the time per microbatch of the embedding, which is in the first chunk.
      last_seconds: the time per microbatch of the head and the loss, which are in the last chunk.
      first_bytes: the bytes of the embedding, its gradients and its optimizer state.
      last_bytes: the bytes of the head and the loss.
    """

    seconds: Sequence[float]
    state_bytes: Sequence[float] | None = None
    activation_bytes: Sequence[float] | None = None
    first_seconds: float = 0.0
    last_seconds: float = 0.0
    first_bytes: float = 0.0
    last_bytes: float = 0.0


@dataclass(frozen=True)
class Partition:
    """A division of a model's layers into chunks, with the costs of the chunks.

    Attributes:
      placement: the stage of each chunk.
      counts: for each chunk, the number of its layers.
      seconds: for each chunk, its time per microbatch, in the unit of `LayerCosts`.
      stage_bytes: for each stage, the bytes that its chunks need.
      cap_bytes: for each stage, the available bytes, or None without a limit.
      even_seconds: the time of the slowest chunk if the numbers of layers of any two chunks
        differed by at most 1.
      exact: whether the search proved that no other division within the memory has a faster slowest
        chunk. There is no proof, and the value is False, if the search had to limit each chunk of a
        stage to an equal part of the stage's memory. The value is None if the caller gave the
        division.
    """

    placement: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    stage_bytes: tuple[float, ...]
    cap_bytes: tuple[float, ...] | None
    even_seconds: float
    exact: bool | None

    @property
    def bounds(self) -> tuple[int, ...]:
        """The bounds of the chunks: chunk c has the layers `bounds[c]` to `bounds[c + 1] - 1`."""
        return (0, *accumulate(self.counts))

    def explain(self) -> str:
        """Format the division as a table, followed by lines that compare it with other divisions.

        >>> print(partition(LayerCosts([1.0] * 6, last_seconds=2.0), placement=(0, 1)).explain())
        chunk  stage  layers        time
            0      0  0-3 (4)       4
            1      1  4-5 (2)       4
        slowest: chunk 0, 4; mean 4; even counts would give 5
        no other division into chunks has a faster slowest chunk
        """
        return "\n".join([*self._table(), *self._reasons()])

    def _table(self) -> list[str]:
        lines = [f"{'chunk':>5}  {'stage':>5}  {'layers':<12}  time"]
        for chunk, (low, high) in enumerate(pairwise(self.bounds)):
            layers = f"{low}-{high - 1} ({high - low})"
            where = f"{chunk:>5}  {self.placement[chunk]:>5}"
            lines.append(f"{where}  {layers:<12}  {self.seconds[chunk]:.4g}")
        return lines

    def _reasons(self) -> list[str]:
        near = max(self.seconds) * (1 - ROUNDING)
        slowest = next(chunk for chunk, time in enumerate(self.seconds) if time >= near)
        mean = sum(self.seconds) / len(self.seconds)
        lines = [
            f"slowest: chunk {slowest}, {self.seconds[slowest]:.4g}; mean {mean:.4g}; even counts "
            f"would give {self.even_seconds:.4g}"
        ]
        if self.cap_bytes is not None:
            least, taken, cap, stage = min(
                (cap - taken, taken, cap, stage)
                for stage, (taken, cap) in enumerate(
                    zip(self.stage_bytes, self.cap_bytes, strict=True)
                )
            )
            lines.append(
                f"least free memory: stage {stage}, {least / 1e9:.4g} GB ({taken / 1e9:.4g} of "
                f"{cap / 1e9:.4g} GB used)"
            )
        if self.exact is None:
            return lines
        within = "" if self.cap_bytes is None else " within the memory"
        lines.append(
            f"no other division into chunks{within} has a faster slowest chunk"
            if self.exact
            else "stage memory is divided evenly among chunks: a faster division may exist"
        )
        return lines


def partition(
    layers: LayerCosts,
    placement: Sequence[int],
    *,
    cap_bytes: float | Sequence[float] | None = None,
    live: Sequence[float] | None = None,
) -> Partition:
    """Divide layers into chunks such that the slowest chunk is as fast as possible.

    If several divisions are equally fast, the result is the division whose chunk times are the most
    even.

    Args:
      layers: the costs of the layers.
      placement: the stage of each chunk, from the schedule.
      cap_bytes: the available bytes of all stages, as a number for every stage or a sequence with a
        number for each stage, or None without a limit.
      live: for each chunk, the maximum number of microbatches whose activations are in memory at
        the same time (`live_counts`), or None if it is 1 for all chunks.

    Raises:
      ConfigError: there are fewer layers than chunks, the costs have wrong lengths or are negative,
        or no division fits the memory.

    >>> partition(LayerCosts([1.0] * 5 + [3.0]), placement=(0, 1)).counts
    (4, 2)
    """
    problem = _Problem(layers, tuple(placement), live)
    caps = problem.caps(cap_bytes)
    counts = problem.cut(None)
    exact = True
    if caps is not None and not problem.fits(counts, caps):
        shared = np.bincount(placement)
        # The search limits the memory of single chunks, not of stages. Each chunk of a stage
        # therefore gets an equal part of the stage's memory.
        room = np.array([caps[s] / shared[s] for s in placement])
        counts, exact = problem.cut(room), bool((shared == 1).all())
        if counts is None:
            raise ConfigError(problem.no_room(caps))
    assert counts is not None, "without a cap there is always a cut"
    return problem.result(counts, caps, exact)


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
    return _Problem(layers, tuple(placement), None).result(tuple(counts), None, None)


def live_counts(schedule: Schedule) -> tuple[int, ...]:
    """Return the maximum number of microbatches whose activations each chunk holds at a time.

    >>> from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
    >>> live_counts(one_f_one_b(stages=3, microbatches=8))
    (3, 2, 1)
    """
    return tuple(
        max((len(live) for _, live in live_microbatches(schedule, chunk)), default=1)
        for chunk in range(schedule.chunks)
    )


class _Problem:
    """A search for the best division of layers into chunks, with cumulative sums of their costs."""

    def __init__(
        self, layers: LayerCosts, placement: tuple[int, ...], live: Sequence[float] | None
    ) -> None:
        self.layers, self.placement = layers, placement
        self.size, self.chunks = len(layers.seconds), len(placement)
        self.live = np.ones(self.chunks) if live is None else np.asarray(live, float)
        _check_input(layers, placement, self.live)
        zeros = [0.0] * self.size
        self.seconds = _sums(layers.seconds)
        self.state = _sums(zeros if layers.state_bytes is None else layers.state_bytes)
        self.activations = _sums(
            zeros if layers.activation_bytes is None else layers.activation_bytes
        )

    def caps(self, cap_bytes: float | Sequence[float] | None) -> tuple[float, ...] | None:
        stages = max(self.placement) + 1
        if cap_bytes is None:
            return None
        caps = tuple(cap_bytes) if isinstance(cap_bytes, Sequence) else (cap_bytes,) * stages
        if len(caps) != stages:
            raise ConfigError(
                f"partition: {len(caps)} memory caps for {stages} stages: give a single number, or "
                "a number for each stage"
            )
        return caps

    def chunk_seconds(self, chunk: int, low: np.ndarray, high: int) -> np.ndarray:
        """Return the time of a chunk with the layers l to `high` - 1, for each l in `low`."""
        extra = self.layers.first_seconds * (chunk == 0)
        extra += self.layers.last_seconds * (chunk == self.chunks - 1)
        return self.seconds[high] - self.seconds[low] + extra

    def chunk_bytes(self, chunk: int, low: np.ndarray, high: int) -> np.ndarray:
        extra = self.layers.first_bytes * (chunk == 0)
        extra += self.layers.last_bytes * (chunk == self.chunks - 1)
        kept = self.activations[high] - self.activations[low]
        return self.state[high] - self.state[low] + self.live[chunk] * kept + extra

    def cut(self, room: np.ndarray | None) -> tuple[int, ...] | None:
        """Return the number of layers of each chunk in the best division.

        Args:
          room: the available bytes of each chunk, or None without a limit.

        Returns:
          The numbers of layers, or None if no division fits.
        """
        slowest = self._search(room, float("inf"), np.maximum, lambda time: time)
        if slowest is None:
            return None
        limit = slowest[1] * (1 + ROUNDING)
        # Among the fastest divisions, the division with the least sum of squared times is the most
        # even.
        evenest = self._search(room, limit, np.add, np.square)
        assert evenest is not None, "the fastest cut is one of them"
        return evenest[0]

    def _search(
        self,
        room: np.ndarray | None,
        limit: float,
        combine: Callable[..., np.ndarray],
        value: Callable[[np.ndarray], np.ndarray],
    ) -> tuple[tuple[int, ...], float] | None:
        """Find the division that minimizes a combination of the costs of its chunks.

        Args:
          room: the available bytes of each chunk, or None without a limit.
          limit: the maximum time of a chunk.
          combine: the function that combines two costs: the maximum or the sum of two arrays.
          value: the function from the times of chunks to their costs.

        Returns:
          The number of layers of each chunk, and the combined cost; or None if no division fits.
        """
        best = np.full(self.size + 1, np.inf)
        best[0] = 0.0
        starts = np.zeros((self.chunks, self.size + 1), int)
        for chunk in range(self.chunks):
            found = np.full(self.size + 1, np.inf)
            left = self.chunks - 1 - chunk
            for high in range(chunk + 1, self.size - left + 1):
                low = np.arange(chunk, high)
                times = self.chunk_seconds(chunk, low, high)
                total = combine(best[low], value(times))
                total[times > limit] = np.inf
                if room is not None:
                    taken = self.chunk_bytes(chunk, low, high)
                    total[taken > room[chunk] * (1 + ROUNDING)] = np.inf
                at = int(np.argmin(total))
                found[high], starts[chunk, high] = total[at], low[at]
            best = found
        if not np.isfinite(best[-1]):
            return None
        bounds = [self.size]
        for chunk in reversed(range(self.chunks)):
            bounds.append(int(starts[chunk, bounds[-1]]))
        return tuple(high - low for low, high in pairwise(reversed(bounds))), float(best[-1])

    def stage_bytes(self, counts: Sequence[int]) -> tuple[float, ...]:
        found = [0.0] * (max(self.placement) + 1)
        for chunk, (low, high) in enumerate(pairwise((0, *accumulate(counts)))):
            found[self.placement[chunk]] += float(self.chunk_bytes(chunk, np.array(low), high))
        return tuple(found)

    def fits(self, counts: Sequence[int] | None, caps: Sequence[float]) -> bool:
        assert counts is not None, "without a cap there is always a cut"
        taken = self.stage_bytes(counts)
        return all(have <= cap * (1 + ROUNDING) for have, cap in zip(taken, caps, strict=True))

    def slowest(self, counts: Sequence[int]) -> tuple[float, ...]:
        bounds = pairwise((0, *accumulate(counts)))
        return tuple(
            float(self.chunk_seconds(chunk, np.array(low), high))
            for chunk, (low, high) in enumerate(bounds)
        )

    def result(
        self, counts: tuple[int, ...], caps: tuple[float, ...] | None, exact: bool | None
    ) -> Partition:
        more = self.size % self.chunks
        even = [self.size // self.chunks + (chunk < more) for chunk in range(self.chunks)]
        return Partition(
            placement=self.placement,
            counts=counts,
            seconds=self.slowest(counts),
            stage_bytes=self.stage_bytes(counts),
            cap_bytes=caps,
            even_seconds=max(self.slowest(even)),
            exact=exact,
        )

    def no_room(self, caps: Sequence[float]) -> str:
        everything = self.state[-1] + self.layers.first_bytes + self.layers.last_bytes
        return (
            f"partition: no division of {self.size} layers into {self.chunks} chunks fits the "
            f"memory. {len(caps)} stages have {sum(caps) / 1000000000.0:.4g} GB (the smallest "
            f"{min(caps) / 1000000000.0:.4g} GB), but the training state alone needs "
            f"{everything / 1000000000.0:.4g} GB. Each microbatch keeps "
            f"{self.activations[-1] / 1000000000.0:.4g} GB of activations, summed over all "
            f"layers, and up to {max(self.live):g} microbatches are kept at a time. Use more "
            "stages, recomputation, a schedule that keeps fewer activations, or smaller "
            "microbatches"
        )


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])


def _check_input(layers: LayerCosts, placement: tuple[int, ...], live: np.ndarray) -> None:
    size, chunks = len(layers.seconds), len(placement)
    if chunks < 1 or size < chunks:
        raise ConfigError(
            f"partition: {size} layers cannot fill {chunks} chunks: use at most {size} chunks "
            "(fewer stages, or fewer chunks per stage), or a deeper model"
        )
    for name in ("seconds", "state_bytes", "activation_bytes"):
        values = getattr(layers, name)
        if values is None:
            continue
        if len(values) != size:
            raise ConfigError(
                f"partition: {name} has {len(values)} numbers for {size} layers: give a number for "
                "each layer"
            )
        for layer, value in enumerate(values):
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    f"partition: {name} of layer {layer} is {value}: costs are finite and not "
                    "negative"
                )
    for name in ("first_seconds", "last_seconds", "first_bytes", "last_bytes"):
        value = getattr(layers, name)
        if not 0 <= value < float("inf"):
            raise ConfigError(f"partition: {name} is {value}: costs are finite and not negative")
    if len(live) != chunks:
        raise ConfigError(
            f"partition: live has {len(live)} numbers for {chunks} chunks: give a number for each "
            "chunk"
        )
