"""Hooks of the user's: what is called when, how they end a run, and what none of them costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from chosen import quick
from runs import DIGITS, Jaxdist, metrics, steps

import jaxdist as jd
from jaxdist.errors import STOPPED, ConfigError, RunError
from jaxdist.run import job
from jaxdist.run.hooks.calls import HookCalls
from jaxdist.run.hooks.contract import Outcome, Run, StepMetrics

SHORT = {
    **DIGITS,
    "train": {"steps": 6, "batch_size": 64, "log_every": 2},
    "eval": {"every": 3, "batches": 2},
    "checkpoint": {"every": 4},
}
SEEN: list[Any] = []


class Seen(jd.Hook):
    """Writes down what it is told."""

    def __init__(self, name: str = "seen") -> None:
        self.name, self.told = name, SEEN
        self.told.clear()

    def start(self, run: Run) -> None:
        self.run = run
        self.told.append(("start", run.first_step, run.total_steps))

    def step(self, run: Any, step: int, metrics: StepMetrics) -> None:
        self.told.append(("step", step, metrics["loss"]))

    def evaluation(self, run: Any, step: int, means: Any) -> None:
        self.told.append(("evaluation", step, means["loss"]))

    def save(self, run: Any, step: int, path: Path) -> None:
        self.told.append(("save", step, path))

    def record(self, run: Any, step: int, split: str, values: Any) -> None:
        if split != "goodput":
            self.told.append(("record", step, split))

    def end(self, run: Any, outcome: Outcome) -> None:
        self.told.append(("end", outcome.step))
        self.outcome = outcome


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def told(what: str) -> list[Any]:
    return [one[1:] for one in SEEN if one[0] == what]


@pytest.mark.full
def test_what_is_called_when():
    hook = Seen()
    found = jd.fit(SHORT, hooks=[hook], quiet=True)
    records = metrics(found.directory)
    losses = {r["step"]: r["loss"] for r in records if r["split"] == "train"}
    assert (SEEN[0], SEEN[-1]) == (("start", 0, 6), ("end", 6))
    assert [step for step, _ in told("step")] == [1, 2, 3, 4, 5, 6]
    assert {step: loss for step, loss in told("step") if step in losses} == losses
    heldout = [(r["step"], r["loss"]) for r in records if r["split"] == "heldout"]
    assert told("evaluation") == heldout
    assert [step for step, _ in heldout] == [3, 6]
    # The first evaluation is the best so far, and is saved as well.
    assert [step for step, _ in told("save")] == [3, 4, 6]
    assert all(path.is_dir() for step, path in told("save"))
    assert told("record") == [(r["step"], r["split"]) for r in records]
    assert hook.run.id
    assert hook.run.directory == found.directory
    outcome = hook.outcome
    assert (outcome.stopped_by, outcome.error) == (None, None)
    assert outcome.metrics["loss"] == found.metrics["loss"]
    assert outcome.heldout["loss"] == found.heldout["loss"]
    assert outcome.goodput["lives"][0]["last_step"] == 6


@pytest.mark.full
def test_a_run_that_goes_on_tells_from_where():
    jd.fit(SHORT, ["train.steps=4"], quiet=True)
    jd.fit(SHORT, hooks=[Seen()], resume=True, quiet=True)
    assert SEEN[0] == ("start", 4, 6)
    assert [step for step, _ in told("step")] == [5, 6]


class Early(jd.Hook):
    """Ends the run once a step is reached."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, run: Run, step: int, metrics: StepMetrics) -> None:
        if step == self.last:
            run.stop("far enough")


@pytest.mark.full
def test_a_hook_ends_the_run_with_a_checkpoint_and_exit_code_0(
    capsys: pytest.CaptureFixture[str],
):
    hook = Seen()
    found = jd.fit(SHORT, hooks=[Early(2), hook])
    # It is told while the next step is under way, after which the run ends.
    assert (found.step, steps(found.directory)[-1]) == (3, 3)
    assert (found.stopped_by, found.exit_code) == ("Early: far enough", 0)
    assert hook.outcome.stopped_by == "Early: far enough"
    out = capsys.readouterr().out
    assert "Early: far enough: this hook ended the run after step 3 of 6\n" in out
    # There is nothing to continue, so the output ends like that of a run that took all its steps.
    assert "--resume" not in out
    assert "done   step 3" in out
    assert (found.directory / "loss.png").exists()
    again = jd.fit(SHORT, resume=True, quiet=True)
    assert (again.step, again.stopped_by) == (6, None)


def test_a_signal_is_not_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch):
    class Signal(jd.Hook):
        def step(self, run: Run, step: int, metrics: StepMetrics) -> None:
            import os
            import signal

            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    found = jd.fit(SHORT, hooks=[Signal()], quiet=True)
    assert (found.stopped_by, found.exit_code) == ("SIGTERM", STOPPED)
    assert 3 <= found.step < 6


class Broken(jd.Hook):
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        def fail(*_: Any) -> None:
            raise KeyError("no such thing")

        setattr(self, where, fail)


