"""The scoreboard of faults: what is asked for, and small numbers of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.elastic.scoreboard import board, elsewhere, saves, strikes
from benchmarks.elastic.scoreboard.row import Row, Score
from jaxdist.errors import ConfigError, RunError


def test_rows_are_asked_for_by_number():
    assert board.asked("all") == {name: score.trials for name, score in board.SCORES.items()}
    with pytest.raises(ConfigError, match=r"--scoreboard 'R02': did you mean 'R"):
        board.asked("R02")
    with pytest.raises(ConfigError, match=r"--scoreboard 'R08=x': give a number of trials, such"):
        board.asked("R08=x")


def test_a_row_that_fails_is_told_in_its_place(monkeypatch: pytest.MonkeyPatch):
    def fails(trials: int, seed: int) -> Row:
        raise RunError("nothing has happened")

    scores = {
        "R08": Score("a", "b", 3, fails),
        "R29": Score("c", "d", 2, lambda n, s: Row("e", held=True)),
    }
    monkeypatch.setattr(board, "SCORES", scores)

    def breaks(trials: int, seed: int) -> Row:
        raise ProcessLookupError("No such process")

    scores["R18"] = Score("e", "f", 1, breaks)
    (listing,) = board.scoreboard("R08,R29=7,R18").listings
    first, second, third = (row[:6] for row in listing.rows)
    assert third[4] == "failed: ProcessLookupError: No such process"
    assert first == ("R08", "a", 3, "b", "failed: nothing has happened", "no")
    assert second == ("R29", "c", 7, "d", "e", "yes")


def test_bits_that_flip_are_found_and_named():
    assert elsewhere.flipped_bits(5, seed=0).held


@pytest.mark.slow  # tests/elastic
def test_batches_that_follow_the_workers():
    row = elsewhere.changed_workers(1, seed=0)
    assert row.held, row


@pytest.mark.slow
def test_saves_that_are_cut_off_and_generations_that_wake():
    assert saves.killed_saves(2, seed=0).held
    assert saves.woken_generations(1, seed=0).held


@pytest.mark.slow
def test_processes_that_are_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strikes, "APART", 150)
    hits, same = strikes.struck(1, 0, 2, 9)
    assert same
    assert [hit.named for hit in hits] == [True]


def test_events_and_steps_are_read_from_the_run(tmp_path: Path):
    lines = [{"generation": 1, "event": "begun"}, {"generation": 2, "event": "begun", "x": 1}]
    (tmp_path / "elastic.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert strikes.event(tmp_path, 2, "begun") == lines[1]
    assert strikes.event(tmp_path, 2, "lost") is None
    assert strikes.at_work(tmp_path) == lines[1]
    with (tmp_path / "elastic.jsonl").open("a") as file:
        file.write('{"generation": 2, "event": "slow"}\n')
        assert file.flush() or strikes.at_work(tmp_path) == lines[1]
        file.write('{"generation": 2, "event": "lost"}\n')
    assert strikes.at_work(tmp_path) is None  # the next has not begun
    assert strikes.last_step(tmp_path) == 0
    steps = "".join(json.dumps({"step": step, "split": "train"}) + "\n" for step in range(999))
    (tmp_path / "metrics.jsonl").write_text(steps + '{"step": 99')
    assert strikes.last_step(tmp_path) == 998  # what is cut off does not count
