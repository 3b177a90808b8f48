"""The schedule of a TPU program played through: when each instruction begins, what waits for what.

A device runs the instructions of a computation one after another, in the order of the text. A
collective or a copy that is split into start and done runs beside them, on links of its own: it
begins when its start is reached and its links are free, and its done waits until it ends. Of a
loop the first turn is played, and a second one where something is still under way at the end of
the first; the other turns are taken to be like it.

Every second of the result belongs to one instruction: `Entry.waited_seconds` of all entries add
up to the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from jaxdist.hlo.collective import Surroundings, describe
from jaxdist.hlo.estimates import (
    Effort,
    effort,
    estimated_cycles,
    is_on_host,
    takes_no_time,
)
from jaxdist.hlo.flops import instruction_flops
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.loops import Frame
from jaxdist.hlo.parse import Instruction, Module
from jaxdist.hlo.records import Collective
from jaxdist.hlo.schedule import (
    FUSED_DONE,
    FUSED_START,
    channels_in_flight,
    done_of,
    kind_of,
    targets_of,
)

Basis = Literal["compiler", "links", "copy", "assumed"]
"""Where the seconds of an entry come from: the compiler's estimate, bytes and links, bytes and
memory bandwidth, or FLOPs and bytes at an assumed rate."""

Resource = int | str


class Rates(Protocol):
    """The speeds of the device and its links."""

    def cycles(self, count: int) -> float:
        """Seconds of so many cycles."""
        ...

    def transfer(self, collective: Collective) -> tuple[float, frozenset[Resource]]:
        """Seconds of one execution, and the links that it occupies."""
        ...

    def copy(self, size_bytes: int, *, host: bool) -> float:
        """Seconds of a copy within the device's memories, or to or from the host's."""
        ...

    def work(self, effort: Effort) -> tuple[float, str]:
        """Seconds of what has no estimate, and the assumption behind them."""
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one instruction contributes to the step, over all its executions."""

    name: str
    source: str
    """The jax operation (`op_name`), or empty."""
    basis: Basis
    axes: tuple[str, ...] | None
    """Mesh axes of a collective; () for all else, None for groups that are no product of axes."""
    what: str
    """The kind of collective, the assumption behind `seconds`, or the operation."""
    times: float
    seconds: float
    """How long it runs, alone or beside others."""
    waited_seconds: float
    """How long the device does nothing else because of it."""

    def scaled(self, times: int) -> Entry:
        """So many times as often."""
        return dataclasses.replace(
            self,
            times=self.times * times,
            seconds=self.seconds * times,
            waited_seconds=self.waited_seconds * times,
        )

    def plus(self, other: Entry) -> Entry:
        """Both together; the rest is of `self`."""
        return dataclasses.replace(
            self,
            times=self.times + other.times,
            seconds=self.seconds + other.seconds,
            waited_seconds=self.waited_seconds + other.waited_seconds,
        )


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A program, or a piece of it, from its beginning to its end."""

    seconds: float
    entries: Mapping[str, Entry]
    unknown_loops: tuple[str, ...] = ()
    """Loops whose length only running tells: one turn of each is counted."""
    has_branches: bool = False

    def scaled(self, times: int) -> Timeline:
        """So many times one after another."""
        entries = {name: entry.scaled(times) for name, entry in self.entries.items()}
        return dataclasses.replace(self, seconds=self.seconds * times, entries=entries)


@dataclasses.dataclass(frozen=True)
class _Flight:
    """An asynchronous operation under way: which entry it belongs to and when it ends."""

    entry: str
    end: float


@dataclasses.dataclass(frozen=True)
class _Piece:
    timeline: Timeline
    pending: Mapping[int, _Flight]
    """What has not ended, by its place in the tuple that is returned; ends count from the end of
    the piece."""


def play(module: Module, layout: MeshLayout, rates: Rates, *, dearest: bool = True) -> Timeline:
    """The whole program.

    Args:
      dearest: of a conditional, take the branch that lasts longest; else the shortest.
    """
    player = _Player(module, layout, rates, max if dearest else min)
    return player.computation(Frame(module, module.entry), {}).timeline


class _Player:
    def __init__(
        self, module: Module, layout: MeshLayout, rates: Rates, choose: Callable[..., _Piece]
    ) -> None:
        self.module, self.layout, self.rates, self.choose = module, layout, rates, choose
        self.in_flight = channels_in_flight(module)

    def computation(self, frame: Frame, pending: Mapping[int, _Flight]) -> _Piece:
        return _Run(self, frame, pending).piece()


class _Run:
    """One computation being played: the clock, the links, what is under way."""

    def __init__(self, player: _Player, frame: Frame, pending: Mapping[int, _Flight]) -> None:
        self.player, self.frame = player, frame
        self.body = frame.computation
        self.now = 0.0
        self.free: dict[Resource, float] = {}
        self.entries: dict[str, Entry] = {}
        self.ends: dict[str, _Flight] = {}
        self.leaves: dict[int, _Flight] = {}
        self.lost: dict[str, _Flight] = {}
        self.unknown: dict[str, None] = {}
        self.has_branches = False
        self._arrive(pending)

    def piece(self) -> _Piece:
        for instruction in self.body.instructions:
            self._step(instruction)
        for start, flight in self.lost.items():  # nothing is seen to wait for it: wait here
            self._wait(flight, start)
        leaves = {
            index: dataclasses.replace(flight, end=max(0.0, flight.end - self.now))
            for index, flight in self.leaves.items()
        }
        timeline = Timeline(self.now, self.entries, tuple(self.unknown), self.has_branches)
        return _Piece(timeline, leaves)

    def _step(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self._loop(instruction)
        elif opcode == "conditional":
            self._branch(instruction)
        elif opcode == "call":
            self._inline(self.player.computation(self.frame.enter(instruction), {}))
        elif opcode.endswith("-done") or FUSED_DONE in targets_of(instruction, self.player.module):
            self._end(instruction)
        elif (collective := self._collective(instruction)) is not None:
            self._communicate(instruction, collective)
        elif opcode.endswith("-start"):
            self._copy(instruction)
        elif not opcode.endswith("-update"):
            self._compute(instruction)

    # What runs by itself

    def _compute(self, instruction: Instruction) -> None:
        cycles = estimated_cycles(instruction)
        if cycles is not None:
            seconds = self.player.rates.cycles(cycles)
            self._add(instruction, "compiler", instruction.opcode, seconds, seconds)
        elif not takes_no_time(instruction):
            seconds, assumption = self.player.rates.work(self._effort(instruction))
            self._add(instruction, "assumed", assumption, seconds, seconds)

    def _effort(self, instruction: Instruction) -> Effort:
        found = effort(instruction, self.body)
        if instruction.opcode != "fusion":
            return found
        inside = self.frame.called(instruction, "calls")
        flops = sum(instruction_flops(inner, inside) for inner in inside.instructions)
        return dataclasses.replace(found, flops=float(flops))

    def _inline(self, piece: _Piece, times: int = 1) -> None:
        timeline = piece.timeline.scaled(times)
        self.now += timeline.seconds
        for name, entry in timeline.entries.items():
            self.entries[name] = self.entries[name].plus(entry) if name in self.entries else entry
        self.unknown.update(dict.fromkeys(timeline.unknown_loops))
        self.has_branches |= timeline.has_branches

    def _loop(self, loop: Instruction) -> None:
        trips = self.frame.trips(loop)
        if trips is None:
            self.unknown[loop.source or loop.name] = None
        if trips == 0:
            return
        body = self.frame.enter_loop(loop, "body")
        piece = self.player.computation(body, {})
        self._inline(piece)
        rest = 0 if trips is None else trips - 1
        if rest and piece.pending:
            piece = self.player.computation(body, piece.pending)
        if rest:
            self._inline(piece, rest)
        for index, flight in piece.pending.items():
            self._follow(loop, dataclasses.replace(flight, end=flight.end + self.now), index)

    def _branch(self, instruction: Instruction) -> None:
        pieces = [
            self.player.computation(self.frame.enter_branch(name, operand), {})
            for name, operand in instruction.branches
        ]
        self._inline(self.player.choose(pieces, key=lambda piece: piece.timeline.seconds))
        self.has_branches = True

    # What runs beside

    def _collective(self, instruction: Instruction) -> Collective | None:
        """The collective that an instruction begins, by itself or in what it calls."""
        player = self.player
        if kind_of(instruction) is not None:
            return describe(instruction, self.body, Surroundings(), player.module, player.layout)
        if instruction.opcode not in ("fusion", "async-start"):
            return None
        callee = self.frame.called(instruction, "calls")
        inner = next((i for i in callee.instructions if kind_of(i) is not None), None)
        if inner is None:
            return None
        is_fusion, starts = instruction.opcode == "fusion", self._starts(instruction)
        if is_fusion and not starts and inner.number("channel_id") in player.in_flight:
            return None  # computes, and carries on a collective that began before
        around = Surroundings(
            is_fusion=is_fusion,
            start=(instruction, self.body) if starts else None,
            source=instruction.source,
        )
        return describe(inner, callee, around, player.module, player.layout)

    def _starts(self, instruction: Instruction) -> bool:
        is_start = instruction.opcode.endswith("-start")
        return is_start or FUSED_START in targets_of(instruction, self.player.module)

    def _communicate(self, instruction: Instruction, collective: Collective) -> None:
        seconds, links = self.player.rates.transfer(collective)
        what = collective.kind
        if self._starts(instruction):
            self._depart(instruction, "links", what, seconds, links, collective.axes)
        else:
            begin = max([self.now, *(self.free.get(link, 0.0) for link in links)])
            waited = begin - self.now + seconds
            self._add(instruction, "links", what, seconds, waited, collective.axes)
            self.free.update(dict.fromkeys(links, self.now))
        cycles = estimated_cycles(instruction)
        if cycles:  # what is computed in the same fusion
            extra = self.player.rates.cycles(cycles)
            self._add(instruction, "links", what, extra, extra, collective.axes, times=0)

    def _copy(self, start: Instruction) -> None:
        """An asynchronous copy or slice between memories."""
        size_bytes = max((shape.bytes for shape in start.shapes), default=0)
        host = is_on_host(start)
        seconds = self.player.rates.copy(size_bytes, host=host)
        name: Resource = "host" if host else "memory"
        self._depart(start, "copy", name, seconds, frozenset({name}), ())

    def _depart(
        self,
        start: Instruction,
        basis: Basis,
        what: str,
        seconds: float,
        links: frozenset[Resource],
        axes: tuple[str, ...] | None,
    ) -> None:
        end = max([self.now, *(self.free.get(link, 0.0) for link in links)]) + seconds
        self.free.update(dict.fromkeys(links, end))
        self._add(start, basis, what, seconds, 0.0, axes)
        self._follow(start, _Flight(start.name, end))

    def _follow(self, start: Instruction, flight: _Flight, index: int | None = None) -> None:
        """Find where something under way is waited for: here, or in what is returned."""
        place = done_of(start, self.body, self.player.module, index)
        if isinstance(place, int):
            self.leaves[place] = flight
        elif place is not None:
            self.ends[place] = flight
        else:
            self.lost[flight.entry] = flight

    def _arrive(self, pending: Mapping[int, _Flight]) -> None:
        """What began in the turn before, by its place in the loop's state."""
        parameters = [i for i in self.body.instructions if i.opcode == "parameter"]
        for index, flight in pending.items():
            self._follow(parameters[0], flight, index)

    def _end(self, done: Instruction) -> None:
        flight = self.ends.pop(done.name, None)
        if flight is not None:
            self._wait(flight, done.source)
        cycles = estimated_cycles(done)
        if cycles:
            seconds = self.player.rates.cycles(cycles)
            self._add(done, "compiler", done.opcode, seconds, seconds)

    def _wait(self, flight: _Flight, source: str) -> None:
        """Let the entry that is under way answer for the wait until it ends."""
        waited = flight.end - self.now
        if waited <= 0:
            return
        self.now = flight.end
        # What began in an earlier turn is added up by its name when this piece joins that one.
        unknown = Entry(flight.entry, source, "links", (), "", 0, 0.0, 0.0)
        entry = self.entries.get(flight.entry, unknown)
        self.entries[flight.entry] = dataclasses.replace(
            entry, waited_seconds=entry.waited_seconds + waited
        )

    def _add(
        self,
        instruction: Instruction,
        basis: Basis,
        what: str,
        seconds: float,
        waited: float,
        axes: tuple[str, ...] | None = (),
        times: int = 1,
    ) -> None:
        entry = Entry(
            instruction.name, instruction.source, basis, axes, what, times, seconds, waited
        )
        known = self.entries.get(instruction.name)
        self.entries[instruction.name] = entry if known is None else known.plus(entry)
        self.now += waited
