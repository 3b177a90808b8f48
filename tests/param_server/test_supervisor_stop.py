"""A run with servers that is told to stop ends, whatever its processes do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.errors import STOPPED, StoppedError
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.training import supervisor
from jaxdist.param_server.training.supervisor import Supervisor
from jaxdist.run.hooks.loop import RunHooks, StopHook
from jaxdist.runtime.children import Event

REPORT = {"seconds": 0.5, "waited_seconds": 0.0, "received_bytes": 0, "sent_bytes": 0}


class FakeChild:
    """A process that lives and says what the test lets it say."""

    def __init__(self, role: str, number: int) -> None:
        self.role, self.number, self.told = role, number, list[Any]()

    def __str__(self) -> str:
        return f"{self.role} {self.number}"

    def say(self, what: Any) -> None:
        self.told.append(what)


def supervised(tmp_path, signal: str | None, steps: int = 100) -> Supervisor:
    """A supervisor of one server and two workers, before their first clock."""
    hooks: Sequence[Any] = [
        StopHook(SimpleNamespace(signal=signal, requested=lambda step: bool(signal)))
    ]
    prepared = SimpleNamespace(
        directory=tmp_path,
        hooks=RunHooks(hooks),
        state=SimpleNamespace(step=0),
        stages=[SimpleNamespace(last_step=steps)],
    )
    cluster = Cluster(workers=2)
    program = SimpleNamespace(metrics=("loss", "grad_norm"))
    sharded = SimpleNamespace(cluster=cluster, program=program, rate_of=lambda step: 0.1)
    found = Supervisor(
        sharded, prepared, tmp_path / "token", module="none", config=tmp_path / "config.yaml"
    )
    found.fleet.servers = [FakeChild("server", 0)]
    found.team.workers = {at: FakeChild("worker", at) for at in range(2)}
    found.team.slots = {0: 0, 1: 1}
    return found


def test_a_run_that_is_not_told_to_stop_waits(tmp_path):
    found = supervised(tmp_path, None)
    found.told, found.heard = None, time.monotonic() - 300
    found._check_stop("clock 0")
    assert found.stop == found.last


def test_a_long_clock_is_waited_for(tmp_path, monkeypatch):
    """Signs of life, and clocks that are known to take long, put the end off."""
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 5.0)
    found = supervised(tmp_path, "SIGTERM")
    for slot in range(2):
        found.ledger.clock(slot, {"clock": 0, **REPORT, "seconds": 400.0})
    found.told = found.heard = time.monotonic() - 500
    found._check_stop("clock 1")
    found.told = found.heard = time.monotonic() - 900
    with pytest.raises(StoppedError):
        found._check_stop("clock 1")


def test_a_worker_that_takes_anothers_place_stops_with_the_others(tmp_path):
    found = supervised(tmp_path, "SIGTERM")
    found._stop(set())
    assert found._setup()["stop"] == found.stop < found.last


def test_a_run_that_does_not_get_on_ends_when_it_is_told_to(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.05)
    found = supervised(tmp_path, "SIGTERM")
    stats = {"floor": 0}
    for _ in range(3):  # what servers count says nothing of progress
        applied = {"event": "applied", "squares": [], "stats": stats}
        found.events.put(Event(found.fleet.servers[0], applied))
    with pytest.raises(StoppedError, match=r"for clock 0 in vain \(worker 0, worker 1 is") as e:
        found._through(found.prepared.state, set())
    assert "--resume continues" in str(e.value)
    assert e.value.exit_code == STOPPED
    (told,) = found.team.workers[0].told  # it had the chance to stop at a clock
    assert told == found.fleet.servers[0].told[0] == {"stop": found.stop}
    assert found.stop < found.last
