"""The parts of `jaxdist bench models`."""

import pytest

from benchmarks.core.report import Figure
from benchmarks.models import report
from jaxdist.errors import JaxdistError


def test_only_the_named_parts_run(monkeypatch):
    ran = []

    def part(name):
        return lambda given: ran.append(name) or [Figure(name, 1, 1, unit="")]

    monkeypatch.setattr(report, "PARTS", {name: part(name) for name in report.PARTS})
    found = report.bench(part=["muon", "loading"])
    assert ran == [figure.name for figure in found.figures] == ["muon", "loading"]
    with pytest.raises(JaxdistError, match="no part 'lodaing': did you mean 'loading'"):
        report.bench(part=["lodaing"])
    report.bench()
    assert ran[2:] == [*report.PARTS]
