"""`jaxdist.fit`: `jaxdist train` as one call, in this process.

This module imports jax only after the environment is prepared, so that a config can still ask for
fake devices.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxdist.config import read
from jaxdist.errors import JaxdistError
from jaxdist.runtime import environment

if TYPE_CHECKING:
    from jaxdist.experiment import ExperimentConfig
    from jaxdist.mesh import Device
    from jaxdist.run.hooks.contract import Hook
    from jaxdist.run.report.fit_result import FitResult


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
