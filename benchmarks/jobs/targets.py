"""The shipped commands that train on two cores, and the targets in the heads of their configs."""

from __future__ import annotations

import math
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.core.report import Figure
from benchmarks.quickstart import train
from jaxdist.errors import JaxdistError, RunError, did_you_mean
from jaxdist.metrics.writer import read_metrics

TRAINED = tuple(
    Path(f"configs/{name}.yaml")
    for name in (
        "mlp/digits", "mlp/digits_ring", "cnn/digits", "mlp/fashion", "cnn/fashion",
        "recommend/movielens", "recommend/movielens_clicks", "resnet/fashion",
        "gpt/quickstart", "gpt/moe", "gpt/lamb", "bert/small",
    )
)  # fmt: skip
"""The configs whose commands need no other run before, and no text that the user installs."""
BUDGET_SECONDS = 2400.0
TIMEOUT_SECONDS = 1800.0
_COMMAND = re.compile(r"# command: +jaxdist train (\S+)(.*)")
_TARGET = re.compile(r"# target: +held-out (accuracy|AUC|loss|RMSE)\b\D*(\d+\.\d+)")


@dataclass(frozen=True)
class Target:
    """The command and the target in the head of a config.

    Attributes:
      arguments: the arguments of `jaxdist train` after the config.
      metric: the name of the metric in the records of a run.
      value: the value that the last held-out value of the run must reach.
    """

    arguments: Sequence[str]
    metric: str
    value: float

    @property
    def goal(self) -> str:
        """The condition on the ratio of the reached value to the target."""
        return "<= 1" if self.metric in ("loss", "rmse") else ">= 1"


def target_of(path: Path) -> Target:
    """Read the command and the target from the head of a config.

    Raises:
      RunError: the head has no command that trains this config, or no target with a number.
    """
    text = path.read_text()
    command, target = _COMMAND.search(text), _TARGET.search(text)
    if command is None or command[1] != str(path) or target is None:
        raise RunError(
            f"the head of {path} needs a line '# command: jaxdist train {path}' and a line "
            "'# target: held-out METRIC VALUE', where METRIC is accuracy, AUC, loss or RMSE"
        )
    return Target(shlex.split(command[2]), target[1].lower(), float(target[2]))


def reached(run: Path, metric: str) -> float:
    """Return the last held-out value of a metric of a run.

    Raises:
      RunError: the run evaluated nothing.
    """
    found = [one[metric] for one in read_metrics(run) if one["split"] == "heldout"]
    if not found:
        raise RunError(f"{run} has no held-out {metric}: its config needs a held-out split")
    return found[-1]


def targets(_: str | None, paths: Sequence[Path] = TRAINED) -> Iterator[Figure]:
    """Run the commands in the heads of configs, and compare the results with the targets there.

    If a command fails, its target counts as missed, and the other commands still run.
    """
    wall = cpu = 0.0
    for path in paths:
        done = trained(path)
        wall, cpu = wall + done.wall_seconds, cpu + done.cpu_seconds
        yield from done.figures
    note = "the reference is 40 minutes"
    yield Figure("all commands: wall time", wall, BUDGET_SECONDS, "<= 1", note=note)
    yield Figure("all commands: CPU time", cpu, BUDGET_SECONDS, note=note)


def one_target(name: str) -> Iterator[Figure]:
    """Run the command of one config, such as `mlp/digits`, and compare the result with its target.

    Raises:
      JaxdistError: the bench runs no config of this name.
    """
    paths = {f"{path.parent.name}/{path.stem}": path for path in TRAINED}
    if name not in paths:
        raise JaxdistError(f"part targets has no config {name!r}: {did_you_mean(name, paths)}")
    chosen = paths[name]
    return (figure for done in map(trained, [chosen]) for figure in done.figures)


@dataclass(frozen=True)
class Trained:
    """The result of the command in the head of a config.

    Attributes:
      path: the config.
      target: the target in its head.
      value: the value that was reached, or NaN if the command failed.
      wall_seconds: the seconds from start to end, or NaN.
      cpu_seconds: the CPU seconds of all processes and threads of the command, or NaN. Other work
        on the machine changes this time less than the wall time.
      note: the error of a command that failed.
    """

    path: Path
    target: Target
    value: float = math.nan
    wall_seconds: float = math.nan
    cpu_seconds: float = math.nan
    note: str = ""

    @property
    def figures(self) -> tuple[Figure, Figure]:
        """The figures: value / target, and CPU time / time of all commands."""
        given = self.value, self.target.value, self.target.goal, "", self.note
        note = f"{self.wall_seconds:.0f} s from start to end; the reference is 40 minutes"
        return (
            Figure(f"{self.path}: {self.target.metric}", *given),
            Figure(f"{self.path}: CPU time", self.cpu_seconds, BUDGET_SECONDS, note=note),
        )


def trained(path: Path) -> Trained:
    """Run the command in the head of a config."""
    target = target_of(path)
    with tempfile.TemporaryDirectory() as folder:
        run, before = Path(folder) / "run", _cpu_seconds()
        try:
            seconds = train(path, run, TIMEOUT_SECONDS, target.arguments)
            value = reached(run, target.metric)
            return Trained(path, target, value, seconds, _cpu_seconds() - before)
        except RunError as error:
            return Trained(path, target, note=str(error))


def _cpu_seconds() -> float:
    """Return the CPU seconds of all processes that this process has started and waited for."""
    times = os.times()
    return times.children_user + times.children_system
