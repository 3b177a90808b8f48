"""The parts of `jaxdist bench models`."""

import pytest

from benchmarks.core.report import Figure
from benchmarks.models import report
from jaxdist.errors import JaxdistError


def test_only_the_named_parts_run(monkeypatch):
    ran = []

    def part(name):
        def case(which):
            ran.append(f"{name}:{which}")
            yield Figure(name, 1, 1, unit="")

        return lambda given: {which: case(which) for which in ("one", "two")}

    monkeypatch.setattr(report, "PARTS", {name: part(name) for name in report.PARTS})
    found = report.bench(part=["muon", "loading:one"])
    assert ran == ["muon:one", "muon:two", "loading:one"]
    assert [figure.name for figure in found.figures] == ["muon", "muon", "loading"]
    with pytest.raises(JaxdistError, match="no part 'lodaing': did you mean 'loading'"):
        report.bench(part=["lodaing"])
    with pytest.raises(JaxdistError, match="part muon has no case 'tow': did you mean 'two'"):
        report.bench(part=["muon:tow"])
    report.bench()
    assert ran[3::2] == [f"{name}:one" for name in report.PARTS]
