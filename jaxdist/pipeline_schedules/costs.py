"""The costs of a schedule's tasks, for the simulation and for automatic schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.schedule import TaskKind

Times = float | Sequence[float]
"""A number for all chunks, or a sequence with a number for each chunk."""


@dataclass(frozen=True)
class Costs:
    """The times of tasks and messages, and the memory of activations.

    Each cost except `kept` is a number for all chunks or a sequence with a number for each chunk.
    All times have a common unit, and all amounts of memory have a common unit. Both units are
    arbitrary.

    Attributes:
      forward: the time of a FORWARD task.
      backward_input: the time of an INPUT task.
      backward_weight: the time of a WEIGHT task.
      full: the time of a FULL task, or None for the sum of the times of its two halves.
      transfer: the time of a message between chunk c and chunk c + 1, in either direction, if they
        are on different stages. The number for the last chunk is not used. Stages work while
        messages are sent, and messages do not wait for each other.
      activation: the memory that the forward pass of a microbatch keeps for the backward pass.
      kept: the fraction of `activation` that is still kept after the INPUT task, for the WEIGHT
        task.
    """

    forward: Times = 1.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0
    full: Times | None = None
    transfer: Times = 0.0
    activation: Times = 1.0
    kept: float = 1.0

    def durations(self, chunks: int) -> dict[TaskKind, tuple[float, ...]]:
        """Return the times of each kind of task, with a number for each chunk.

        Args:
          chunks: the number of chunks of the schedule.

        Raises:
          ConfigError: a sequence does not have a number for each chunk, or a time is negative.

        >>> Costs(forward=[1, 2]).durations(2)[TaskKind.FORWARD]
        (1, 2)
        """
        first = _by_chunk(self.backward_input, chunks, "backward_input")
        second = _by_chunk(self.backward_weight, chunks, "backward_weight")
        both = tuple(a + b for a, b in zip(first, second, strict=True))
        return {
            TaskKind.FORWARD: _by_chunk(self.forward, chunks, "forward"),
            TaskKind.INPUT: first,
            TaskKind.WEIGHT: second,
            TaskKind.FULL: both if self.full is None else _by_chunk(self.full, chunks, "full"),
        }

    def transfers(self, chunks: int) -> tuple[float, ...]:
        """Return the time of a message between each chunk and the next chunk."""
        return _by_chunk(self.transfer, chunks, "transfer")

    def activations(self, chunks: int) -> tuple[float, ...]:
        """Return the memory of a microbatch's activations in each chunk."""
        return _by_chunk(self.activation, chunks, "activation")


def _by_chunk(times: Times, chunks: int, name: str) -> tuple[float, ...]:
    found = tuple(times) if isinstance(times, Sequence) else (times,) * chunks
    if len(found) != chunks:
        raise ConfigError(
            f"costs: {name} has {len(found)} times for {chunks} chunks: give a single time, or a "
            "time for each chunk"
        )
    for chunk, time in enumerate(found):
        if not 0 <= time < float("inf"):
            raise ConfigError(
                f"costs: {name} of chunk {chunk} is {time}: times and sizes must be finite and not "
                "negative"
            )
    return found


Time = Annotated[float, Field(ge=0, le=1e12)]


class CostsConfig(Config):
    """The costs of a schedule's tasks: numbers, or lists with a number for each chunk."""

    forward: Time | tuple[Time, ...] = 1.0
    """The time of a forward task, in any unit, which is also the unit of the other times."""
    backward_input: Time | tuple[Time, ...] = 1.0
    """The time of the input half of a backward task."""
    backward_weight: Time | tuple[Time, ...] = 1.0
    """The time of the weight half of a backward task."""
    transfer: Time | tuple[Time, ...] = 0.0
    """The time of a message between a chunk and the next chunk, in either direction."""
    activation: Time | tuple[Time, ...] = 1.0
    """The memory that a forward task keeps for its backward task, in any unit."""
    kept: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The fraction of `activation` that is still kept after the input half, for the weight half."""

    def costs(self) -> Costs:
        return Costs(**dict(self))
