"""The engines that there are, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from jaxdist.config.load import read
from jaxdist.config.schema import Config, validate
from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.launch.contract import Engine
from jaxdist.launch.gke import Gke
from jaxdist.launch.local import Local
from jaxdist.launch.mpi import Mpi
from jaxdist.launch.ray_engine import Ray
from jaxdist.launch.slurm import Slurm
from jaxdist.launch.tpu_vm import TpuVm

EngineConfig = Annotated[Local | Slurm | Mpi | Ray | Gke | TpuVm, Field(discriminator="type")]
ENGINES: Mapping[str, type[Engine]] = {
    "local": Local,
    "slurm": Slurm,
    "mpi": Mpi,
    "ray": Ray,
    "gke": Gke,
    "tpu-vm": TpuVm,
}


class _Settings(Config):
    set: EngineConfig  # as the option of the command line is called


def engine(name: str, settings: Sequence[str]) -> Engine:
    """An engine with its settings.

    Args:
      settings: `key=value` texts.

    Raises:
      ConfigError: there is no such engine or setting, or one is missing.
    """
    if name not in ENGINES:
        raise ConfigError(f"--on {name}: {did_you_mean(name, ENGINES)}")
    overrides = [f"set.type={name}", *(f"set.{text}" for text in settings)]
    return validate(read(None, overrides), _Settings).set
