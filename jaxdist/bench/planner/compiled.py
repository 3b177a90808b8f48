"""Drawn plans compiled, each in a process of its own, and kept: an hour is not computed twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from jaxdist.bench.core import child
from jaxdist.bench.planner.cases import Drawn, drawn
from jaxdist.bench.tpu.program import CONFIG, TIMEOUT_SECONDS
from jaxdist.data.cache import cache_directory
from jaxdist.errors import RunError
from jaxdist.planner.confirm import Confirmed, confirm
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import parse_target


@dataclass(frozen=True)
class Program:
    """A drawn plan with what its compiled program says."""

    drawn: Drawn
    compiled: Confirmed


def programs(seed: int, count: int, skip: int = 0) -> Iterator[Program]:
    """The first `count` draws of a seed after `skip`, compiled."""
    for one in islice(drawn(seed), skip, skip + count):
        yield Program(one, kept_or_compiled(one.settings(), one.plan, one.topology))


def kept_or_compiled(settings: list[str], plan: Plan, topology: str) -> Confirmed:
    """What a plan's program says; read where it was compiled before.

    Args:
      settings: over `bench/tpu/llama.yaml`, without the plan's.
    """
    path = _kept(settings, plan, topology)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found)))
    return found


def compile_one(settings: list[str], plan: dict[str, Any], topology: str) -> list[Confirmed]:
    """What the program of a plan says."""
    return [confirm(CONFIG, settings, Plan(**plan), parse_target(topology))]


def _kept(settings: list[str], plan: Plan, topology: str) -> Path:
    """Where the result is kept; another compiler's is another file."""
    versions = [version(name) for name in ("jax", "libtpu")]
    text = json.dumps([settings, plan.settings(), topology, versions], sort_keys=True)
    return cache_directory() / "bench_plan" / f"{sha256(text.encode()).hexdigest()[:16]}.json"
