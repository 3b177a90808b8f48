"""Plant faults in the step code of plans, and record the part of a proof that reports each."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

import jax

import jaxdist
from benchmarks.prove.faults import PLANS, Fault, faults
from benchmarks.prove.pieces import kept
from jaxdist.config import Document, validate
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.proofs.numbers import Reference
from jaxdist.proofs.reduce import reduced
from jaxdist.proofs.types.program import types_of
from jaxdist.types import JsonObject

ROOT = Path(jaxdist.__file__).parent


@dataclass(frozen=True)
class Planted:
    """A fault in a plan, and the reports of it.

    Attributes:
      fault, plan: the fault, and the name of the plan.
      types, numbers: the spoiled leaf or value that this part of the proof reported; numbers are
        compared only if types report none.
      elsewhere: the reported leaves or values, if none of them is a spoiled leaf or value.
      changed: whether the fault changes the program; if not, nothing is wrong.
    """

    fault: Fault
    plan: str
    types: str = ""
    numbers: str = ""
    elsewhere: tuple[str, ...] = ()
    changed: bool = True

    @property
    def found(self) -> bool:
        """Whether a part reported a spoiled leaf or value."""
        return bool(self.types or self.numbers)


def drawn(seed: int) -> list[tuple[Fault, str]]:
    """Return all pairs of fault and plan in random order, after one pair for each fault."""
    chance = random.Random(seed)
    first, rest = [], []
    for fault in faults():
        plans = chance.sample(fault.plans, len(fault.plans))
        first.append((fault, plans[0]))
        rest += [(fault, plan) for plan in plans[1:]]
    return [*first, *chance.sample(rest, len(rest))]


def codes(code: CodeType) -> dict[str, CodeType]:
    """Return a module's functions by their qualified names, without functions inside functions."""
    found: dict[str, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            own = "<" not in inner.co_qualname
            found |= {inner.co_qualname: inner, **codes(inner)} if own else {}
    return found


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace the code of each function that the fault changes; restore it at the end.

    Replacing code objects keeps the functions that other modules have imported.
    """
    path = ROOT / fault.file
    text = path.read_text()
    assert text.count(fault.was) == 1, fault
    name = ".".join(("jaxdist", *Path(fault.file).with_suffix("").parts))
    module = importlib.import_module(name)
    # With `dont_inherit` the code does not get the `__future__` imports of this module.
    before, after = (
        codes(compile(source, str(path), "exec", dont_inherit=True))
        for source in (text, text.replace(fault.was, fault.becomes or "pass"))
    )
    changed = [name for name in before if before[name] != after[name]]
    functions = [_function(attrgetter(name)(module)) for name in changed]
    functions = [one for one in functions if hasattr(one, "__code__")]
    olds = [function.__code__ for function in functions]
    assert functions, fault
    for function in functions:
        function.__code__ = after[function.__qualname__]
    # jax would reuse what it traced by the code without the fault.
    jax.clear_caches()
    try:
        yield
    finally:
        for function, old in zip(functions, olds, strict=True):
            function.__code__ = old
        jax.clear_caches()


def _function(found: Any) -> Any:
    """Return the plain function inside a property, a cached property or a wrapped function."""
    found = getattr(found, "fget", None) or getattr(found, "func", None) or found
    return getattr(found, "__wrapped__", found)


@cache
def plan(name: str) -> tuple[str, JsonObject, Reference, Reference]:
    """Return a plan's program and sections at reduced size, and the references of one device.

    The first reference has data without weights, the second with weights.
    """
    sections, _ = reduced(_built(PLANS[name]))
    references = Reference(sections, False, 0), Reference(sections, True, 0)
    for reference in references:
        compared, _ = reference.compare("as it is", sections)
        assert not compared.wrong, (name, compared.wrong)
    return _text(_built(sections)), sections, *references


def judged(fault: Fault, name: str) -> Planted:
    """Plant a fault in a plan and prove the plan; the reference computes without the fault.

    Numbers are compared if types do not report a spoiled leaf. They are compared with weights only
    if they are right without weights, because devices that disagree about a weight take different
    branches, and then wait for each other forever.
    """
    right, sections, *references = plan(name)
    with planted(fault):
        experiment = _built(sections)
        changed = _text(experiment) != right
        findings = types_of(experiment.program).findings
        lines = _lines(fault)
        reports = [(finding, leaf) for finding in findings for leaf in finding.leaves or ("",)]
        for finding, leaf in reports:
            if re.search(fault.spoils, leaf) or finding.where in lines:
                return Planted(fault, name, types=f"{finding.where} {leaf}", changed=changed)
        names: list[str] = []
        for reference in references:
            names += [one.name for one in reference.compare("planted", sections)[0].wrong]
            for one in names:
                if re.search(fault.spoils, one):
                    return Planted(fault, name, numbers=one, changed=changed)
    elsewhere = tuple(dict.fromkeys([*(leaf for _, leaf in reports), *names]))
    return Planted(fault, name, elsewhere=elsewhere, changed=changed)


def _lines(fault: Fault) -> set[str]:
    """Return the lines of a fault, in the form `file.py:12` that findings use."""
    text = (ROOT / fault.file).read_text()
    line = text[: text.index(fault.was)].count("\n") + 1
    last = line + fault.was.count("\n")
    return {f"{Path(fault.file).name}:{n}" for n in range(line, last + 1)}


def _built(sections: Mapping[str, Any]) -> Experiment:
    config = validate(Document(dict(sections)), ExperimentConfig)
    return build(config, devices=jax.devices()[: config.mesh.fake_devices])


def _text(experiment: Experiment) -> str:
    """Return the text of the step and of an evaluation, without addresses, to compare programs."""
    program = experiment.program
    step = jax.make_jaxpr(program.train)(program.state_shapes, program.batch)
    rows = next(iter(program.batch.values())).shape[0]
    padded = {**program.batch, "weight": jax.ShapeDtypeStruct((rows,), "float32")}
    evaluated = jax.make_jaxpr(program.compute.sums)(
        program.state_shapes.params, program.state_shapes.buffers, padded
    )
    return re.sub(r"0x[0-9a-f]+", "", f"{step}{evaluated}")


def mutations(count: int, seed: int) -> Iterator[Planted]:
    """Plant `count` random faults that change a program, and yield the reports of each.

    Faults are sorted by plan, since the reference of each plan is cached. If a fault does not
    change the program of its plan, another pair of fault and plan replaces this pair.
    """
    pairs, all_ = drawn(seed), faults()
    numbered = [(all_.index(fault), name) for fault, name in pairs]
    left = count
    for some in (sorted(numbered[:count], key=lambda pair: pair[1]), numbered[count:]):
        for found in kept("faults", some, lambda pair: asdict(judged(all_[pair[0]], pair[1]))):
            if not left:
                return
            if found["changed"]:
                left -= 1
                yield Planted(**{**found, "fault": Fault(**found["fault"])})
