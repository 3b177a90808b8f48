"""A plugin of pytest that prints, at the end, the time that the tests of each folder took.

The variable FOLDER_SECONDS names a file, to which the times are added for `.ci/times.py`.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path, PurePath

import pytest


class Spent:
    """The sums of the durations of setup, call and teardown, also of tests in `-n` workers."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        self._seconds[folder] += report.duration
        self._tests[folder] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds by folder")
        for folder, seconds in self._ordered():
            line = f"{seconds:8.1f} s  {self._tests[folder]:5} tests  {folder}"
            terminalreporter.write_line(line)
        total = sum(self._seconds.values())
        terminalreporter.write_line(f"{total:8.1f} s  {sum(self._tests.values()):5} tests")
        if path := os.environ.get("FOLDER_SECONDS"):
            self.write(Path(path))

    def write(self, path: Path) -> None:
        """Add a line for each folder to a file, with the folder's seconds, a tab, and its name."""
        with path.open("a") as file:
            for folder, seconds in self._ordered():
                file.write(f"{seconds:.1f}\t{folder}\n")

    def _ordered(self) -> list[tuple[str, float]]:
        return sorted(self._seconds.items(), key=lambda item: -item[1])


def counts_here(config: pytest.Config) -> bool:
    """Return whether this process counts seconds; with `-n`, only the main process does."""
    asked = config.getoption("durations") or "FOLDER_SECONDS" in os.environ
    return bool(asked) and not hasattr(config, "workerinput")


def folder_of(nodeid: str) -> str:
    """Return the folder to which the seconds of a test are added.

    >>> folder_of("tests/bench/core/test_lab.py::test_a_lab[1/2]")
    'tests/bench'
    >>> folder_of("tests/test_mesh.py::test_a_mesh")
    'tests'
    """
    return "/".join(PurePath(nodeid.split("::")[0]).parent.parts[:2])
