"""SIGTERM and Ctrl-C end a run at the next step boundary, after a checkpoint."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import jax

from jaxdist.distributed.connection import preempted


class Termination:
    """While it is entered, the first SIGTERM or SIGINT only sets a flag; a second SIGINT raises.

    With several processes, jax's preemption service takes SIGTERM and all processes agree on the
    step to stop at; a local flag would make them stop at different steps and hang. There SIGINT is
    passed on as a SIGTERM.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}
        self._several = jax.process_count() > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> Termination:
        taken = (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT)
        for number in taken:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Whether to stop after `step`; ask once per step, in every process."""
        if not self._several:
            return self.signal is not None
        stop = preempted(step)
        if stop:
            self.signal = self.signal or "SIGTERM"
        return stop
