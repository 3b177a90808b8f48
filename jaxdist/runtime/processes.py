"""The position of this process among its peers, from flags, variables, or the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.errors import RunError
from jaxdist.runtime.clusters import Sighting, sightings

_VARIABLES: tuple[str, ...] = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_FLAGS = "--coordinator HOST:PORT --num-processes N --process-id I"


@dataclass(frozen=True)
class Processes:
    """The position of this process among its peers.

    Attributes:
      coordinator: HOST:PORT of process 0.
      count: the number of processes.
      index: the number of this process.
    """

    coordinator: str
    count: int
    index: int


def find_processes(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    detect: bool = False,
) -> Processes | None:
    """Return the position of this process among its peers, or None for a process without peers.

    A value is read from its flag or, without the flag, from its environment variable.

    >>> find_processes({}, coordinator="host:1234", count=2, index=0)
    Processes(coordinator='host:1234', count=2, index=0)
    >>> find_processes({}) is None
    True

    Args:
      environ: the environment variables of this process.
      coordinator, count, index: the values of the flags, or None for a flag that is not given.
      detect: whether missing values are read from a scheduler's variables.

    Raises:
      RunError: only some of the three values are known, or the values contradict each other.
    """
    values: tuple[str | int | None, ...] = (coordinator, count, index)
    given = dict(zip(_VARIABLES, values, strict=True))
    for name in _VARIABLES:
        if given[name] is None and name in environ:
            given[name] = environ[name]
    missing = [name for name in _VARIABLES if given[name] is None]
    if missing and detect:
        given |= _detected(sightings(environ), missing)
        missing = []
    if len(missing) == len(_VARIABLES):
        return None
    if missing:
        raise RunError(f"several processes need all of {_FLAGS}; missing: {', '.join(missing)}")
    address, number, position = (str(given[name]) for name in _VARIABLES)
    return _checked(address, number, position)


def _detected(seen: list[Sighting], missing: list[str]) -> dict[str, str | int | None]:
    """Return the missing values from the first scheduler that knows all of them.

    Raises:
      RunError: no scheduler knows all missing values.
    """
    for one in seen:
        known = dict(zip(_VARIABLES, (one.coordinator, one.count, one.index), strict=True))
        found: dict[str, str | int | None] = {name: known[name] for name in missing}
        if None not in found.values():
            return found
    reasons = "; ".join(f"{one.scheduler}: {one.missing}" for one in seen)
    raise RunError(
        f"--distributed: {reasons or 'no scheduler has set its variables'}. Use {_FLAGS}, or set "
        f"{', '.join(missing)} (`jaxdist launch` sets them)"
    )


def _checked(address: str, number: str, position: str) -> Processes:
    if not (number.isdigit() and position.isdigit() and int(position) < int(number)):
        raise RunError(
            f"process id {position} of {number} processes: give each process a different id, from "
            "0 to the number of processes - 1"
        )
    if not address.rpartition(":")[2].isdigit():
        raise RunError(
            f"coordinator {address!r} is not HOST:PORT: give the address of process 0 with a port"
        )
    return Processes(address, int(number), int(position))
