"""Runs whose tables are on servers, as processes: to their end, resumed elsewhere, and killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Jaxdist, finish

from benchmarks.param_server.tables import FORM, killed, table_servers
from jaxdist.errors import RunError
from jaxdist.interchange.safetensors import read_header
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.tables.bounded import open_store
from jaxdist.tables.keys import KEY, WAYS, unique_rows
from jaxdist.tables.optimizer import RowSgd
from jaxdist.tables.store import summed
from jaxdist.tables.training.request import write_request

STEPS = 200
ROWS = sum(FORM.fields.values())
CLICKS = {
    "model": {"type": "dlrm", "width": 4, "bottom": [4], "top": [4]},
    "data": {"type": "clicks", "fields": 3, "ids": 50, "examples": 256, "heldout_examples": 32},
    "optim": {
        "type": "sgd",
        "momentum": 0.0,
        "learning_rate": 0.5,
        "schedule": {"type": "constant"},
    },
    "train": {"steps": STEPS, "batch_size": 16, "log_every": 1},
    "checkpoint": {"every": STEPS // 2},
}


def _strategy(servers: int, replicas: int = 1) -> str:
    more = f"replicas: {replicas}, optimizer: {{type: sgd}}"
    return f"strategy={{type: hybrid, servers: {servers}, {more}}}"


def _records(run: Path, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


@pytest.mark.full
def test_a_run_whose_server_is_killed_equals_one_mesh_and_goes_on_with_others(
    jaxdist: Jaxdist,
) -> None:
    jaxdist.config(CLICKS)
    assert jaxdist.here("train", "config.yaml", "run.directory=alone").code == 0
    process = jaxdist.start("train", "config.yaml", "run.directory=run", _strategy(2, 2))
    alone, run = jaxdist.folder / "alone", jaxdist.folder / "run"
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not _records(run, "train"):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(_table_server(run), signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "table 1 ended (signal SIGKILL): its follower servers take over" in out
    for one, other in zip(_records(alone, "train"), _records(run, "train"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    (heldout,) = _records(run, "heldout")
    (first, counted) = _records(run, "servers")
    assert first["ids"] * 2 == counted["ids"] == STEPS * 16 * 3
    assert counted["unique_ratio"] == counted["unique_ids"] / counted["ids"] < 1
    formula = counted["unique_ids"] * (8 + 2 * 4 * 4)
    assert formula <= counted["bytes"] <= formula + STEPS * 2 * 4
    told = jaxdist.here("eval", "run", "--json", "eval.json")
    assert told.code == 0, told.err
    means = json.loads((jaxdist.folder / "eval.json").read_text())["heldout"]
    assert means["auc"] == pytest.approx(heldout["auc"], rel=1e-5)
    exported = []
    for name in ("alone", "run"):
        assert jaxdist.here("export", name, f"{name}.export").code == 0
        exported.append(jaxdist.folder / f"{name}.export" / "model.safetensors")
    sides = [
        np.memmap(file, np.float32, offset=min(t.offset for t in read_header(file).values()))
        for file in exported
    ]
    assert read_header(exported[0]).keys() == read_header(exported[1]).keys()
    np.testing.assert_allclose(sides[0], sides[1], rtol=1e-4, atol=1e-5)
    newest = max((run / "checkpoints").glob("step_*"))
    for file in sorted(newest.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    newest.rmdir()
    config = (run / "config.yaml").read_bytes()
    resume = ("train", "config.yaml", "--resume", "run.directory=run", _strategy(3))
    other = jaxdist.here(*resume, "model.row_scale=0.3")
    assert "form.scale 0.1 there, 0.3 here; resume with the configuration" in other.message
    assert (run / "config.yaml").read_bytes() == config, "a refused resume leaves the run as it was"
    again = jaxdist.here(*resume)
    assert again.code == 0, again.err
    assert f"resume from step {STEPS // 2}" in again.out
    assert _records(run, "heldout")[-1]["loss"] == pytest.approx(heldout["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_every_push_that_table_servers_acknowledge_counts_once(kills: int) -> None:
    """Also those of servers that leave on SIGTERM, as every second one does."""
    sums, seconds = killed(kills, takeover_seconds=2.0, signals=(signal.SIGKILL, signal.SIGTERM))
    assert len(seconds) == kills - 1, "the first server is stopped, and found by its silence"
    assert np.abs(sums[1]).max() > 0
    np.testing.assert_array_equal(*sums)


# Servers that join, die and leave: tests/param_server/test_table_team.py; bounded rows that move:
# test_bounded_tables.py there.
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_bounded_rows_keep_their_bits_while_servers_join_die_and_leave(
    tmp_path: Path, replicas: int
) -> None:
    """Rows of two clients in rounds, beside a store here to which nothing happens."""
    most, draws = 6 * WAYS, np.random.default_rng(3)
    store = open_store(replace(FORM, most=most), RowSgd(), 0)
    given = {"ranges": 6, "most_rows": most, "replicas": replicas, "consistency": BSP()}
    with table_servers(2, 2, run=tmp_path, **given) as (team, clients):

        def step() -> None:
            drawn = [_keys(draws.choice(ROWS, 40, replace=False)) for _ in clients]
            grads = [draws.normal(size=(len(rows), FORM.width)).astype(np.float32)
                     for rows in drawn]  # fmt: skip
            for client, rows in zip(clients, drawn, strict=True):
                np.testing.assert_array_equal(client.pull(rows), store.read(rows))
            for client, rows, own in zip(clients, drawn, grads, strict=True):
                client.push(rows, own, 0.5)
            rows, total = summed(np.concatenate(drawn), np.concatenate(grads))
            store.update(rows, total / np.float32(2), 0.5)

        def until(servers: int) -> None:
            deadline = time.monotonic() + 120
            while len(team.servers) != servers or not team.settled:
                assert time.monotonic() < deadline
                step()
            while replicas > 1 and not team.safe:
                assert time.monotonic() < deadline
                step()

        def signalled(number: signal.Signals) -> None:
            os.kill(team.servers[max(team.servers)].process.pid, number)
            before = max(team.servers)
            while before in team.servers:
                step()
            until(3)

        until(2)
        begun = [port for port, _ in team.leaders]
        write_request(tmp_path, 3)
        until(3)
        moved = [old != new for old, (new, _) in zip(begun, team.leaders, strict=True)]
        assert sum(moved) <= 1.2 / 3 * 6 or replicas > 1
        for number in (signal.SIGTERM, *(replicas - 1) * (signal.SIGKILL, signal.SIGKILL)):
            signalled(number)
        write_request(tmp_path, 2)
        until(2)
        every = _keys(np.arange(ROWS))
        for client in clients:
            np.testing.assert_array_equal(client.pull(every), store.read(every))
    assert store.evicted > 100


@pytest.mark.slow  # Without training processes: tests/param_server/test_hosted_servers.py.
def test_rows_keep_their_bits_with_servers_on_another_host_one_of_which_is_killed(
    jaxdist: Jaxdist, tmp_path: Path
) -> None:
    """The host is a command with an address of its own, beside a store to which nothing happens."""
    strategy = {"type": "hybrid", "servers": 2, "ranges": 6, "replicas": 2}
    (tmp_path / "config.yaml").write_text(json.dumps({**CLICKS, "strategy": strategy}))
    (tmp_path / "run.lock").touch()
    store, draws = open_store(FORM, RowSgd(), 0), np.random.default_rng(5)
    lines: list[str] = []
    given = {"ranges": 6, "replicas": 2, "consistency": BSP(), "takeover_seconds": 60.0}
    with table_servers(1, 2, run=tmp_path, **given) as (team, (client,)):
        team._note = lines.append

        def step() -> None:
            rows = np.sort(draws.choice(ROWS, 40, replace=False)).astype(np.uint32)
            grads = draws.normal(size=(40, FORM.width)).astype(np.float32)
            np.testing.assert_array_equal(client.pull(rows), store.read(rows))
            client.push(rows, grads, 0.5)
            store.update(rows, grads, 0.5)

        def until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120
            while not condition() or not team.settled or not team.safe:
                assert time.monotonic() < deadline, (lines, team.leaders)
                step()

        def elsewhere() -> int:
            return sum(str(place).startswith("127.0.0.2:") for place, _ in team.leaders)

        there = "servers", tmp_path, "--here", "--host", "127.0.0.2", "--json", "told.json"
        first = jaxdist.start(*there)
        until(lambda: elsewhere() == 2)
        assert [one["event"] for one in team.ask({"save": 1})] == ["done"] * 6
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: not elsewhere() and len(team.servers) == 3)
        process = jaxdist.start(*there)
        until(lambda: elsewhere() == 1)
        every = np.arange(ROWS, dtype=np.uint32)
        np.testing.assert_array_equal(client.pull(every), store.read(every))
    done = finish(process)
    assert (done.code, done.err) == (0, ""), done
    assert "this host offers" in done.out
    assert "table 4 has ended" in done.out
    told = json.loads((jaxdist.folder / "told.json").read_text())
    assert (told["server"], told["host"]) == (4, "127.0.0.2")


def _keys(numbers: np.ndarray) -> np.ndarray:
    """Return the keys of row numbers, ascending."""
    found = np.empty(len(numbers), KEY)
    users = FORM.fields["user"]
    found["field"] = numbers >= users
    found["id"] = np.where(numbers >= users, numbers - users, numbers)
    return unique_rows(found)[0]


@pytest.mark.slow
def test_a_server_without_followers_ends_the_run_with_its_name() -> None:
    with table_servers() as (team, (client,)):
        client.pull(np.arange(8, dtype=np.uint32))
        team.servers[1].process.kill()
        with pytest.raises(RunError, match=r"table 1 ended \(signal SIGKILL\).*--resume"):
            client.wait_until(lambda: False, "the end")
        with pytest.raises(RunError, match="table 1 ended"):
            team.ask({"count": 0})


def _table_server(run: Path) -> int:
    """Return the process that has the log of the run's table server 1 as its standard error."""
    log = (run / "logs" / "table_1.log").resolve()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "fd" / "2").resolve() == log:
                    return int(folder.name)
            except OSError:
                continue
    raise AssertionError("no such process")
