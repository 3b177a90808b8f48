"""The scenario of a simulation: failures, and the speeds of workers and links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError

Chance = Annotated[float, Field(ge=0, lt=1)]
WorkerNumber = Annotated[int, Field(ge=0)]


class Straggler(Config):
    """A worker that is slow for a time."""

    worker: WorkerNumber
    """The number of the worker."""
    factor: PositiveFloat
    """The factor by which the time of the worker's steps is multiplied."""
    start_seconds: NonNegativeFloat = 0.0
    """The virtual time, in seconds, from which the worker is slow."""
    stop_seconds: NonNegativeFloat | None = None
    """The virtual time, in seconds, until which the worker is slow; null means until the end."""


class Crash(Config):
    """A worker that dies, and loses the changes that it has not sent yet."""

    worker: WorkerNumber
    """The number of the worker."""
    at_seconds: NonNegativeFloat
    """The virtual time, in seconds, at which the worker dies."""
    back_seconds: NonNegativeFloat | None = None
    """The virtual time, in seconds, at which the worker restarts, as a new client; null means
    never."""


class Pause(Config):
    """A server that accepts no messages for a time, and then continues with its state."""

    server: Annotated[int, Field(ge=0)]
    """The number of the server."""
    at_seconds: NonNegativeFloat
    """The virtual time, in seconds, at which the server stops."""
    back_seconds: NonNegativeFloat
    """The virtual time, in seconds, at which the server continues. Messages that arrive in the
    meantime are lost and sent again."""


class NetworkConfig(Config):
    """The network links between workers and servers."""

    bytes_per_second: PositiveFloat = 1.25e9
    """The bandwidth of a worker's network card, in bytes per second in each direction; the default
    is 10 Gbit/s."""
    server_bytes_per_second: PositiveFloat = 1.25e9
    """The bandwidth of a server's network card, in bytes per second in each direction."""
    latency_seconds: NonNegativeFloat = 1e-4
    """The latency from one network card to another, in seconds, in addition to the time for the
    bytes."""
    jitter_seconds: NonNegativeFloat = 0.0
    """The largest random latency, in seconds, which is drawn for each message, so that messages can
    overtake each other."""
    unevenness: NonNegativeFloat = 0.1
    """The standard deviation of the logarithm of a random factor on each message's weight. Messages
    that use a network card at the same time share its bandwidth in proportion to their weights."""
    loss: Chance = 0.0
    """The share of messages that do not arrive, from 0 to 1."""
    copies: Chance = 0.0
    """The share of messages that arrive twice, from 0 to 1."""
    retry_seconds: PositiveFloat = 0.2
    """The time, in seconds, from the loss of a message or a reply until the message is sent again.
    """


class SimulationConfig(Config):
    """The workers' speeds, the network and the failures; the same seed gives the same bits."""

    step_seconds: PositiveFloat | tuple[PositiveFloat, ...] = 0.1
    """The time, in seconds, for a gradient of an equal share of the batch: a number for all
    workers, or a list with a number for each worker."""
    noise: NonNegativeFloat = 0.0
    """The standard deviation of the logarithm of a step's time, drawn for each step."""
    stragglers: tuple[Straggler, ...] = ()
    """The workers that are slow for a time."""
    crashes: tuple[Crash, ...] = ()
    """The deaths of workers, each with its time."""
    pauses: tuple[Pause, ...] = ()
    """The pauses of servers, each with its time."""
    detect_seconds: NonNegativeFloat = 1.0
    """The time, in seconds, from a worker's death until the other workers no longer wait for it."""
    link: NetworkConfig = NetworkConfig()
    """The network links, and the faults of the network."""
    seconds: PositiveFloat | None = None
    """The virtual time, in seconds, that ends the run; null ends the run when all workers have
    taken their steps."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of noise, jitter, losses and duplicates."""

    def speeds(self, workers: int) -> tuple[float, ...]:
        """Return the seconds that each worker needs for a gradient.

        Raises:
          ConfigError: the list of step times does not have one entry for each worker.
        """
        times = self.step_seconds
        found = times if isinstance(times, tuple) else (times,) * workers
        if len(found) != workers:
            raise ConfigError(
                f"step_seconds has {len(found)} times for {workers} workers: give a single time, "
                "or a time for each worker",
                setting=("step_seconds",),
            )
        return found

    def check(self, workers: int, servers: int) -> None:
        """Refuse events of workers or servers that do not exist.

        Raises:
          ConfigError: an event is refused; the error names its setting.
        """
        self.speeds(workers)
        wanted = (("stragglers", "worker"), ("crashes", "worker"), ("pauses", "server"))
        most = {"worker": workers, "server": servers}
        for name, who in wanted:
            for number in (getattr(one, who) for one in getattr(self, name)):
                if number >= most[who]:
                    raise ConfigError(
                        f"{name}: there is no {who} {number}: {who}s are 0 to {most[who] - 1}",
                        setting=(name,),
                    )

    def paused_until(self, server: int, now: float) -> float | None:
        """Return the time at which a stopped server continues, or None if the server runs."""
        ends = (
            one.back_seconds
            for one in self.pauses
            if one.server == server and one.at_seconds <= now < one.back_seconds
        )
        return max(ends, default=None)

    def factor(self, worker: int, now: float) -> float:
        """Return the factor by which the time of a worker's step that begins now is multiplied."""
        found = 1.0
        for one in self.stragglers:
            stop = float("inf") if one.stop_seconds is None else one.stop_seconds
            if one.worker == worker and one.start_seconds <= now < stop:
                found *= one.factor
        return found


def shares_by_speed(step_seconds: Sequence[float], batch_size: int) -> tuple[int, ...]:
    """Return the shares of a batch that workers of unequal speed compute in about equal times.

    Args:
      step_seconds: for each worker, the seconds for one example.

    Raises:
      ConfigError: there are fewer examples than workers.

    >>> shares_by_speed([1.0, 1.0, 2.0], batch_size=10)
    (4, 4, 2)
    """
    workers = len(step_seconds)
    if batch_size < workers:
        raise ConfigError(
            f"a batch of {batch_size} examples leaves some of {workers} workers without examples: "
            f"set at least {workers} examples, or fewer workers"
        )
    rates = [1 / seconds for seconds in step_seconds]
    shares = [1] * workers
    for _ in range(batch_size - workers):
        first = min(range(workers), key=lambda at: ((shares[at] + 1) / rates[at], at))
        shares[first] += 1
    return tuple(shares)
