"""A check that each task of a lowered schedule reads the right values.

The proofs by types of `jaxdist.proofs` cannot see which value a slot of a buffer holds, because the
slots are integers in tables. This module instead simulates the ticks of the tables, with a label
for the value in each slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxdist.parallel.pipeline.executor.ticks import KINDS, NONE, Channel, Ticks, TickTasks
from jaxdist.pipeline_schedules.schedule import TaskKind

Label = tuple[str, int, int]
"""A label of a value: the kind of the value, its chunk and its microbatch."""


def mistake_of(ticks: Ticks) -> str:
    """Return a sentence about the first mistake in a pipeline's tables, or "" without a mistake."""
    return next(_Stages(ticks).mistakes(), "")


class _Stages:
    """A simulation of the ticks, with a label for the value in each slot of each stage."""

    def __init__(self, ticks: Ticks) -> None:
        self.ticks, self.held, self.done = ticks, dict[tuple[str, int, int], Label](), Counter()

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence for each task that reads a wrong value, and for each missing task."""
        for tick in range(self.ticks.ticks):
            sent: dict[tuple[str, int], Label] = {}
            for stage in range(self.ticks.stages):
                for table, run in (
                    (self.ticks.forward, self._forward), (self.ticks.backward, self._backward)
                ):  # fmt: skip
                    work = TickTasks(*(int(entries[tick, stage]) for entries in table))
                    if work.kind != NONE:
                        wrong = self._place(stage, work) or run(stage, work, sent)
                        if wrong:
                            yield f"tick {tick}, stage {stage}: {wrong}"
            for buffer, channels in (("x", self.ticks.outputs), ("g", self.ticks.cotangents)):
                for channel in channels:
                    self._receive(buffer, channel, tick, sent)
        names = {"forward", *(("gradient", "weights") if self.ticks.trains else ())}
        for chunk in range(self.ticks.chunks):
            for microbatch in range(self.ticks.microbatches):
                for name in sorted(names):
                    times = self.done[name, chunk, microbatch]
                    if times != 1:
                        yield f"{name} of chunk {chunk}, microbatch {microbatch}: {times} times"

    def _place(self, stage: int, work: TickTasks) -> str:
        own = [chunk for chunk, at in enumerate(self.ticks.placement) if at in (stage, -1)]
        here = work.chunk in own and own.index(work.chunk) == work.local
        return "" if here else f"chunk {work.chunk} is not chunk {work.local} of this stage"

    def _reads(self, buffer: str, stage: int, slot: int, label: Label) -> str:
        found = self.held.get((buffer, stage, slot))
        return "" if found == label else f"{buffer}[{slot}] holds {found} in place of {label}"

    def _forward(self, stage: int, work: TickTasks, sent: dict[Any, Label]) -> str:
        now, last = (work.chunk, work.microbatch), work.chunk == self.ticks.chunks - 1
        wrong = self._reads("x", stage, work.input, ("x", *now)) if work.chunk else ""
        self.done["forward", *now] += 1
        sent["x", stage] = ("x", work.chunk + 1, work.microbatch)
        if self.ticks.trains and self.ticks.activations == "stash":
            self.held["residuals", stage, work.residual] = ("residuals", *now)
            if last:
                self.held["x", stage, work.input] = ("y", *now)
        return wrong

    def _backward(self, stage: int, work: TickTasks, sent: dict[Any, Label]) -> str:
        kind, now = KINDS[work.kind], (work.chunk, work.microbatch)
        if kind is TaskKind.WEIGHT:
            self.done["weights", *now] += 1
            return self._reads("kept", stage, work.kept, ("kept", *now))
        last, reads = work.chunk == self.ticks.chunks - 1, []
        if self.ticks.activations == "stash":
            reads.append(self._reads("residuals", stage, work.residual, ("residuals", *now)))
            reads += [self._reads("x", stage, work.input, ("y", *now))] * last
        elif work.chunk:
            reads.append(self._reads("x", stage, work.input, ("x", *now)))
        if not last:
            reads.append(self._reads("g", stage, work.gradient, ("g", *now)))
        self.done["gradient", *now] += 1
        if kind is TaskKind.INPUT:
            self.held["kept", stage, work.kept] = ("kept", *now)
        else:
            self.done["weights", *now] += 1
        sent["g", stage] = ("g", work.chunk - 1, work.microbatch)
        return next(filter(None, reads), "")

    def _receive(self, buffer: str, channel: Channel, tick: int, sent: dict[Any, Label]) -> None:
        for stage in range(self.ticks.stages):
            slot = int(channel.slot[tick, stage])
            if slot != NONE:
                sender = (stage - channel.offset) % self.ticks.stages
                self.held[buffer, stage, slot] = sent.get((buffer, sender), ("nothing", -1, -1))
