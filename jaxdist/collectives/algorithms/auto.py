"""The algorithm `Auto`, which runs each call by the algorithm with the least predicted time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import jax
from pydantic import NonNegativeFloat, PositiveFloat

from jaxdist.collectives.algorithms.double_tree import DoubleTree
from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.algorithms.hierarchical import Hierarchical
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.tree import Tree
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.axis import Axis, CollectiveError, axis_size, names
from jaxdist.collectives.contract import Algorithm, Combine, Operation, Size, Traffic
from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.columns import aligned
from jaxdist.config.schema import Config
from jaxdist.mesh import DCN
from jaxdist.runtime.hardware import Link, Topology, find_device
from jaxdist.trees import leaf_bytes

FLAT: tuple[Algorithm, ...] = (
    Xla(),
    Ring(),
    Ring(directions=2),
    Tree(),
    DoubleTree(),
    Halving(),
)
"""The algorithms from which `Auto` chooses for any axis. If two algorithms have equal predicted
times, `Auto` chooses the algorithm that is earlier in this tuple."""
HIERARCHICAL: tuple[Algorithm, ...] = tuple(
    Hierarchical(inside=inside, across=across)
    for inside in (Ring(directions=2), Halving())
    for across in (Ring(directions=2), Halving())
)
"""The additional algorithms from which `Auto` chooses if a collective has several axes. `Auto`
prefers an algorithm in `FLAT` that has an equal predicted time."""


class LinkConfig(Config):
    """The speed of a network's links, which replaces the known speed of the device's links."""

    latency_seconds: NonNegativeFloat
    """The time from the start of a message until its first byte arrives, in seconds."""
    bytes_per_second: PositiveFloat
    """The number of bytes per second in one direction, through one port of the device."""
    topology: Topology = "switch"
    """The topology of the links. A switch joins all devices. A torus joins neighbors only, and a
    device sends in both directions at the same time."""

    def link(self) -> Link:
        """Convert the config to a `Link`, the type that `cost.py` uses."""
        return Link(self.latency_seconds, self.bytes_per_second, self.topology)


@dataclass(frozen=True)
class Candidate:
    """An algorithm from which `Auto` can choose for a call of a collective.

    Attributes:
      algorithm: the algorithm that would run the call.
      seconds: the predicted time of the call, in seconds.
    """

    algorithm: Algorithm
    seconds: float


class Auto(Algorithm):
    """The algorithm that `cost.predict_seconds` predicts to be fastest, chosen for each call.

    The choice is made when a program is traced. The choice depends only on the operation, the
    number of bytes, and the sizes and links of the axes. Nothing is measured, so all processes make
    the same choice. `explain` shows the predictions. The chosen algorithm determines the order of
    summation.
    """

    type: Literal["auto"] = "auto"
    """The name that selects this algorithm in a config."""
    device: str | None = None
    """The device whose links are assumed (v5e, h100, ...); null means the device of the program."""
    fast: LinkConfig | None = None
    """The link of fast axes; null means the link that jaxdist knows for the device."""
    slow: LinkConfig | None = None
    """The link of slow axes; null means the link that jaxdist knows for the device."""
    slow_axes: tuple[str, ...] | None = None
    """The slow axes, between slices or hosts; null means the axes whose names end in `_dcn`."""
    xla: bool = True
    """Whether the collectives of XLA are among the algorithms to choose from."""

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        return self._chosen("all_reduce", flat, axis).all_reduce(flat, axis, combine)

    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        return self._chosen("reduce_scatter", blocks, axis).reduce_scatter(blocks, axis, combine)

    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        chosen = self.choose_here("all_gather", leaf_bytes(block) * axis_size(axis), axis)
        return chosen.all_gather(block, axis)

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        return self._chosen("broadcast", flat, axis).broadcast(flat, axis, root)

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        return self._chosen("reduce", flat, axis).reduce(flat, axis, root, combine)

    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        return self._chosen("all_to_all", blocks, axis).all_to_all(blocks, axis)

    def choose(self, kind: Operation, payload_bytes: float, levels: Sequence[Level]) -> Algorithm:
        """Return the algorithm with the least predicted time.

        Args:
          kind: the name of the operation, such as "all_reduce".
          payload_bytes: the bytes of the whole tensor on one device, as in `Algorithm.traffic`.
          levels: the size and link of each axis. The axis across the slowest network comes first.

        Returns:
          The fastest algorithm, or the first of several equally fast algorithms.
        """
        found = self.candidates(kind, payload_bytes, levels)
        return min(found, key=attrgetter("seconds")).algorithm

    def candidates(
        self, kind: Operation, payload_bytes: float, levels: Sequence[Level]
    ) -> list[Candidate]:
        """Return all algorithms from which `choose` chooses, with their predicted times.

        The arguments are those of `choose`.
        """
        several = sum(level.size > 1 for level in levels) > 1
        return [
            Candidate(algorithm, predict_seconds(algorithm, kind, payload_bytes, levels))
            for algorithm in (*FLAT, *(HIERARCHICAL if several else ()))
            if self.xla or not isinstance(algorithm, Xla)
        ]

    def choose_here(self, kind: Operation, payload_bytes: float, axis: Axis) -> Algorithm:
        """Return the algorithm with the least predicted time on the mesh of the `jax.shard_map`.

        Args:
          kind: the name of the operation, such as "all_reduce".
          payload_bytes: the bytes of the whole tensor on one device, as in `Algorithm.traffic`.
          axis: the axis of the collective.
        """
        sizes = {name: axis_size(name) for name in names(axis)}
        return self.choose(kind, payload_bytes, self.levels(sizes, here_kind()))

    def levels(self, sizes: Mapping[str, int], kind: str) -> tuple[Level, ...]:
        """Return the size and link of each axis.

        Args:
          sizes: the size of each axis by name. The axis across the slowest network comes first.
          kind: the device, as a short name or a `device_kind`. The argument is ignored if the
            setting `device` is not None.

        Raises:
          CollectiveError: a link is neither configured nor known for the device.
        """
        return tuple(Level(size, self._link(name, kind)) for name, size in sizes.items())

    def explain(
        self, kind: Operation, payload_bytes: float, sizes: Mapping[str, int], on: str
    ) -> str:
        """Format the assumed links of a call, and a table of the algorithms, the fastest first.

        Args:
          kind: the name of the operation, such as "all_reduce".
          payload_bytes: the bytes of the whole tensor on one device.
          sizes: the size of each axis by name. The axis across the slowest network comes first.
          on: the device, as a short name or a `device_kind`. The argument is ignored if the
            setting `device` is not None.

        >>> link = LinkConfig(latency_seconds=1e-5, bytes_per_second=1e9)
        >>> print(Auto(fast=link).explain("all_reduce", 4096, {"data": 8}, on="cpu"))
        ... # doctest: +ELLIPSIS
        all_reduce of 4096 bytes on {data: 8}
          data: 10 us latency, 1 GB/s, switch
        ...
        """
        levels = self.levels(sizes, on)
        found = sorted(self.candidates(kind, payload_bytes, levels), key=attrgetter("seconds"))
        lines = described_levels(f"{kind} of {payload_bytes:.0f} bytes", sizes, levels)
        rows = [
            _row(candidate, found[0], kind, payload_bytes, [*sizes.values()]) for candidate in found
        ]
        header = ("predicted", "of best", "steps", "sent bytes", "algorithm")
        return "\n".join([*lines, *aligned(header, rows, left=[-1])])

    def _chosen(self, kind: Operation, x: jax.Array, axis: Axis) -> Algorithm:
        return self.choose_here(kind, leaf_bytes(x), axis)

    def _link(self, axis: str, kind: str) -> Link:
        slow = axis.endswith(DCN) if self.slow_axes is None else axis in self.slow_axes
        configured = self.slow if slow else self.fast
        if configured is not None:
            return configured.link()
        figures = find_device(self.device or kind)
        if figures is None:
            field = "slow" if slow else "fast"
            raise CollectiveError(
                f"algorithm auto does not know the links of the device {self.device or kind!r} for "
                f"axis {axis!r}: set `device` to a known device (v5e, h100, cpu, ...), or describe "
                f"the link as `{field}: {{latency_seconds: ..., bytes_per_second: ...}}`"
            )
        return figures.slow if slow else figures.fast

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        return self.traffic(kind, payload_bytes, (size,))

    def traffic(self, kind: Operation, payload_bytes: float, size: Size) -> Traffic:
        """Compute the cost of a call with the algorithm that `Auto` chooses.

        The last axis is assumed to be fast, and the other axes to be slow. If the setting `device`
        is None, the links of jax's first device are assumed.
        """
        *slow, fast = size if isinstance(size, tuple) else (size,)
        sizes = {f"{index}{DCN}": count for index, count in enumerate(slow)} | {"fast": fast}
        levels = self.levels(sizes, jax.devices()[0].device_kind)
        return self.choose(kind, payload_bytes, levels).traffic(kind, payload_bytes, size)


def here_kind() -> str:
    """Return the `device_kind` of the devices for which a program is being traced."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def described_levels(what: str, sizes: Mapping[str, int], levels: Sequence[Level]) -> list[str]:
    """Return lines that describe a call: its message and axes, then the link of each axis.

    Args:
      what: a description of the message.
      sizes: the size of each axis by name.
      levels: the size and link of each axis, in the order of `sizes`.
    """
    shown = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    lines = [f"{what} on {{{shown}}}"]
    for name, level in zip(sizes, levels, strict=True):
        link = level.link
        lines.append(
            f"  {name}: {link.latency_seconds * 1e6:g} us latency, "
            f"{link.bytes_per_second / 1e9:g} GB/s, {link.topology}"
        )
    return lines


def label(algorithm: Config) -> str:
    """Format an algorithm, or another section of a config, as YAML without default values.

    >>> label(Ring(directions=2)), label(Xla())
    ('{type: ring, directions: 2}', '{type: xla}')
    """
    shown = []
    for name, field in type(algorithm).model_fields.items():
        value = getattr(algorithm, name)
        if name == "type":
            shown.insert(0, f"type: {value}")
        elif value != field.get_default(call_default_factory=True):
            text = label(value) if isinstance(value, Config) else value
            shown.append(f"{name}: {'null' if text is None else text}")
    return "{" + ", ".join(shown) + "}"


def _row(
    candidate: Candidate,
    best: Candidate,
    kind: Operation,
    payload_bytes: float,
    sizes: Sequence[int],
) -> tuple[str, ...]:
    traffic = candidate.algorithm.traffic(kind, payload_bytes, tuple(sizes))
    own = isinstance(candidate.algorithm, Xla)
    over = candidate.seconds / best.seconds if best.seconds else 1.0
    return (
        f"{candidate.seconds * 1e6:.1f} us",
        f"{over:.2f}x",
        "" if own else f"{traffic.steps}",
        f"{traffic.sent_bytes:.0f}",
        label(candidate.algorithm),
    )
