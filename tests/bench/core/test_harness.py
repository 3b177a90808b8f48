from __future__ import annotations

import gc
import os
import sys

import pytest

from benchmarks.core.harness import (
    Sample,
    alternate_processes,
    interleave,
    paired_ratio,
    process_seconds,
)
from jaxdist.errors import RunError


def test_ours_and_the_reference_alternate_and_change_who_goes_first():
    calls: list[str] = []
    interleave(lambda: calls.append("a"), lambda: calls.append("b"), warmup=1, repeats=3)
    assert "".join(calls) == "abbaabba"


def test_each_call_is_timed_alone_and_warm_up_is_left_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("benchmarks.core.harness.time.perf_counter", lambda: clock[0])
    ours = iter([100.0, 1.0, 2.0, 9.0])
    reference = iter([100.0, 2.0, 2.0, 3.0])

    def wait(times) -> None:
        clock[0] += next(times)

    mine, other = interleave(lambda: wait(ours), lambda: wait(reference), warmup=1, repeats=3)
    assert mine.seconds == (1.0, 2.0, 9.0)
    assert other.seconds == (2.0, 2.0, 3.0)
    assert (mine.median, other.median) == (2.0, 2.0)
    assert paired_ratio(mine, other) == 1.0


@pytest.mark.full
def test_garbage_is_not_collected_while_the_clock_runs_and_is_afterwards():
    during: list[bool] = []
    interleave(lambda: during.append(gc.isenabled()), lambda: None, warmup=0, repeats=1)
    assert during == [False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        interleave(lambda: 1 / 0, lambda: None)
    assert gc.isenabled()


def test_spread_is_that_of_the_middle_half():
    assert Sample((1.0, 2.0, 3.0, 4.0, 1000.0)).iqr == 2.0
    assert Sample((5.0,)).iqr == 0.0


def test_a_drift_that_hits_both_leaves_the_paired_ratio_alone():
    reference = [1.0, 1.0, 2.0, 4.0, 8.0]
    ours = Sample(tuple(1.5 * seconds for seconds in reference))
    assert paired_ratio(ours, Sample(tuple(reference))) == 1.5


def test_processes_alternate_and_give_wall_and_cpu_time(tmp_path):
    log = tmp_path / "log"
    busy = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass\n"
    commands = [
        [sys.executable, "-S", "-c", f"open({str(log)!r}, 'a').write({name!r}); {body}"]
        for name, body in (("a", f"exec({busy!r})"), ("b", "import time; time.sleep(0.2)"))
    ]
    ours, reference = alternate_processes(*commands, warmup=1, repeats=2)
    assert log.read_text() == "abbaab"
    assert len(ours.wall.seconds) == len(reference.cpu.seconds) == 2
    assert min(ours.cpu.seconds) >= 0.1  # it burns that much, by the process's own clock
    assert min(reference.wall.seconds) >= 0.2  # it sleeps that long


def test_the_environment_reaches_the_process():
    check = "import os; assert os.environ['MARK'] == '7'"
    command = [sys.executable, "-S", "-c", check]
    process_seconds(command, environ={**os.environ, "MARK": "7"})
    with pytest.raises(RunError, match=r"MARK.*exit code 1: AssertionError"):
        process_seconds(command, environ={**os.environ, "MARK": "8"})


def test_a_process_that_hangs_is_ended_and_named():
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with pytest.raises(RunError, match=r"sleep\(60\)` cannot be timed: .* more than 0.3 s"):
        process_seconds(command, timeout_seconds=0.3)
