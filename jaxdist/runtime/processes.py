"""Who the processes of a program are: from flags, variables, or the cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.errors import RunError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_OPEN_MPI = ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_FIRST_PORT, _PORTS = 61440, 4096
"""The ports, as many and as high, from which jax takes one by the number of a job."""


@dataclass(frozen=True)
class Processes:
    """This process among its peers; all None leaves it to jax to find out from the cluster."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None


def find_processes(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    detect: bool = False,
) -> Processes | None:
    """From flags, else environment variables, who this process is; None when it is alone.

    >>> find_processes({}, coordinator="host:1234", count=2, index=0)
    Processes(coordinator='host:1234', count=2, index=0)
    >>> find_processes({}) is None
    True

    Args:
      detect: read what Open MPI or Slurm have set, else let jax ask the cluster (Kubernetes, TPU
        pods).

    Raises:
      RunError: some of the three are given but not all, or they contradict each other.
    """
    given = dict(zip(_VARIABLES, (coordinator, count, index), strict=True))
    for name in _VARIABLES:
        if given[name] is None and name in environ:
            given[name] = environ[name]
    missing = [name for name in _VARIABLES if given[name] is None]
    if len(missing) == len(_VARIABLES):
        return _of_cluster(environ) if detect else None
    if missing:
        flags = "--coordinator HOST:PORT --num-processes N --process-id I"
        raise RunError(f"several processes need all of {flags}; missing: {', '.join(missing)}")
    address, number, position = (str(given[name]) for name in _VARIABLES)
    return _checked(address, number, position)


def _checked(address: str, number: str, position: str) -> Processes:
    if not (number.isdigit() and position.isdigit() and int(position) < int(number)):
        raise RunError(f"process id {position} of {number} processes: need 0 <= id < processes")
    if not address.rpartition(":")[2].isdigit():
        raise RunError(f"coordinator {address!r} is not HOST:PORT")
    return Processes(address, int(number), int(position))


def _of_cluster(environ: Mapping[str, str]) -> Processes:
    """As jax finds them itself, but known to us before jax waits for them."""
    if all(name in environ for name in _OPEN_MPI):
        uri, number, position = (environ[name] for name in _OPEN_MPI)
        host = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri)
        job = re.match(r"\d+", uri)
        if host is None or job is None:
            return Processes()
        name, port = host[1] or f"[{host[2]}]", int(job[0]) // _PORTS % _PORTS + _FIRST_PORT
    elif all(name in environ for name in _SLURM):
        number, position = environ["SLURM_NTASKS"], environ["SLURM_PROCID"]
        name = first_node(environ["SLURM_STEP_NODELIST"])
        port = int(environ["SLURM_JOB_ID"]) % _PORTS + _FIRST_PORT
    else:
        return Processes()
    return _checked(f"{name}:{environ.get('JAX_COORDINATOR_PORT', port)}", number, position)


def first_node(nodes: str) -> str:
    """The first of Slurm's list of nodes.

    >>> [first_node(nodes) for nodes in ("a1,b2", "node[007-015,020],b", "gpu[3,5]")]
    ['a1', 'node007', 'gpu3']
    """
    prefix, bracket, rest = nodes.partition(",")[0].partition("[")
    return prefix + (re.split(r"[],-]", rest)[0] if bracket else "")
