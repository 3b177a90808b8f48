"""What the compiler says of plans, and kept: what takes an hour is not computed twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.core import child
from benchmarks.planner.cases import Drawn, drawn
from benchmarks.tpu.program import CONFIG, TIMEOUT_SECONDS
from jaxdist.data.cache import cache_directory
from jaxdist.errors import RunError
from jaxdist.planner.confirm import Confirmed, confirm, lay_out
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import parse_target


@dataclass(frozen=True)
class Program:
    """A drawn plan with the memory of its program."""

    drawn: Drawn
    compiled: Confirmed


def programs(seed: int, count: int) -> Iterator[Program]:
    """The first draws of a seed, laid out."""
    for one in islice(drawn(seed), count):
        yield Program(one, kept_or_laid_out(one.settings(), one.plan, one.topology))


def kept_or_laid_out(settings: list[str], plan: Plan, topology: str) -> Confirmed:
    """A plan's memory as the compiler lays it out; read where it was asked before.

    Args:
      settings: over `bench/tpu/llama.yaml`, without the plan's.
    """
    path = _kept(settings, plan, topology, "laid_out")
    if path.exists():
        return Confirmed(**json.loads(path.read_text()))
    return _keep(path, lay_out(CONFIG, settings, plan, parse_target(topology)))


def kept_or_compiled(settings: list[str], plan: Plan, topology: str) -> Confirmed:
    """What a plan's program says; read where it was compiled before.

    Args:
      settings: over `bench/tpu/llama.yaml`, without the plan's.
    """
    path = _kept(settings, plan, topology, "compiled")
    if path.exists():
        return Confirmed(**json.loads(path.read_text()))
    try:
        (found,) = child.call(
            compile_one,
            Confirmed,
            settings,
            asdict(plan),
            topology,
            what=f"compiling {plan.words()} for {topology}",
            environ=child.compiling_on(None),
            timeout_seconds=TIMEOUT_SECONDS,
        )
    except RunError as error:
        return Confirmed(refusal=str(error))
    return _keep(path, found)


def _keep(path: Path, found: Confirmed) -> Confirmed:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found)))
    return found


def compile_one(settings: list[str], plan: dict[str, Any], topology: str) -> list[Confirmed]:
    """What the program of a plan says."""
    return [confirm(CONFIG, settings, Plan(**plan), parse_target(topology))]


def _kept(settings: list[str], plan: Plan, topology: str, what: str) -> Path:
    """Where the result is kept; another compiler's is another file."""
    versions = [version(name) for name in ("jax", "libtpu")]
    text = json.dumps([what, settings, plan.settings(), topology, versions], sort_keys=True)
    return cache_directory() / "bench_plan" / f"{sha256(text.encode()).hexdigest()[:16]}.json"
