"""SIGTERM, a hangup, Ctrl-C and notices end a run at the next step boundary, after a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import jax

from jaxdist.runtime.connection import preempted


class Termination:
    """While it is entered, the first signal only sets a flag; a second SIGINT raises.

    The signals are SIGTERM, SIGUSR1 (schedulers send it ahead of time), SIGINT, and SIGHUP where it
    is not ignored (as under nohup). With several processes, jax's preemption service takes SIGTERM
    and all processes agree on the step to stop at; a local flag would make them stop at different
    steps and hang. There the others are passed on as a SIGTERM. In a thread other than the main one
    no signal is taken.

    Attributes:
      signal: what has told this process to stop, if something did.
      asked: the reason that a hook has given, where that came first.

    Args:
      say: called with a line when the signal has come; at times from a thread of its own, because
        a step may keep the main thread for minutes.
      here: called with what has told this very process, before others hear of it; not for a
        SIGTERM, which an agent sends too.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda line: None,
        here: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.signal: str | None = None
        self.asked: str | None = None
        self._say, self._here = say, here
        self._said = False
        self._previous: dict[int, Any] = {}
        self._several = jax.process_count() > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number).name
        if number != signal.SIGTERM:
            self._here(signal.Signals(number).name)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def notice(self, name: str) -> None:
        """Something else than a signal asks for the same; from any thread."""
        self._here(name)
        self.signal = self.signal or name
        self._tell(name, "the step under way")
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def ask(self, reason: str) -> None:
        """A hook asks the run to come to its end here; it is not to be begun anew."""
        if self.signal is None:
            self.signal = self.asked = reason
            self._tell(reason, "the step under way")
            if self._several:
                os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> Termination:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets no other thread take signals: they stay the caller's
        taken = [signal.SIGINT, signal.SIGUSR1]
        if not self._several:
            taken.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            taken.append(signal.SIGHUP)
        for number in taken:
            if signal.getsignal(number) is None:
                continue  # a library's own handler, which Python could not put back
            self._previous[number] = signal.signal(number, self._note)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # A terminal that has hung up does not say any more that it was one.
        terminals = [number for number in (1, 2) if os.isatty(number)]
        self._listener = threading.Thread(
            target=self._listen, args=(reader, terminals), name="signals", daemon=True
        )
        self._listener.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._previous:
            return
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._listener.join()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _listen(self, reader: int, terminals: list[int]) -> None:
        """Say at once what has come: the handlers wait for the main thread to leave C++."""
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == signal.SIGHUP:
                    _forget(terminals)
                if number[0] in self._previous:
                    again = "; once more ends it at once" if number[0] == signal.SIGINT else ""
                    self._tell(signal.Signals(number[0]).name, "the step under way", again)

    def _tell(self, name: str, when: str, again: str = "") -> None:
        if not self._said:
            self._said = True
            with suppress(OSError):  # nobody reads
                self._say(f"{name}: the run stops after {when} and saves a checkpoint{again}")

    def requested(self, step: int) -> bool:
        """Whether to stop after `step`; ask once per step, in every process."""
        if not self._several:
            return self.signal is not None
        stop = preempted(step)
        if stop:
            self.signal = self.signal or "SIGTERM"
            self._tell(self.signal, f"step {step}")
        return stop


def _forget(terminals: list[int]) -> None:
    """Writing to a terminal that is gone is an error, which must not cost the checkpoint."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)
