"""The costs of a schedule's tasks: the input of simulation and of automatic schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.schedule import TaskKind

Times = float | Sequence[float]
"""A number for every chunk, or a number for each."""


@dataclass(frozen=True)
class Costs:
    """The costs of a chunk's tasks, in any common unit; a number, or a number for each chunk.

    Attributes:
      forward: time of a FORWARD task.
      backward_input: time of an INPUT task.
      backward_weight: time of a WEIGHT task.
      full: time of a FULL task, or None for the sum of its two halves.
      transfer: time of a message between chunk c and chunk c + 1, in either direction, where they
        are on different stages. The number of the last chunk is not used. Messages travel while
        stages work, and do not wait for each other.
      activation: memory that a microbatch's forward pass leaves for its backward pass.
      kept: the fraction of `activation` that an INPUT task leaves for the WEIGHT task.
    """

    forward: Times = 1.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0
    full: Times | None = None
    transfer: Times = 0.0
    activation: Times = 1.0
    kept: float = 1.0

    def durations(self, chunks: int) -> dict[TaskKind, tuple[float, ...]]:
        """Return the time of each kind of task by chunk.

        Raises:
          ConfigError: a list whose length is not the number of chunks, or a negative time.

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
        """Return the time of a message between each chunk and the next."""
        return _by_chunk(self.transfer, chunks, "transfer")

    def activations(self, chunks: int) -> tuple[float, ...]:
        """Return the size of a microbatch's activations by chunk."""
        return _by_chunk(self.activation, chunks, "activation")


def _by_chunk(times: Times, chunks: int, name: str) -> tuple[float, ...]:
    found = tuple(times) if isinstance(times, Sequence) else (times,) * chunks
    if len(found) != chunks:
        raise ConfigError(
            f"costs: {name} has {len(found)} times for {chunks} chunks: give one number, or one "
            "for each chunk"
        )
    for chunk, time in enumerate(found):
        if not 0 <= time < float("inf"):
            raise ConfigError(
                f"costs: {name} of chunk {chunk} is {time}: times and sizes are finite and not "
                "negative"
            )
    return found


Time = Annotated[float, Field(ge=0, le=1e12)]


class CostsConfig(Config):
    """`Costs` in a configuration: each entry is a number, or a list with a number per chunk."""

    forward: Time | tuple[Time, ...] = 1.0
    """Time of a forward task, in any unit."""
    backward_input: Time | tuple[Time, ...] = 1.0
    """Time of the input half of a backward task."""
    backward_weight: Time | tuple[Time, ...] = 1.0
    """Time of the weight half of a backward task."""
    transfer: Time | tuple[Time, ...] = 0.0
    """Time of a message from a chunk to the next, or back."""
    activation: Time | tuple[Time, ...] = 1.0
    """Memory that a forward task leaves for its backward task, in any unit."""
    kept: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of `activation` that the input half leaves for the weight half."""

    def costs(self) -> Costs:
        return Costs(**dict(self))
