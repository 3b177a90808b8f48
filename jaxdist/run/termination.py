"""The graceful end of a run, which saves a checkpoint after a signal or a preemption notice."""

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
    """A context in which the first signal stops the run, and a second SIGINT raises an error.

    The signals are SIGTERM, SIGUSR1 (which schedulers send as a warning before a kill), SIGINT, and
    SIGHUP unless it is ignored (as under nohup). With a single process, the first signal only sets
    a flag. With several processes, jax's preemption service handles SIGTERM, and the other signals
    are converted to SIGTERM. All processes then agree on the step after which they stop; with a
    flag in each process, the processes would stop after different steps and hang. Outside the main
    thread no signal is handled.

    Attributes:
      signal: the name of the signal or preemption notice that stops this process, or the reason
        that a hook gave, or None while nothing stops the process.
      asked: the reason that a hook gave for the stop. The value is None if no hook asked, or if a
        signal or notice came earlier.

    Args:
      say: the function that is called with a line when the signal arrives. Another thread may call
        the function, because a step may occupy the main thread for minutes.
      here: the function that is called with the name of a signal or notice to this process, before
        other processes learn of it. The function is not called for SIGTERM, because an agent also
        sends SIGTERM.
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
        """Ask the run to stop because of a preemption notice; any thread may call this method."""
        self._here(name)
        self.signal = self.signal or name
        self._tell(name, "the step under way")
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def ask(self, reason: str) -> None:
        """Ask the run to stop at a hook's request; the run is then complete, and is not restarted.

        The call has no effect if the run was asked to stop before.
        """
        if self.signal is None:
            self.signal = self.asked = reason
            self._tell(reason, "the step under way")
            if self._several:
                os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> Termination:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python installs handlers only in the main thread.
        taken = [signal.SIGINT, signal.SIGUSR1]
        if not self._several:
            taken.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            taken.append(signal.SIGHUP)
        for number in taken:
            if signal.getsignal(number) is None:
                # A C library has installed the present handler. Python could not restore this
                # handler, and therefore does not replace it.
                continue
            self._previous[number] = signal.signal(number, self._note)
        reader, self._writer = os.pipe()
        # `set_wakeup_fd` refuses a pipe whose writes may block.
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Terminals are found before the run, since `isatty` no longer recognizes a terminal that
        # has hung up.
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
        """Print received signals at once, because Python's handlers wait for C++ code to end.

        Args:
          reader: the descriptor from which the numbers of received signals are read.
          terminals: the descriptors of the outputs that are terminals.
        """
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == signal.SIGHUP:
                    _forget(terminals)
                if number[0] in self._previous:
                    again = (
                        "; the same signal again ends the run at once"
                        if number[0] == signal.SIGINT
                        else ""
                    )
                    self._tell(signal.Signals(number[0]).name, "the step under way", again)

    def _tell(self, name: str, when: str, again: str = "") -> None:
        if not self._said:
            self._said = True
            with suppress(OSError):  # The output may be closed.
                self._say(f"{name}: the run stops after {when} and saves a checkpoint{again}")

    def requested(self, step: int) -> bool:
        """Return whether to stop after `step`; every process must call this once per step."""
        if not self._several:
            return self.signal is not None
        stop = preempted(step)
        if stop:
            self.signal = self.signal or "SIGTERM"
            self._tell(self.signal, f"step {step}")
        return stop


def _forget(terminals: list[int]) -> None:
    """Discard all later output to the terminals that were closed.

    If the output were not discarded, a failed write to such a terminal would prevent the
    checkpoint.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)
