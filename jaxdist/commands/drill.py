"""`jaxdist drill`: a run during which processes are killed and stopped on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxdist.config import read
from jaxdist.elastic.agent import Agent, AgentSettings
from jaxdist.elastic.drill import Drilled, Striker, every_of, judge_drill, recoveries_of, strikes_of
from jaxdist.errors import ConfigError, RunError
from jaxdist.heartbeat.journal import Journal, read_journal
from jaxdist.metrics.goodput import joined_lives
from jaxdist.metrics.report import write_json
from jaxdist.metrics.writer import read_metrics
from jaxdist.types import JsonObject


def drill(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    failures: int,
    processes: int,
    seed: int = 0,
    json_file: Path | None = None,
    say: Callable[[str], None],
    fork_module: str,
) -> Drilled:
    """Train a config under an agent, inject failures at random steps, and return the recoveries.

    Args:
      path: the configuration file, to which `overrides` are applied.
      failures: the number of processes to kill or stop, one after another.
      processes: the number of processes of the run.
      seed: the seed of the steps, processes and kinds of failures.
      json_file: a file for the results as JSON, or None to write none.
      say: a function that prints a line to the user.
      fork_module: see `jaxdist.elastic.agent.Agent`.

    Raises:
      ConfigError: the config has no number of steps.
      RunError: the run does not finish, or finishes before all failures have occurred; or the
        fraction of time that was used for steps is less than nine tenths of the predicted fraction.
    """
    values = read(path, overrides).values
    train, saves = (_section(values, name) for name in ("train", "checkpoint"))
    steps = train.get("steps")
    if not isinstance(steps, int):
        raise ConfigError(
            f"{path} does not set the number of steps, which a drill needs: set train.steps, such "
            "as train.steps=2000, and not train.epochs"
        )
    strikes = strikes_of(failures, steps, processes, seed)
    strikers: list[Striker] = []

    def record(journal: Journal, tell: Callable[[str], None]) -> Striker:
        strikers.append(Striker(journal, tell, strikes))
        return strikers[0]

    args = {"config": str(path), "extra": list(overrides), "resume": False}
    code = Agent(AgentSettings(args, processes), say, fork_module=fork_module, record=record).run()
    (striker,) = strikers
    if code:
        raise RunError(
            f"a signal stopped the run (exit code {code}), but a drill needs a run that ends by "
            "itself: start the drill again"
        )
    if striker.left or striker.run is None:
        raise RunError(
            f"the run ended after {len(striker.struck)} of {failures} failures: set more steps "
            "(train.steps), or fewer failures (--failures)"
        )
    records = read_metrics(striker.run)
    found = joined_lives(records)
    assert found is not None, "a run that has taken steps has written down its time"
    recoveries = recoveries_of(strikes, striker.struck, read_journal(striker.run), found)
    every = every_of(records, saves.get("memory_every", 10), saves.get("every", 500))
    silent = AgentSettings(args, processes).stuck_timeouts.silent_seconds
    drilled = judge_drill(recoveries, found, every, silent)
    for line in drilled.lines():
        say(line)
    write_json(json_file, {"run": str(striker.run), **drilled.as_json()}, what="drill")
    if not drilled.held:
        raise RunError(
            f"the run used {drilled.achieved:.1%} of its time for steps, less than nine tenths of "
            f"the predicted {drilled.predicted:.1%}: the list of recoveries above and the figures "
            f"{striker.run}/flight_*.png show where time was lost"
        )
    return drilled


def _section(values: JsonObject, name: str) -> JsonObject:
    """Return a section of an unvalidated config, or {} if the section is missing.

    The run itself reports errors in the config.
    """
    found = values.get(name)
    return found if isinstance(found, dict) else {}