@pytest.mark.parametrize(
    "where",
    quick("step", "end", of=["start", "step", "evaluation", "save", "record", "end"], slow=True),
)
@pytest.mark.every(2)
def test_a_hook_that_raises_is_named_and_all_hear_of_the_end(where: str):
    first, last = Seen(), Seen()
    with pytest.raises(RunError, match=rf"hook Broken raised in its {where}, at step") as raised:
        jd.fit(SHORT, hooks=[first, Broken(where), last], quiet=True)
    assert "KeyError: 'no such thing'" in str(raised.value)
    assert "test_hooks_contract.py" in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)
    assert len(told("end")) == 2
    for hook in (first, last):
        assert (hook.outcome.error is None) == (where == "end")
    if where in ("save", "end"):
        assert jd.fit(SHORT, resume=True, quiet=True).step == 6


def test_a_config_that_cannot_be_built_begins_no_hook():
    with pytest.raises(ConfigError):
        jd.fit(SHORT, ["train.batch_size=63"], hooks=[Seen()], quiet=True)
    assert SEEN == []


def test_what_is_no_hook_is_refused_before_the_run_begins():
    with pytest.raises(ConfigError, match="pass an instance, not the class"):
        jd.fit(SHORT, hooks=[Seen], quiet=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"3 is not a hook: pass a jaxdist\.Hook"):
        jd.fit(SHORT, hooks=[3], quiet=True)  # pyright: ignore[reportArgumentType]
    assert not Path("runs").exists()


@pytest.mark.full
def test_hooks_that_a_config_names(jaxdist: Jaxdist):
    own = {"type": "import", "path": f"{__name__}:Seen", "args": {"name": "mine"}}
    jaxdist.config(SHORT, run={"hooks": [own]})
    done = jaxdist.here("train", "config.yaml")
    assert (done.code, done.err) == (0, ""), done
    assert SEEN[-1] == ("end", 6)
    for path, words in {
        f"{__name__}:Nothing": "has no attribute 'Nothing'",
        "builtins:dict": "returned a dict, but must return a jaxdist.Hook",
    }.items():
        jaxdist.config(SHORT, run={"hooks": [{"type": "import", "path": path}]})
        done = jaxdist.here("train", "config.yaml", "run.directory=none")
        assert done.code == 2
        assert "run.hooks.0" in done.message
        assert words in done.message
    assert not (jaxdist.folder / "none").exists()


@pytest.mark.full
def test_no_hook_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    """Nothing is called at a step, and nothing is told of a record."""
    made: list[Any] = []
    plain = job.RunHooks

    def hooks(found: Any) -> Any:
        made.extend(found)
        return plain(found)

    monkeypatch.setattr(job, "RunHooks", hooks)
    jd.fit(SHORT, ["train.steps=2"], quiet=True)
    assert not [one for one in made if isinstance(one, HookCalls)]
    jd.fit(SHORT, ["train.steps=2"], hooks=[Seen()], quiet=True)
    assert len([one for one in made if isinstance(one, HookCalls)]) == 1


class Unread:
    """Stands for an array on a device, and counts how often it is copied from there."""

    copies = 0

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.copies += 1
        return np.array([1.5, 2.0], np.float32)


def test_metrics_are_copied_once_and_only_where_they_are_read():
    values = Unread()
    found = StepMetrics(("loss", "grad_norm"), values, 0.25)
    assert (len(found), list(found), found.seconds) == (2, ["loss", "grad_norm"], 0.25)
    assert values.copies == 0
    assert dict(found) == {"loss": 1.5, "grad_norm": 2.0}
    assert found["loss"] == 1.5
    assert values.copies == 1
    with pytest.raises(KeyError):
        found["accuracy"]
    assert StepMetrics(("loss",), jnp.ones(1), 0.0)["loss"] == 1.0


OF_A_TEAM = """
import jaxdist

class Everywhere(jaxdist.Hook):
    every_process = True

    def start(self, run):
        import jax
        self.process = jax.process_index()
        self.file = open(f"seen_{self.process}", "w")

    def step(self, run, step, metrics):
        print(step, metrics["loss"], file=self.file, flush=True)

    def end(self, run, outcome):
        print("end", outcome.step, outcome.stopped_by, file=self.file, flush=True)


class First(jaxdist.Hook):
    def step(self, run, step, metrics):
        if step == 2:
            run.stop("far enough")


class Second(jaxdist.Hook):
    every_process = True

    def step(self, run, step, metrics):
        import jax
        if step == 2 and jax.process_index() == 1:
            run.stop("far enough")
"""


@pytest.mark.parametrize(
    "hook",
    [pytest.param("First", marks=pytest.mark.full), pytest.param("Second", marks=pytest.mark.slow)],
)
def test_processes_of_an_agent_end_at_one_step_where_a_hook_says_so(jaxdist: Jaxdist, hook: str):
    """The run has come to its end: the agent begins nothing anew, and its exit code is 0."""
    (jaxdist.folder / "team_hooks.py").write_text(OF_A_TEAM)
    names = ({"type": "import", "path": f"team_hooks:{name}"} for name in ("Everywhere", hook))
    train = {"steps": 5000, "batch_size": 64, "log_every": 1000}
    jaxdist.config(
        SHORT,
        run={"hooks": [*names]},
        train=train,
        eval={"every": None},
        checkpoint={"every": 5000},
    )
    done = jaxdist.train("--elastic", "--processes", 2)
    assert done.code == 0, done
    seen = [(jaxdist.folder / f"seen_{at}").read_text().splitlines() for at in range(2)]
    assert seen[0] == seen[1]
    *_, last, end = seen[0]
    step = int(last.split()[0])
    assert 3 <= step < 5000
    assert end == f"end {step} {hook}: far enough"
    assert steps(jaxdist.run) == [step]
    assert "generation" not in done.out
