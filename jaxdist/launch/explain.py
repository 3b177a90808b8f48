"""The explanation of what this process finds: schedulers, GPUs, and engines such as mpirun."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from jaxdist.launch.build import ENGINES
from jaxdist.runtime.clusters import Sighting, sightings
from jaxdist.runtime.gpus import look
from jaxdist.types import JsonObject


def explain_launch(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield lines about the schedulers, the GPUs and the launch engines that this process finds."""
    seen = sightings(environ)
    used = next((one for one in seen if one.whole), None)
    if not seen:
        yield "no scheduler started this process"
    for one in seen:
        yield _verdict(one, used)
        yield from (f"    {name}={_short(value)}" for name, value in one.read.items())
    found = look(environ, environ.get("JAX_PLATFORMS"))
    given = (
        ""
        if found.given is None
        else f"; the scheduler assigned {found.given} of this host to the job"
    )
    yield f"{found.problem or f'{len(found.gpus)} GPUs are visible to jax'}{given}"
    for name, one in ENGINES.items():
        yield f"--on {name}: " + (shutil.which(one.program) or f"not here ({one.install})")


def as_json(environ: Mapping[str, str]) -> JsonObject:
    """Return the schedulers, the number of GPUs, and the engines as plain data.

    The schedulers are in the order in which jaxdist considers them. The value of an engine is the
    path of its program, or None if the program is not installed.
    """
    schedulers = [{**asdict(one), "whole": one.whole} for one in sightings(environ)]
    gpus = len(look(environ, environ.get("JAX_PLATFORMS")).gpus)
    engines = {name: shutil.which(one.program) for name, one in ENGINES.items()}
    return {"schedulers": schedulers, "gpus": gpus, "engines": engines}


def _verdict(one: Sighting, used: Sighting | None) -> str:
    if one is used:
        return (
            f"{one.scheduler}: process {one.index} of {one.count}, process 0 at {one.coordinator}"
        )
    why = one.missing or (f"{used.scheduler} started the processes" if used else "")
    return f"{one.scheduler}: ignored, {why}"


def _short(value: str, most: int = 60) -> str:
    line = " ".join(value.split())
    return line if len(line) <= most else line[: most - 3] + "..."
