"""The communication and the memory of each architecture, read from compiled programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jaxdist.inspect.program import Inspection, inspect_step, open_subject
from jaxdist.inspect.servers import ServerCost
from jaxdist.simulation.review.settings import ReviewConfig
from jaxdist.trees import tree_size

MIXED = 16.0
"""The bytes for each parameter in mixed precision with Adam: 2 of parameters, 2 of gradients, 12 of
the optimizer's float32 state (ZeRO, arXiv 1910.02054, section 3.1)."""


@dataclass(frozen=True)
class Pattern:
    """The communication of a step and the state of a device, for an architecture.

    Attributes:
      axes: the mesh, as text.
      calls: the collectives of a device by kind and axes, with their number; for servers, the pulls
        and pushes of a worker.
      sent_bytes: the bytes that the busiest device sends in a step; with servers, the bytes that a
        worker sends on average.
      server_bytes: the bytes that the busiest server sends in a step, or None without servers.
      parameter_bytes: the bytes of all parameters, the unit of the table.
      state_bytes: the bytes of a device's parameters and optimizer state or, with servers, the
        bytes of the server with the largest state.
    """

    name: str
    axes: str
    calls: str
    sent_bytes: float
    server_bytes: float | None
    parameter_bytes: float
    state_bytes: float

    @property
    def sent(self) -> float:
        """The bytes sent in a step (see `sent_bytes`), in units of the bytes of all parameters."""
        return self.sent_bytes / self.parameter_bytes

    @property
    def state(self) -> float:
        """The bytes of a device's state, divided by the number of the model's parameters."""
        return 4 * self.state_bytes / self.parameter_bytes


def zero_bytes(stage: int, devices: int) -> float:
    """Return the bytes of state for each parameter on a device (ZeRO, section 5 and figure 1).

    >>> [zero_bytes(stage, 64) for stage in range(4)]
    [16.0, 4.1875, 2.21875, 0.25]
    """
    split = (0.0, 12.0, 14.0, 16.0)[stage]
    return MIXED - split + split / devices


def patterns(config: ReviewConfig) -> Iterator[Pattern]:
    """Compile the program with the settings of each pattern, and yield the patterns.

    Raises:
      JaxdistError: the program cannot be built or compiled with some settings.
    """
    for name, overrides in config.patterns.items():
        subject = open_subject(config.program_file, overrides)
        size = 4.0 * tree_size(subject.experiment.program.model.params)
        yield _pattern(name, inspect_step(subject), size)


def _pattern(name: str, found: Inspection, size: float) -> Pattern:
    axes = " x ".join(f"{axis} {count}" for axis, count in found.ledger.axes.items())
    if found.worker is not None:
        servers = found.worker.servers
        pushed = sum(one.received_bytes for one in servers) / _clients(servers)
        calls = f"{len(servers)} pulls, {len(servers)} pushes"
        busiest = max(one.sent_bytes for one in servers)
        held = max(one.parameter_bytes + one.optimizer_bytes for one in servers)
        return Pattern(name, f"{len(servers)} servers", calls, pushed, busiest, size, held)
    held = found.arguments["parameters"] + found.arguments["optimizer state"]
    return Pattern(name, axes, _calls(found), _sent(found), None, size, held)


def _clients(servers: tuple[ServerCost, ...]) -> float:
    """Return the number of clients; each client pulls a server's parameters once."""
    return servers[0].sent_bytes / servers[0].parameter_bytes


def _sent(found: Inspection) -> float:
    return sum(one.times_high * one.sent_bytes for one in found.ledger.collectives)


def _calls(found: Inspection) -> str:
    """Return the collectives by kind, with their axes if the mesh has several."""
    counted: Counter[str] = Counter()
    several = len(found.ledger.axes) > 1
    for one in found.ledger.collectives:
        over = f" over {' x '.join(one.axes)}" if several and one.axes else ""
        counted[f"{one.kind}{over}"] += one.times_high
    return ", ".join(f"{count} {what}" for what, count in sorted(counted.items())) or "none"
