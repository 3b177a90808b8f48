"""The check of a step's program: the kind of every value along each manual mesh axis.

Outside `shard_map` a program works on whole arrays, whose values do not depend on where XLA places
them. Inside `shard_map` each device works on some of the rows and shards, and the code itself must
sum over the devices. A `Pass` follows one mesh axis through the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.interpreters.partial_eval import dce_jaxpr

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.jaxprs import regions_of
from jaxdist.proofs.types.walk import Pass

INSIDE = "values inside the step"
"""The name that reports give to undecided values that do not reach an output."""


@dataclass(frozen=True)
class Finding:
    """A line of code that does not compute what a single device would.

    Attributes:
      axis: the mesh axis along which the devices' values are wrong.
      message: the error, and often its remedy.
      where: the file and line.
      leaves: the outputs of the program that are wrong because of the line.
    """

    axis: str
    message: str
    where: str
    leaves: tuple[str, ...] = ()

    def __str__(self) -> str:
        spoiled_leaves = f" [{', '.join(self.leaves)}]" if self.leaves else ""
        return f"{self.where}: {self.message}{spoiled_leaves}"


@dataclass(frozen=True)
class Typed:
    """The types of a program's outputs.

    Attributes:
      findings: the errors in the program.
      undecided: for each output without a type, the reasons why no rule applies.
      regions: the number of `shard_map`s. If there are none, XLA places all communication.
      outputs: the names of all outputs that depend on a `shard_map`.
    """

    findings: tuple[Finding, ...] = ()
    undecided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regions: int = 0
    outputs: tuple[str, ...] = ()

    @property
    def proved(self) -> tuple[str, ...]:
        """The outputs that are proved to be what a single device would compute."""
        wrong = {leaf for finding in self.findings for leaf in finding.leaves}
        return tuple(leaf for leaf in self.outputs if leaf not in wrong | set(self.undecided))


def check_types(
    closed: Any, out_names: Sequence[str], scheduled: frozenset[str] = frozenset()
) -> Typed:
    """Return the types of a program's outputs along every manual axis.

    Operations on which no output depends are ignored.

    Args:
      closed: the program as `jax.make_jaxpr` returns it.
      out_names: a name for each output of the program.
      scheduled: the axes along which pipeline stages exchange activations by a schedule that was
        checked before.
    """
    program, _ = dce_jaxpr(closed.jaxpr, [True] * len(out_names), instantiate=True)
    regions = [one.params for one in regions_of(program)]
    sizes = {axis: p["mesh"].shape[axis] for p in regions for axis in p["newly_manual_axes"]}
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    undecided: dict[str, dict[str, None]] = {}
    outputs: dict[str, None] = {}
    for axis, size in sorted(sizes.items()):
        at = Pass(axis, size, scheduled)
        values = at.run(program, [k.Value(k.PLACED)] * len(program.invars))
        kinds = {name: at.used(v.kind) for name, v in zip(out_names, values, strict=True)}
        outputs |= {leaf: None for leaf, kind in kinds.items() if kind != k.PLACED}
        if size == 1:
            continue
        found |= {(axis, where, message): {} for where, message in at.findings}
        for leaf, kind in kinds.items():
            for where, message in getattr(kind, "findings", ()):
                found.setdefault((axis, where, message), {})[leaf] = None
            for reason in sorted(getattr(kind, "reasons", ())):
                undecided.setdefault(leaf, {})[reason] = None
        known = {reason for why in undecided.values() for reason in why}
        if lost := [reason for reason in at.unknown if reason not in known]:
            undecided.setdefault(INSIDE, {}).update(dict.fromkeys(lost))
    findings = [Finding(axis, said, at, (*of,)) for (axis, at, said), of in found.items()]
    reasons = {leaf: tuple(why) for leaf, why in undecided.items()}
    return Typed(tuple(findings), reasons, len(regions), tuple(outputs))
