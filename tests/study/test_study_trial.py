"""What a study remembers of its runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jaxdist.errors import RunError
from jaxdist.study.trial import OutcomeJournal, Trial, TrialOutcome, trial_key

TRIAL = Trial("lamb", 64, 3, 0.01, 7)
DONE = TrialOutcome(TRIAL, 40, {"loss": 0.5, "accuracy": 0.9}, False, 1.5)
BROKEN = TrialOutcome(TRIAL, 40, {"loss": math.nan, "accuracy": 0.1}, True, 1.5)


def test_a_journal_gives_back_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    OutcomeJournal(path, Trial).add("a", DONE)
    OutcomeJournal(path, Trial).add("b", BROKEN)
    again = OutcomeJournal(path, Trial)
    assert again.get("a") == DONE
    broken = again.get("b")
    assert broken is not None
    assert broken.diverged
    assert math.isnan(broken.metrics["loss"])
    assert again.get("c") is None


@pytest.mark.parametrize("cut", range(1, 120, 17))
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "runs.jsonl"
    journal = OutcomeJournal(path, Trial)
    journal.add("a", DONE)
    journal.add("b", DONE)
    path.write_bytes(path.read_bytes()[:-cut])
    torn = OutcomeJournal(path, Trial)
    assert torn.get("a") == DONE
    assert torn.get("b") is None
    torn.add("b", DONE)
    assert OutcomeJournal(path, Trial).get("b") == DONE


@pytest.mark.parametrize("line", ["nonsense", '{"key": "a"}', "[1]"])
def test_a_line_that_is_no_run_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    OutcomeJournal(path, Trial).add("a", DONE)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RunError, match=r"runs\.jsonl:2 is not a run of a study") as caught:
        OutcomeJournal(path, Trial)
    assert line[:20] in str(caught.value)


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/runs\.jsonl: File exists"):
        OutcomeJournal(tmp_path / "file" / "runs.jsonl", Trial)
    journal = OutcomeJournal(tmp_path / "runs.jsonl", Trial)
    journal.path.unlink()
    journal.path.mkdir()
    with pytest.raises(RunError, match=r"runs\.jsonl: Is a directory"):
        journal.add("a", DONE)


def test_identity_is_of_the_values_not_of_their_order() -> None:
    assert trial_key({"a": 1, "b": 2}) == trial_key({"b": 2, "a": 1})
    assert trial_key({"a": 1}) != trial_key({"a": 2})


def test_scores_put_better_runs_first() -> None:
    better = TrialOutcome(TRIAL, 40, {"loss": 0.4, "accuracy": 0.9}, False, 1.0)
    text = TrialOutcome(TRIAL, 40, {"loss": 0.5}, False, 1.0)
    less = TrialOutcome(TRIAL, 40, {"loss": 0.4}, False, 1.0)
    assert better.score > DONE.score > BROKEN.score
    assert less.score > text.score
    assert (DONE.metric, text.metric) == ("accuracy", "loss")
