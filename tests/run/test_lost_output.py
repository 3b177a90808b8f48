"""Output that nobody reads any more, or that no disk takes: the command goes on to its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from runs import Jaxdist, metrics

from jaxdist.cli.output import _Lasting


@contextmanager
def without_a_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.full
def test_a_run_goes_on_when_its_reader_goes_away(jaxdist: Jaxdist) -> None:
    jaxdist.config()
    with without_a_reader() as writer:
        done = jaxdist.train(stdout=writer)
    assert done.code == 0
    assert done.message == (
        "cannot write to standard output: Broken pipe; "
        "the command continues without standard output"
    )
    assert [record["step"] for record in metrics(jaxdist.run)][-1] == 24


@pytest.mark.full
def test_output_that_no_disk_takes_is_told_once(jaxdist: Jaxdist) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    lost = jaxdist("--help", stdout=full)
    os.close(full)
    assert lost.code == 1
    assert lost.message == (
        "cannot write to standard output: No space left on device; the command continues without "
        "standard output"
    )


def test_what_was_lost_is_known_and_later_writes_go_nowhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with without_a_reader() as writer:
        stream = _Lasting(writer)
        assert [stream.write(b"some"), stream.write(b"more"), stream.lost] == [4, 4, False]
    full = os.open("/dev/full", os.O_WRONLY)
    stream = _Lasting(full)
    assert [stream.write(b"some"), stream.write(b"more"), stream.lost] == [4, 4, True]
    os.close(full)
    assert capsys.readouterr() == ("", "")


def test_a_descriptor_that_was_closed_leads_nowhere() -> None:
    unused = os.open(os.devnull, os.O_WRONLY)
    os.close(unused)
    stream = _Lasting(unused)
    assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
    assert (stream.write(b"some"), stream.lost) == (4, False)
    os.close(unused)


def test_a_terminal_that_is_gone_is_a_reader_that_went_away() -> None:
    """Whatever comes first: the hangup, or a write that fails."""
    screen, terminal = os.openpty()
    stream = _Lasting(terminal)
    os.close(screen)
    assert stream.write(b"a word") == 6
    assert not stream.lost
    os.close(terminal)
