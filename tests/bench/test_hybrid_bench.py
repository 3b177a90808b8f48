"""The bench of tables on servers: its parts, and the figures of links from times of a lab."""

from __future__ import annotations

import pytest

from benchmarks.core.hosts import Timed
from benchmarks.param_server import links
from benchmarks.param_server.hybrid import bench
from jaxdist.errors import JaxdistError


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(JaxdistError, match="no part 'byte': did you mean 'bytes'"):
        bench(part=["byte"])


def test_figures_of_links_compare_bytes_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Timed(links.HYBRID, (0.1, 0.2, 0.1), 5.0, 0.0),
        Timed(links.SERVER, (0.3, 0.4, 0.3), 10.0, 0.0),
        Timed(links.RING, (0.9, 1.0, 1.0), 50.0, 0.0),
    ]
    monkeypatch.setattr(links, "on_hosts", lambda *given: found)
    monkeypatch.setattr(links.lab, "unavailable", lambda hosts: None)
    sent, beside_ring, server, ring = links.figures()
    assert (sent.ratio, sent.holds, beside_ring.ratio) == (0.5, True, 0.1)
    assert (server.ratio, server.holds) == (pytest.approx(3.0), True)
    assert (ring.ratio, ring.holds) == (pytest.approx(9.0), True)
    monkeypatch.setattr(links.lab, "unavailable", lambda hosts: "no root")
    (skipped,) = links.figures()
    assert skipped.note == "skipped: no root"
