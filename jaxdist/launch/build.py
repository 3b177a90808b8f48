"""The launch engines (Slurm, Ray, ...) by name, and the construction of an engine from settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxdist.config.schema import validate
from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.launch.contract import Engine
from jaxdist.launch.gke import Gke
from jaxdist.launch.local import Local
from jaxdist.launch.mpi import Mpi
from jaxdist.launch.ray_engine import Ray
from jaxdist.launch.settings import read_engine_settings
from jaxdist.launch.slurm import Slurm
from jaxdist.launch.tpu_vm import TpuVm

ENGINES: Mapping[str, type[Engine]] = {
    "local": Local,
    "slurm": Slurm,
    "mpi": Mpi,
    "ray": Ray,
    "gke": Gke,
    "tpu-vm": TpuVm,
}


def engine(name: str, settings: Sequence[str]) -> Engine:
    """Return the engine of a name, with the given settings.

    Args:
      name: the name of the engine, a key of `ENGINES`.
      settings: the texts `key=value`, as the option `--set` takes them.

    Raises:
      ConfigError: the engine or a setting does not exist, or a required setting is missing.
    """
    if name not in ENGINES:
        raise ConfigError(f"--on {name}: {did_you_mean(name, ENGINES)}")
    return validate(read_engine_settings(name, ENGINES[name], settings), ENGINES[name])
