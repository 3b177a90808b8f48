"""The compiler's results for plans, in a cache that saves an hour of compiling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import islice

from benchmarks.core import child
from benchmarks.planner.cases import Drawn, drawn
from benchmarks.tpu.program import CONFIG
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
    """Yield the first draws of a seed, with the memory of their programs."""
    for one in islice(drawn(seed), count):
        yield Program(one, kept_or_laid_out(one.settings(), one.plan, one.topology))


def kept_or_laid_out(settings: list[str], plan: Plan, topology: str) -> Confirmed:
    """Return the memory of a plan's program as the compiler lays it out, cached if possible.

    Args:
      settings: overrides of `benchmarks/tpu/llama.yaml`, without the settings of the plan.
      plan: the plan.
      topology: the TPUs to compile for.
    """
    return _kept("laid_out", lay_out_one, settings, plan, topology)


def kept_or_compiled(settings: list[str], plan: Plan, topology: str) -> Confirmed:
    """Return the results of compiling a plan's program, cached if possible.

    Args:
      settings: overrides of `benchmarks/tpu/llama.yaml`, without the settings of the plan.
      plan: the plan.
      topology: the TPUs to compile for.
    """
    apart = child.apart(compile_one, f"compiling {plan.words()} for {topology}")
    try:
        return _kept("compiled", apart, settings, plan, topology)
    except RunError as error:
        return Confirmed(refusal=str(error))


def lay_out_one(settings: list[str], plan: Plan, topology: str) -> list[Confirmed]:
    """Return the memory of a plan's program, as the compiler lays it out."""
    return [lay_out(CONFIG, settings, plan, parse_target(topology))]


def compile_one(settings: list[str], plan: Plan, topology: str) -> list[Confirmed]:
    """Compile a plan's program, and return its memory and cost."""
    return [confirm(CONFIG, settings, plan, parse_target(topology))]


def _kept(
    what: str,
    ask: Callable[[list[str], Plan, str], list[Confirmed]],
    settings: list[str],
    plan: Plan,
    topology: str,
) -> Confirmed:
    """Return the cached result of `ask`, or call it and cache the result.

    The key includes the versions of jax and libtpu.
    """
    versions = [version(name) for name in ("jax", "libtpu")]
    text = json.dumps([what, settings, plan.settings(), topology, versions], sort_keys=True)
    name = sha256(text.encode()).hexdigest()[:16]
    path = cache_directory() / "bench_plan" / f"{name}.json"
    if path.exists():
        return Confirmed(**json.loads(path.read_text()))
    (found,) = ask(settings, plan, topology)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found)))
    return found
