"""A plugin: at the end, how long the tests of each folder took."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

import pytest


class Spent:
    """Sums the durations of setup, call and teardown, those of `-n` workers too."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        self._seconds[folder] += report.duration
        self._tests[folder] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds by folder")
        for folder, seconds in self._seconds.most_common():
            line = f"{seconds:8.1f} s  {self._tests[folder]:5} tests  {folder}"
            terminalreporter.write_line(line)
        total = sum(self._seconds.values())
        terminalreporter.write_line(f"{total:8.1f} s  {sum(self._tests.values()):5} tests")


def folder_of(nodeid: str) -> str:
    """The room that a test is of.

    >>> folder_of("tests/bench/core/test_lab.py::test_a_lab[1/2]")
    'tests/bench'
    >>> folder_of("tests/test_mesh.py::test_a_mesh")
    'tests'
    """
    return "/".join(PurePath(nodeid.split("::")[0]).parent.parts[:2])
