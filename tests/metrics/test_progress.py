from __future__ import annotations

import io
import os
import re
import termios

import pytest
from rich.console import Console

from jaxdist.metrics.progress import Progress
from jaxdist.metrics.rates import Efficiency, SmoothedStepTime, format_rate


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def log() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal(width: int = 80) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False, _environ={}
    )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def lines_of(console: Console) -> list[str]:
    """What was drawn, each redrawing of the bar as a line of its own."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", text_of(console)) if line.strip()]


def test_a_log_gets_the_first_line_the_last_and_one_per_interval():
    console, clock = log(), Clock()
    with Progress(100, 0, "tokens", 4096, console, seconds_between_lines=10, clock=clock) as bar:
        for step in range(1, 101):
            clock.seconds += 0.5
            bar.update(step, loss=4 / step, step_seconds=9.0 if step == 1 else 0.5)
    steps = [int(n) for n in re.findall(r"^step (\d+)/100", text_of(console), re.MULTILINE)]
    assert steps == [1, 21, 41, 61, 81, 100]
    lines = text_of(console).splitlines()
    assert lines[0] == "step 1/100  loss 4.000  9.0 s for this step, compilation included"
    assert lines[1] == "step 21/100  loss 0.190  8,192 tokens/s  500 ms/step  0:40 left"


def test_a_log_tells_the_mfu_where_the_peak_is_known():
    console = log()
    measured = Efficiency("tokens", 6e9, devices=2, flops_per_second=1e14)
    with Progress(9, 0, "tokens", 4096, console, efficiency=measured) as bar:
        bar.update(1, loss=1.0, step_seconds=9.0)
        bar.update(9, loss=1.0, step_seconds=0.5)
    assert "8,192 tokens/s  500 ms/step  24.6% MFU  0:00 left" in text_of(console)
    assert dict(bar.measured(0.5)) == {"tokens_per_second_per_device": 4096, "mfu": 0.24576}


def test_a_log_after_a_resume_counts_what_is_left_of_the_whole():
    console = log()
    with Progress(2000, 1000, "examples", 256, console, seconds_between_lines=0) as bar:
        bar.update(1001, loss=1.0, step_seconds=3.0)
        bar.update(1002, loss=1.0, step_seconds=0.1)
    assert text_of(console).splitlines()[1] == (
        "step 1002/2000  loss 1.000  2,560 examples/s  100 ms/step  1:40 left"
    )


def test_notes_and_evaluations_are_whole_lines_whatever_they_hold():
    console = log()
    with Progress(10, 0, "tokens", 1, console) as bar:
        bar.note("saved [bold]checkpoint[/bold] " + "x" * 100)
        bar.evaluation(5, {"loss": 1.25, "perplexity": 3.4903})
    assert text_of(console).splitlines() == [
        "saved [bold]checkpoint[/bold] " + "x" * 100,
        "step 5 heldout  loss 1.250  perplexity 3.490",
    ]


def test_a_terminal_gets_a_bar_with_notes_above_it():
    console = terminal()
    with Progress(2000, 0, "tokens", 16_384, console) as bar:
        bar.update(200, loss=5.0, step_seconds=9.0)
        bar.update(200, loss=1.834, step_seconds=0.038)
        bar.note("saved step 200")
    *earlier, last = lines_of(console)
    assert "saved step 200" in earlier
    assert last.startswith("━")
    assert last.endswith("  10%  200/2000  loss 1.834  431,158 tokens/s  38 ms/step  1:08 left")


def test_before_the_first_step_the_bar_says_what_is_going_on():
    console = terminal()
    with Progress(2000, 0, "tokens", 1, console):
        pass
    assert "0%  0/2000  compiling the first step" in text_of(console)


@pytest.mark.parametrize("width", [30, 50, 80, 200])
@pytest.mark.parametrize("make", [terminal, lambda width: Console(file=io.StringIO(), width=width)])
def test_a_line_never_wraps(width, make):
    console = make(width)
    with Progress(10**7, 0, "examples", 10**9, console, seconds_between_lines=0) as bar:
        for step, loss in ((1, 1e9), (9_999_999, 1e-9), (10**7, float("nan"))):
            bar.update(step, loss=loss, step_seconds=0.0123 if step > 1 else 123.0)
    lines = lines_of(console)
    assert lines
    assert max(map(len, lines)) <= width


def test_the_widest_sensible_line_keeps_every_number_at_80_columns():
    console = log()
    with Progress(1_000_000, 0, "examples", 10**6, console, seconds_between_lines=0) as bar:
        bar.update(1, loss=1e9, step_seconds=60)
        bar.update(100_000, loss=1e9, step_seconds=12.3)
    assert text_of(console).splitlines()[-1].endswith("12.3 s/step  128d 3h left")


def test_a_disabled_bar_shows_nothing():
    for console in (log(), terminal()):
        with Progress(10, 0, "tokens", 1, console, enabled=False) as bar:
            bar.update(1, loss=1.0, step_seconds=1.0)
            bar.note("hidden")
            bar.evaluation(1, {"loss": 1.0})
        assert text_of(console) == ""


def test_the_bar_leaves_the_terminal_in_order_when_the_loop_raises():
    console = terminal()
    with pytest.raises(RuntimeError), Progress(10, 0, "tokens", 1, console):
        raise RuntimeError
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_step_time_forgets_the_compilation_and_follows_a_change():
    time = SmoothedStepTime()
    time.add(9.0)
    assert time.seconds == 9.0
    for _ in range(20):
        time.add(0.1)
    assert time.seconds == pytest.approx(0.1)
    for _ in range(100):
        time.add(0.2)
    assert time.seconds == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (float("inf"), "?"),
        (99.94, "99.9"),
        (999_999, "999,999"),
        (2.5e9, "2.5G"),
        (1e15, "1.0e+15"),
    ],
)
def test_rates_are_short(rate, text):
    assert format_rate(rate) == text


@pytest.mark.parametrize(("columns", "redrawn"), [(0, False), (80, True)])
def test_a_terminal_of_no_size_is_a_launchers_and_gets_whole_lines(columns, redrawn):
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    seen = b""
    with open(slave, "w") as file, open(master, "rb", buffering=0) as screen:
        with Progress(4, 0, "tokens", 1, Console(file=file, _environ={"TERM": "xterm"})) as bar:
            for step in range(1, 5):
                bar.update(step, loss=1.0, step_seconds=0.1)
        file.write("end")
        file.flush()
        while not seen.endswith(b"end"):
            seen += screen.read(4096)
    assert (b"\x1b[" in seen) == redrawn, seen
    assert b"4/4" in seen


def test_a_file_is_no_terminal_even_where_colours_are_forced(tmp_path):
    with (tmp_path / "log").open("w+") as file:
        console = Console(file=file, _environ={"FORCE_COLOR": "1"})
        assert console.is_terminal
        with Progress(4, 0, "tokens", 1, console) as bar:
            bar.update(4, loss=1.0, step_seconds=0.1)
        file.seek(0)
        assert file.read().startswith("step 4/4  loss 1.000")
