"""A simulation of a TPU program's schedule, which gives the time of the program.

A device runs the instructions of a computation in sequence, in the order of the text. A collective
or a copy that is split into the instructions `-start` and `-done` runs concurrently with other
instructions. It begins when its `-start` is reached and its links are free, and its `-done` waits
until it ends. The first iteration of a loop is simulated, and the second iteration if an operation
is still in flight at the end of the first. All later iterations are assumed to be equal to the last
simulated iteration.

In a loop of ticks (`jaxdist.hlo.lockstep`), a tick is simulated once for each combination of
branches that a group of devices takes. All groups begin a tick together, so that the tick takes the
time of the slowest group. The entry of an instruction has the mean time over groups. The entry of
the loop has the mean time for which a group waits for slower groups.

Every second of the result belongs to an instruction: `Entry.waited_seconds` of all entries add up
to the total.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping

from jaxdist.hlo.collective import Collectives
from jaxdist.hlo.entries import Basis, Entry, ProgramTimeline, Rates, Resource
from jaxdist.hlo.estimates import effort, estimated_cycles, is_on_host, takes_no_time
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.lockstep import Choices, Lockstep, conditional_name, place_of, tick_loops
from jaxdist.hlo.loops import Frame
from jaxdist.hlo.parse import Instruction, Module
from jaxdist.hlo.records import Collective
from jaxdist.hlo.schedule import (
    FUSED_DONE,
    FUSED_START,
    done_of,
    launch_of,
    targets_of,
)


@dataclasses.dataclass(frozen=True)
class _Flight:
    """An asynchronous operation in flight: the name of its entry, and the time of its end."""

    entry: str
    end: float


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    timeline: ProgramTimeline
    pending: Mapping[int, _Flight]
    """The operations in flight, by index in the returned tuple. The end of an operation is in
    seconds after the end of the computation."""


def play(
    module: Module,
    layout: MeshLayout,
    rates: Rates,
    *,
    dearest: bool = True,
    lockstep: Lockstep | None = None,
) -> ProgramTimeline:
    """Simulate a program, and return its timeline.

    Args:
      module: the parsed HLO program.
      layout: the layout of the mesh that the program was compiled for.
      rates: the speeds of the device and of its links.
      dearest: whether a conditional whose branch is unknown takes the longest branch. If False,
        such a conditional takes the shortest branch.
      lockstep: the branches in the program's loop of ticks, or None without such a loop. The
        branches must match the program (`jaxdist.hlo.lockstep.mismatch`).
    """
    player = _Player(module, layout, rates, max if dearest else min, lockstep)
    return player.computation(Frame(module, module.entry), {}).timeline


class _Player:
    def __init__(
        self,
        module: Module,
        layout: MeshLayout,
        rates: Rates,
        choose: Callable[..., _Piece],
        lockstep: Lockstep | None,
    ) -> None:
        self.module, self.rates, self.choose, self.lockstep = module, rates, choose, lockstep
        self.loop = tick_loops(module)[0].name if lockstep else ""
        self.choices: Mapping[str, float] = {}
        self.collectives = Collectives(module, layout)

    def computation(self, frame: Frame, pending: Mapping[int, _Flight]) -> _Piece:
        return _Run(self, frame, pending).piece()

    def turn(self, body: Frame, choices: Choices, pending: Mapping[int, _Flight]) -> _Piece:
        """Simulate an iteration of the loop of ticks.

        Args:
          body: the frame of the loop's body.
          choices: the branches that a group of devices takes.
          pending: the operations that the previous iteration left in flight.
        """
        self.choices = dict(choices)
        piece = self.computation(body, pending)
        self.choices = {}
        return piece


class _Run:
    """The simulation of a computation, with the clock, the links and the operations in flight."""

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
        if pending:
            parameter = next(i for i in self.body.instructions if i.opcode == "parameter")
            self._receive(parameter, pending)

    def piece(self) -> _Piece:
        for instruction in self.body.instructions:
            self._step(instruction)
        # A computation does not end before operations in flight for which no instruction waits.
        for start, flight in self.lost.items():
            self._wait(flight, start)
        leaves = {
            index: dataclasses.replace(flight, end=max(0.0, flight.end - self.now))
            for index, flight in self.leaves.items()
        }
        timeline = ProgramTimeline(self.now, self.entries, tuple(self.unknown), self.has_branches)
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
        elif launch_of(instruction, self.body) is not instruction:
            pass  # A start without operands only reserves memory; an update begins the operation.
        elif (collective := self._collective(instruction)) is not None:
            self._communicate(instruction, collective)
        elif self._starts(instruction):
            self._copy(instruction)
        elif not opcode.endswith("-update"):
            self._compute(instruction)

    def _launched(self, update: Instruction) -> Instruction | None:
        """Return the `async-start` of the operation that begins to run at an `async-update`.

        The result is None if no operation begins to run at this instruction.
        """
        if update.opcode != "async-update":
            return None
        start = self.body.by_name[update.operands[0]]
        return start if launch_of(start, self.body) is update else None

    # The following methods simulate instructions that run one after another.

    def _compute(self, instruction: Instruction) -> None:
        cycles = estimated_cycles(instruction)
        if cycles is not None:
            seconds = self.player.rates.cycles(cycles)
            self._add(instruction, "compiler", instruction.opcode, seconds, seconds)
        elif not takes_no_time(instruction):
            seconds, assumption = self.player.rates.work(
                effort(instruction, self.body, self.player.module)
            )
            self._add(instruction, "assumed", assumption, seconds, seconds)

    def _inline(self, piece: _Piece, times: float = 1) -> None:
        timeline = piece.timeline.scaled(times)
        self.now += timeline.seconds
        for name, entry in timeline.entries.items():
            self.entries[name] = self.entries[name].plus(entry) if name in self.entries else entry
        self.unknown.update(dict.fromkeys(timeline.unknown_loops))
        self.has_branches |= timeline.has_branches

    def _loop(self, loop: Instruction) -> None:
        if loop.name == self.player.loop:
            assert self.player.lockstep is not None
            self._ticks(loop, self.player.lockstep)
            return
        trips = self.frame.trips(loop)
        if trips is None:
            self.unknown[loop.source or loop.name] = None
        if trips == 0:
            return
        body = self.frame.enter_loop(loop, "body")
        piece = self.player.computation(body, {})
        self._inline(piece)
        rest = 0 if trips is None else trips - 1
        # The operations that the first iteration leaves in flight delay the second iteration. All
        # later iterations are assumed to be equal to the second iteration, and are not simulated.
        if rest and piece.pending:
            piece = self.player.computation(body, piece.pending)
        if rest:
            self._inline(piece, rest)
        self._receive(loop, piece.pending)

    def _ticks(self, loop: Instruction, lockstep: Lockstep) -> None:
        """Simulate the loop of ticks, and add a group's mean work and mean waits to the entries."""
        body = self.frame.enter_loop(loop, "body")
        played: dict[tuple[Choices, frozenset[tuple[int, _Flight]]], _Piece] = {}
        groups: dict[_Piece, int] = defaultdict(int)
        pending: Mapping[int, _Flight] = {}
        seconds = 0.0
        for tick in lockstep.turns(self.player.module):
            pieces: list[_Piece] = []
            for choices, count in tick.items():
                key = (choices, frozenset(pending.items()))
                if key not in played:
                    played[key] = self.player.turn(body, choices, pending)
                groups[played[key]] += count
                pieces.append(played[key])
            last = max(pieces, key=lambda piece: piece.timeline.seconds)
            seconds, pending = seconds + last.timeline.seconds, last.pending
        end = self.now + seconds
        for piece, count in groups.items():
            self._inline(piece, count / lockstep.groups)
        bubble = max(0.0, end - self.now)
        self._add(loop, "schedule", f"bubble of {lockstep.name}", bubble, bubble)
        self._receive(loop, pending)

    def _branch(self, instruction: Instruction) -> None:
        taken = self.player.choices.get(conditional_name(instruction) or "")
        if taken is not None:
            # A fractional branch number is the mean over the iterations of a loop within the tick.
            # Some of these iterations take the branch with the integer part, and the rest take the
            # branch with the next number.
            number, share = divmod(taken, 1)
            for one, times in ((int(number), 1 - share), (int(number) + 1, share)):
                if times:
                    place = place_of(instruction, one)
                    self._inline(self._taken(*instruction.branches[place]), times)
            return
        pieces = [self._taken(*branch) for branch in instruction.branches]
        self._inline(self.player.choose(pieces, key=lambda piece: piece.timeline.seconds))
        self.has_branches = True

    def _taken(self, branch: str, operand: str) -> _Piece:
        return self.player.computation(self.frame.enter_branch(branch, operand), {})

    # The following methods simulate operations that run concurrently with instructions.

    def _collective(self, instruction: Instruction) -> Collective | None:
        """Return the collective that an instruction or its callee begins, or None without one."""
        launched = self._launched(instruction) or instruction
        return next(iter(self.player.collectives.begun(launched, self.body)), None)

    def _starts(self, instruction: Instruction) -> bool:
        is_start = instruction.opcode.endswith("-start") or bool(self._launched(instruction))
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
        if cycles:
            # The fusion contains computation besides the collective. Its seconds are added to the
            # entry with `times=0`, since the fusion itself is counted above.
            extra = self.player.rates.cycles(cycles)
            self._add(instruction, "links", what, extra, extra, collective.axes, times=0)

    def _copy(self, start: Instruction) -> None:
        """Start an asynchronous copy or slice, between memories or on SparseCores."""
        shapes = start.shapes
        # The result of an async-update includes scratch memory, which the copy does not move.
        if start.opcode == "async-update":
            shapes = [one for each in self.body.operand_shapes(start)[1:] for one in each]
        host = is_on_host(start)
        # The operand is the whole array in the host's memory, but the operation moves only a slice
        # of it.
        moving = self._begun(start)
        if host and moving == "dynamic-slice":
            shapes = shapes[len(start.operands) :]
        if host and moving == "dynamic-update-slice":
            shapes = shapes[1:2]
        size_bytes = max((shape.bytes for shape in shapes), default=0)
        seconds = self.player.rates.copy(size_bytes, host=host)
        name: Resource = "host" if host else "memory"
        self._depart(start, "copy", name, seconds, frozenset({name}), ())

    def _begun(self, start: Instruction) -> str:
        """Return the opcode of the operation that an asynchronous start begins.

        XLA writes a start such as `dynamic-slice-start` also as `async-start`, whose computation
        has the operation.
        """
        if start.opcode == "async-start":
            return self.frame.called(start, "calls").root.opcode
        return start.opcode.removesuffix("-start")

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
        """Record which instruction waits for an operation in flight.

        Args:
          start: the instruction that starts the operation, or an instruction whose result contains
            the operation in flight.
          flight: the operation.
          index: the index of the operation in the tuple of `start`, or None for the operation that
            `start` itself begins.
        """
        place = done_of(start, self.body, self.player.module, index)
        if isinstance(place, int):
            self.leaves[place] = flight
        elif place is not None:
            self.ends[place] = flight
        else:
            self.lost[flight.entry] = flight

    def _receive(self, carrier: Instruction, pending: Mapping[int, _Flight]) -> None:
        """Record the operations that a loop or an earlier iteration left in flight.

        Args:
          carrier: the instruction whose result contains the operations.
          pending: the operations, by index in the result of the instruction. Their ends are in
            seconds from now.
        """
        for index, flight in pending.items():
            self._follow(carrier, dataclasses.replace(flight, end=flight.end + self.now), index)

    def _end(self, done: Instruction) -> None:
        flight = self.ends.pop(done.name, None)
        if flight is not None:
            self._wait(flight, done.source)
        cycles = estimated_cycles(done)
        if cycles:
            seconds = self.player.rates.cycles(cycles)
            self._add(done, "compiler", done.opcode, seconds, seconds)

    def _wait(self, flight: _Flight, source: str) -> None:
        """Wait until an operation ends, and add the wait to the operation's entry.

        Args:
          flight: the operation.
          source: the source of a new entry, which is made if the operation has no entry yet.
        """
        waited = flight.end - self.now
        if waited <= 0:
            return
        self.now = flight.end
        # An operation that an earlier iteration began has no entry in this part. A new entry is
        # made, which `_inline` later adds to the operation's entry by its name.
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
