"""The parts that commands share: options, the environment, and the output of errors."""

from __future__ import annotations

import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from jaxdist.types import Json

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of the experiment.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings that override the file: section.key=value ...")
]
AtLeastZero = Annotated[int, typer.Option(min=0)]
AtLeastOne = Annotated[int, typer.Option(min=1)]
AtLeastOneOrNone = Annotated[int | None, typer.Option(min=1)]
Devices = Annotated[int | None, typer.Option(min=1, help="Number of fake CPU devices to use.")]
Run = Annotated[Path, typer.Argument(help="Run directory.")]
CheckpointStep = Annotated[
    int | None,
    typer.Option(help="Step of the checkpoint to use; by default the newest checkpoint."),
]
CompileDevices = Annotated[
    int | None, typer.Option(min=1, help="Number of fake CPU devices to compile for.")
]
TopologyOption = Annotated[
    str | None,
    typer.Option(help="TPU slice to compile for, such as v5e:2x4 or v5p:4x4x4; no TPU is needed."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file, as JSON.")
]

SHOWN_RUNS = 5
WIRE = ("grpc", "google_crc32c")
"""The packages that only parameter servers and `jaxdist replay` need."""


def console() -> Console:
    from rich.console import Console

    # With emoji, rich would turn the import path data:one:x into a picture.
    return Console(highlight=False, emoji=False)


def say(line: str) -> None:
    """Print a line to the user; brackets are not markup, and long lines are not wrapped."""
    console().print(line, soft_wrap=True, markup=False)


def prepare_devices(path: Path, overrides: list[str] | None, devices: int | None) -> list[str]:
    """Set the environment for a config, and return the overrides, to which `devices` is added.

    Args:
      path: the configuration file.
      overrides: the settings that override the file, or None for no settings.
      devices: the number of fake devices, or None for the number in the config.
    """
    extra = list(overrides or [])
    if devices is not None:
        extra.append(f"mesh.fake_devices={devices}")
    set_environment((path, extra))
    return extra


def prepare_run(run: Path, overrides: list[str] | None, devices: int | None) -> list[str]:
    """Set the environment for a run, and return the overrides, to which `devices` is added.

    The arguments are the same as for `prepare_devices`, except for the run directory instead of the
    config file.

    Raises:
      RunError: there is no run in the directory. The message names the runs in this directory or
        next to it.
    """
    from jaxdist.errors import RunError, some_of

    config = run / "config.yaml"
    # `Path.exists` is not used, because it raises an error for a name that is too long.
    if not os.path.exists(config):
        near = run if os.path.isdir(run) else run.parent
        runs = sorted(str(file.parent) for file in near.glob("*/config.yaml"))
        there = f"; there are {some_of(runs, SHOWN_RUNS)}" if runs else ""
        raise RunError(
            f"{run} is not a run directory, since it has no {config.name}: give the directory that "
            f"`jaxdist train` printed after the word run{there}"
        )
    return prepare_devices(config, overrides, devices)


def set_environment(
    *programs: tuple[Path, list[str]], topology: str | None = None, devices: int = 0
) -> None:
    """Prepare the environment, with enough fake devices for all given configs.

    jax must not have been imported yet.

    Args:
      programs: pairs of a configuration file and of the settings that override the file.
      topology: the TPUs to compile for, or None to compile for CPUs. With a topology, a single fake
        device is enough.
      devices: the number of fake devices that the command itself needs.
    """
    from jaxdist.runtime import environment

    count = 1 if topology else max(devices, *(_fake_devices(*program) for program in programs))
    environment.prepare(fake_devices=count or None)


def compile_for(devices: int | None, topology: str | None, overrides: list[str]) -> list[str]:
    """Return the overrides, to which the number of devices to compile for is added.

    Args:
      devices: the number of fake CPU devices, or None for the number in the config.
      topology: the TPUs to compile for, or None to compile for CPU devices.
      overrides: the settings that override the config.

    Raises:
      MeshError: both devices and a topology are given.
    """
    from jaxdist.errors import MeshError

    if devices is not None and topology is not None:
        raise MeshError(
            f"--devices {devices} compiles for CPUs, but --topology {topology} compiles for TPUs: "
            "give only one of the two options"
        )
    return [*overrides, *([] if devices is None else [f"mesh.fake_devices={devices}"])]


def write_result(path: Path | None, what: str, **values: Json) -> None:
    """Write the result of a command to the file of --json.

    Args:
      path: the file, or None to write nothing.
      what: the name of the result in an error message.
      values: the result.

    Raises:
      RunError: the file cannot be written.
    """
    from jaxdist.metrics.report import write_json

    write_json(path, values, what=what)


def alone(option: str, **others: object) -> None:
    """Check that no option is set that would have no effect together with `option`.

    Args:
      option: the name of the option that is set.
      others: the values of the other options by name.

    Raises:
      ConfigError: another option is set.
    """
    from jaxdist.errors import ConfigError

    given = [name for name, value in others.items() if value]
    if given:
        raise ConfigError(f"{', '.join(given)} has no effect with {option}: leave either out")


def _fake_devices(path: Path, overrides: list[str]) -> int:
    """Return the number of fake devices that a config requests, or 0 if it requests none."""
    from jaxdist.config import read

    mesh = read(path, overrides).values.get("mesh")
    count = mesh.get("fake_devices") if isinstance(mesh, dict) else None
    return max(count, 0) if isinstance(count, int) else 0


def devices_of(run: Path) -> int | None:
    """Return the number of devices of a run's mesh.

    The result is None if the run's config cannot be read or does not determine the number.
    """
    from jaxdist.config import read
    from jaxdist.errors import JaxdistError

    try:
        mesh = read(run / "config.yaml").values.get("mesh")
    except JaxdistError:
        return None  # The error is reported later, when the run is read.
    axes = dict(mesh) if isinstance(mesh, dict) else {}
    fake = axes.pop("fake_devices", None)
    sizes = [size.values() if isinstance(size, dict) else [size] for size in axes.values()]
    count = math.prod(part for both in sizes for part in both) if sizes else -1
    return count if count > 0 else fake


def print_error(error: BaseException) -> int:
    """Print an error on standard error, and return the exit code.

    An error that the user can fix is printed as a message. Any other error is printed with its
    traceback.
    """
    from jaxdist.errors import JaxdistError

    if isinstance(error, JaxdistError):
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name in WIRE:
        typer.echo(f"error: {error.name} is missing: pip install 'jaxdist[param-server]'", err=True)
        return 3
    if isinstance(error, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return 130
    traceback.print_exception(error)
    return 1


def find_benchmarks(command: str, extra: str) -> None:
    """Add the checkout of jaxdist to `sys.path`, so that its package `benchmarks` is found.

    Args:
      command: the command that needs the package `benchmarks`.
      extra: the extra of jaxdist with the packages that the command needs.

    Raises:
      ConfigError: jaxdist was installed from a wheel, which has no benchmarks.
    """
    from jaxdist.errors import ConfigError

    checkout = Path(__file__).parents[2]
    folder = checkout / "benchmarks"
    if not (folder / "core" / "harness.py").is_file():
        raise ConfigError(
            f"the installed package has no benchmarks ({folder} does not exist): run `{command}` "
            "from a checkout of jaxdist's repository that was installed with pip install -e "
            f"'.[{extra}]'"
        )
    # The checkout comes first, since another package may also have a module named benchmarks.
    sys.path.insert(0, str(checkout))
