"""`jaxdist report`: every second of a run, of one that was killed and resumed too."""

from __future__ import annotations

import json
import re

import pytest
from runs import RUN, Jaxdist, kill_at_step

from jaxdist.metrics.account import Activity
from jaxdist.metrics.goodput import SPLIT, joined_lives
from jaxdist.metrics.writer import read_metrics


def reported(jaxdist: Jaxdist) -> dict:
    """The JSON of a report whose kinds add up."""
    done = jaxdist.here("report", RUN, "--json", "report.json")
    assert (done.code, done.err) == (0, ""), done
    assert max(map(len, done.out.splitlines())) <= 80
    found = json.loads((jaxdist.folder / "report.json").read_text())
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"], rel=0.01)
    assert f"goodput {found['goodput']:.1%}" in done.out
    return found


def test_a_run_tells_where_its_time_went(trained: Jaxdist, finished) -> None:
    found = reported(trained)
    spent = found["seconds"]
    for kind in ("start", "compile", "step", "evaluation", "checkpoint_blocked"):
        assert spent[kind] > 0, kind
    assert spent["lost_work"] == spent["recovery"] == found["lost_steps"] == 0
    (life,) = found["lives"]
    assert (life["first_step"], life["last_step"]) == (0, 24)
    table = [line for line in finished[1].splitlines() if line.startswith(("time", "      "))]
    assert table[0].startswith("time ")
    assert "goodput" in table[0]
    assert any(line.split()[0] == "step" for line in table[1:])
    records = [r for r in read_metrics(trained.run) if r["split"] == SPLIT]
    # At each save, and where the run began and ended.
    assert {record["step"] for record in records} >= {0, 8, 16, 24}


def test_two_clocks_agree(trained: Jaxdist) -> None:
    """What the account counts between two records is what passed between them."""
    records = [r for r in read_metrics(trained.run) if r["split"] == SPLIT]
    passed = records[-1]["time"] - records[0]["time"]
    counted = records[-1]["wall_seconds"] - records[0]["wall_seconds"]
    assert counted == pytest.approx(passed, rel=0.01, abs=0.01)


# Records of several attempts: tests/metrics/test_goodput.py; a run that is killed: test_resume.py.
@pytest.mark.slow
def test_a_killed_run_has_a_report_and_its_lives_are_joined(jaxdist: Jaxdist) -> None:
    energy = {"meter": "model", "watts": 100}
    given = {"checkpoint": {"every": 40}, "eval": {"every": 40}, "energy": energy}
    jaxdist.config(train={"steps": 400}, **given)
    kill_at_step(jaxdist.start("train", "config.yaml"), jaxdist.run, 100)
    first = reported(jaxdist)
    assert len(first["lives"]) == 1
    assert first["seconds"]["step"] > 0
    done = jaxdist.train("--resume")
    assert done.code == 0, done
    assert "2 attempts" in done.out
    found = reported(jaxdist)
    before, after = found["lives"]
    assert before["kept_step"] == after["first_step"] > 0
    assert after["last_step"] == 400
    assert found["seconds"]["recovery"] > 0
    assert found["seconds"]["idle"] >= found["gaps_seconds"][0] > 0
    if before["last_step"] > before["kept_step"]:
        assert found["seconds"]["lost_work"] > 0  # of what its records tell
    drawn = found["energy"]
    assert drawn["joules"] == pytest.approx(100 * drawn["seconds"], rel=0.01)
    # Lost steps are in it, as far as the records tell.
    steps = before["last_step"] + 400 - after["first_step"]
    assert drawn["examples"] % steps == 0 < drawn["examples"]
    assert "energy modelled, not measured: 1 x 100 W" in done.out
    assert re.search(r"J \((99|100)\.\d W\), ", done.out), done.out  # of seconds that are rounded


def test_nothing_to_report(trained: Jaxdist) -> None:
    nowhere = trained.here("report", "runs/other")
    assert nowhere.code in (2, 3)
    assert "runs/other is not a run directory" in nowhere.message
    file = trained.run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if f'"{SPLIT}"' not in line))
    old = trained.here("report", RUN)
    assert old.code == nowhere.code
    assert "has no records of time (split goodput): an older version wrote the run" in old.message
    file.unlink()
    dead = trained.here("report", RUN)
    assert dead.code == nowhere.code
    assert "no metrics can be read" in dead.message


def test_kinds_have_names_of_their_own(trained: Jaxdist) -> None:
    found = joined_lives(read_metrics(trained.run))
    assert found is not None
    assert set(found.as_json()["seconds"]) == set(Activity)


def test_hosts_that_made_no_copies_are_told(trained: Jaxdist) -> None:
    event = {"time": 1.0, "generation": 2, "event": "uncopied", "host": "b", "why": "no copy"}
    journal = trained.run / "elastic.jsonl"
    journal.write_text(json.dumps(event) + "\n")
    try:
        done = trained.here("report", RUN, "--json", "report.json")
    finally:
        journal.unlink()
    assert "copies generation 2, b: no copy" in done.out.splitlines()
    assert json.loads((trained.folder / "report.json").read_text())["uncopied"] == [event]
