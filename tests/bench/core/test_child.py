"""A function in a process of its own: it is called there, and what it gives comes back."""

from __future__ import annotations

import os

import pytest

from benchmarks.core import child
from benchmarks.core.lab import Lab, LabLink
from jaxdist.errors import RunError


def labs(sites: int) -> list[Lab]:
    assert sites < 9, "too many"
    return [Lab(sites, across=LabLink(1e6, 0.5)), Lab(1)]


def called(sites):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *PATHS])}
    return child.call(labs, sites, what="labs", environ=environ)


PATHS = [path for path in [os.environ.get("PYTHONPATH")] if path]


def test_what_is_printed_is_what_is_read():
    assert called(2) == labs(2)


def test_a_process_that_fails_is_heard():
    with pytest.raises(RunError, match=r"labs ended with exit code 1: AssertionError: too many; "):
        called(9)


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(child, "TIMEOUT_SECONDS", 0.01)
    with pytest.raises(RunError, match=r"labs is not done after 0.01 s: run `"):
        called(2)


def test_a_function_is_named_by_its_module():
    from benchmarks.optim import timed  # not for the processes above, which import this file

    assert child.command(timed, 3)[-2:] == ["benchmarks.optim:timed", "3"]
