"""What a child process of a comparison gives if it crashes, hangs or starves."""

from __future__ import annotations

import pytest
from answering import answer

from jaxdist.parity.children import answers


def test_what_ends_a_process_is_an_answer_and_the_others_go_on():
    found = [*answers(answer, [2, 13, 3, 13, 4], jobs=2)]
    assert found[::2] == [4, 9, 16]
    for ended in found[1::2]:
        assert ended.reason.startswith("the process ended (signal SIGABRT): ")
        assert ended.reason.endswith("x.cc:497] Check failed: 1 == 2")


@pytest.mark.full
def test_a_process_that_does_not_answer_is_ended():
    found = [*answers(answer, [14, 15], jobs=2, limit_seconds=1.0)]
    assert [ended.reason for ended in found] == [
        "the process gave no answer and was idle for 1 s",
        "the process gave no answer in 1 s of CPU time",
    ]


@pytest.mark.full
def test_a_process_that_a_busy_machine_starves_still_answers():
    """It takes 2 s, of which it has a CPU for 0.2."""
    assert [*answers(answer, [16], jobs=1, limit_seconds=1.0)] == [256]
