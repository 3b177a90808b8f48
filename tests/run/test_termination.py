from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from jaxdist.run.termination import Termination


class Said(list[str]):
    """Lines, and a way to wait for the first."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        self.heard.set()


@pytest.fixture
def hangup_ends() -> Iterator[None]:
    """The tests may themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noted_and_said_at_once(number: signal.Signals, hangup_ends: None) -> None:
    said = Said()
    before = signal.getsignal(number)
    with Termination(said) as termination:
        assert not termination.requested(1)
        os.kill(os.getpid(), number)
        assert said.heard.wait(60)
        assert termination.requested(2)
        assert termination.signal == number.name
    assert len(said) == 1
    assert said[0].startswith(f"{number.name}: the run stops after the step under way and saves")
    assert said[0].endswith("; the same signal again ends the run at once") == (
        number == signal.SIGINT
    )
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_ctrl_c_raises_and_a_second_sigterm_does_not(hangup_ends: None) -> None:
    said = Said()

    def twice() -> None:
        with Termination(said) as termination:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
            assert termination.signal == "SIGTERM"
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert len(said) == 1


def test_a_hangup_that_is_ignored_stays_ignored(hangup_ends: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Termination(pytest.fail) as termination:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not termination.requested(1)


def test_a_reader_that_is_gone_costs_nothing() -> None:
    heard = threading.Event()

    def gone(line: str) -> None:
        heard.set()
        raise OSError(5, "Input/output error")

    with Termination(gone) as termination:
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(60)
        assert termination.requested(1)
