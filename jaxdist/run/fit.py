"""`jaxdist.fit`: `jaxdist train` as one call, in this process.

This module imports jax only after the environment is prepared, so that a config can still ask for
fake devices.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.checkpoint.identity import read_identity
from jaxdist.config import read
from jaxdist.errors import JaxdistError
from jaxdist.runtime import environment

if TYPE_CHECKING:
    from jaxdist.experiment import Experiment, ExperimentConfig
    from jaxdist.mesh import Device
    from jaxdist.run.hooks.contract import Hook
    from jaxdist.train.state import TrainState
    from jaxdist.types import JsonObject


@dataclass(frozen=True)
class FitResult:
    """The result of a run that is complete or was stopped.

    Attributes:
      directory: the run directory, with its config, metrics and checkpoints.
      experiment: the experiment that was built from the config. Its `program` can evaluate, and can
        train further.
      state: the last training state, which occupies device memory until it is released.
      stopped_by: the reason why the run stopped before its last step (a signal, a preemption
        notice, or the reason that a hook gave), or None if the run took its last step.
      exit_code: the exit code that `jaxdist train` would have: 0, or 75 if the run was stopped from
        outside. After 75, `resume=True` continues the run.
    """

    directory: Path
    experiment: Experiment
    state: TrainState
    stopped_by: str | None
    exit_code: int

    @property
    def step(self) -> int:
        """The number of steps taken, including the steps before a resume."""
        return int(self.state.step)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last logged metrics of training by name, read from the run directory."""
        return self._last("train")

    @property
    def heldout(self) -> Mapping[str, float]:
        """The means of the last evaluation by name, or an empty mapping without an evaluation."""
        return self._last("heldout")

    def records(self) -> list[JsonObject]:
        """Return all records of `metrics.jsonl` in the run directory, in order."""
        from jaxdist.metrics.writer import read_metrics

        return read_metrics(self.directory)

    def write(self, file: Path) -> None:
        """Write a summary of the ended run as JSON; only process 0 writes.

        Raises:
          RunError: the file cannot be written.
        """
        import jax

        from jaxdist.metrics.goodput import joined_lives
        from jaxdist.metrics.report import plain, write_json

        if jax.process_index() != 0:
            return
        identity, spent = read_identity(self.directory), joined_lives(self.records())
        report = {
            "run": str(self.directory),
            "id": None if identity is None else identity.id,
            "step": self.step,
            "total_steps": self.experiment.total_steps,
            "stopped_by": self.stopped_by,
            "exit_code": self.exit_code,
            "metrics": plain(self.metrics),
            "heldout": plain(self.heldout),
            "goodput": None if spent is None else spent.goodput,
        }
        write_json(file, report, what="result")

    def _last(self, split: str) -> dict[str, float]:
        from jaxdist.run.hooks.calls import last_of

        return last_of(self.records(), split)


def fit(
    config: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig,
    overrides: Sequence[str] = (),
    *,
    hooks: Sequence[Hook] = (),
    devices: int | Sequence[Device] | None = None,
    resume: bool = False,
    profile: str | None = None,
    quiet: bool = False,
) -> FitResult:
    """Train a config in this process, as `jaxdist train` does.

    The run has a directory, a lock, checkpoints, metrics, evaluation and a report of its time. The
    function may be called several times in a process, for the same run or for other runs. The
    function restores the signal handlers, the directory of jax's compilation cache and standard
    output before it returns. Outside the main thread the function handles no signals.

    If a launcher's environment variables name other processes that this process has not yet joined,
    the function joins them, and the process remains joined. After that, an error ends this process,
    since otherwise the other processes would wait for it.

    Args:
      config: the path of a YAML file, nested dicts, or a validated config. In nested dicts, a class
        or a function may replace its import path.
      overrides: the texts `section.key=value`, which override the config.
      hooks: the hooks of the run, which are called before the hooks that the config names.
      devices: the devices to use, or the number of fake CPU devices to make, as with `--devices`;
        None uses all devices.
      resume: whether to continue the run of this config from its newest checkpoint, as `--resume`
        does. If there is no such run, a new run starts.
      profile: the steps to trace, in the form of the option `--profile`, or None to trace none.
      quiet: whether to print nothing.

    Raises:
      JaxdistError: the run failed for a reason that the user can correct; this includes a hook that
        raised an error.
    """
    if isinstance(devices, int):
        overrides, devices = [*overrides, f"mesh.fake_devices={devices}"], None
    _prepare(config, overrides)
    from rich.console import Console

    from jaxdist.run.train import train
    from jaxdist.runtime.connection import connected

    with connected(_processes(), _report):
        return train(
            config,
            overrides,
            hooks=hooks,
            devices=devices,
            resume=resume,
            profile=profile,
            console=Console(highlight=False, emoji=False, quiet=quiet),
        )


def _prepare(config: Any, overrides: Sequence[str]) -> None:
    """Prepare the environment as a command does, unless jax is already imported.

    If the config asks for fake devices, the environment is prepared in any case; an error is raised
    if jax was imported before.
    """
    if not isinstance(config, str | os.PathLike | Mapping):
        config = config.model_dump(mode="json")
    mesh = read(config, overrides).values.get("mesh")
    count = mesh.get("fake_devices") if isinstance(mesh, dict) else None
    fake = count if isinstance(count, int) and count > 0 else None
    if fake is not None or "jax" not in sys.modules:
        environment.prepare(fake_devices=fake)


def _processes() -> Any:
    import jax

    from jaxdist.runtime.processes import find_processes

    return None if jax.distributed.is_initialized() else find_processes(os.environ)


def _report(error: BaseException) -> int:
    if isinstance(error, JaxdistError):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    traceback.print_exception(error)
    return 1
