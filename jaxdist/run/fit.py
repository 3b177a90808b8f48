"""`jaxdist.fit`: `jaxdist train` as one call, in this process.

Nothing here imports jax before the environment is prepared, so that a config can still ask for fake
devices.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """A run that has come to its end, or was stopped before.

    Attributes:
      directory: the run directory, with its config, metrics and checkpoints.
      experiment: what the config has built: `experiment.program` evaluates and goes on training.
      state: the last training state. It holds device memory for as long as it is kept.
      stopped_by: what has stopped the run before its last step: a signal, a notice, or the reason
        that a hook has given; None where it came to its last step.
      exit_code: what `jaxdist train` would end with: 0, or 75 where the run was stopped from
        outside and `resume=True` goes on.
    """

    directory: Path
    experiment: Experiment
    state: TrainState
    stopped_by: str | None
    exit_code: int

    @property
    def step(self) -> int:
        """The number of steps taken in all."""
        return int(self.state.step)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last metrics of training that were logged, read from the run directory."""
        return self._last("train")

    @property
    def heldout(self) -> Mapping[str, float]:
        """The means of the last evaluation, read from the run directory; empty without one."""
        return self._last("heldout")

    def records(self) -> list[JsonObject]:
        """All records of metrics, in their order: those of `metrics.jsonl`."""
        from jaxdist.metrics.writer import read_metrics

        return read_metrics(self.directory)

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
    """Train as a config says, in this process: what `jaxdist train` does, as one call.

    The run has a directory, a lock, checkpoints, metrics, evaluation and a report of its time, and
    goes on from its newest checkpoint with `resume`. It may be called again, for another run or the
    same one. Signal handlers, jax's compilation cache and standard output are as before when it
    returns; in a thread other than the main one no signal is taken.

    Where a launcher's variables name other processes and this one has not joined them, it does so
    and stays joined; an error then ends the process, since the others would wait for it.

    Args:
      config: a YAML file; or the same as nested dicts, in which a class or a function may stand for
        its import path; or a validated config.
      overrides: `section.key=value` texts, which win over the config.
      hooks: called while the run lasts, before those that the config names.
      devices: to run on; a number is of fake CPU devices, as with `--devices`; None is all.
      resume: continue the run of this config, as `--resume` does; begin it where there is none.
      profile: steps to trace, as `--profile` reads them.
      quiet: print nothing.

    Raises:
      JaxdistError: anything that the user can mend; a hook that raises is one of these.
    """
    if isinstance(devices, int):
        overrides, devices = [*overrides, f"mesh.fake_devices={devices}"], None
    _prepare(config, overrides)
    from rich.console import Console

    from jaxdist.run.train import train
    from jaxdist.runtime.connection import connected

    with connected(_processes(), _report):
        trained = train(
            config,
            overrides,
            hooks=hooks,
            devices=devices,
            resume=resume,
            profile=profile,
            console=Console(highlight=False, emoji=False, quiet=quiet),
        )
    return FitResult(
        trained.directory.path,
        trained.experiment,
        trained.state,
        trained.ending.stopped_by,
        trained.ending.exit_code,
    )


def _prepare(config: Any, overrides: Sequence[str]) -> None:
    """Set the environment as a command does, where it is not too late or fake devices need it."""
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
