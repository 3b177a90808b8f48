"""The check of a step's program: the kind of every value along each manual mesh axis.

Outside `shard_map` a program works on whole arrays, whose values do not depend on where XLA places
them, so that nothing needs a check. Inside `shard_map` each device works on its own rows and
shards, and the code itself must sum over what is split. A `Pass` follows one mesh axis through one
`shard_map`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.jaxprs import called_by, manual_axes, regions_of
from jaxdist.proofs.types.walk import Pass


@dataclass(frozen=True)
class Finding:
    """A line of code that does not compute what one device would.

    Attributes:
      axis: the mesh axis.
      message: the error, and often its remedy.
      where: file and line.
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
      undecided: for each output without a type, the reasons why no rule gives it one.
      regions: the number of `shard_map`s; with 0, XLA alone places the program.
      outputs: names of all outputs that a `shard_map` computes.
    """

    findings: tuple[Finding, ...] = ()
    undecided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regions: int = 0
    outputs: tuple[str, ...] = ()

    @property
    def proved(self) -> tuple[str, ...]:
        """The outputs that are proved to be what one device would compute."""
        wrong = {leaf for finding in self.findings for leaf in finding.leaves}
        return tuple(leaf for leaf in self.outputs if leaf not in wrong | set(self.undecided))


def check_types(
    closed: Any, out_names: Sequence[str], scheduled: frozenset[str] = frozenset()
) -> Typed:
    """Follow every manual axis through every `shard_map` of a program.

    Args:
      closed: the program as `jax.make_jaxpr` returns it.
      out_names: a name for each output of the program.
      scheduled: the axes along which stages send each other activations by tables that are right.
    """
    jaxpr = closed.jaxpr
    # A jitted function is a program of a single equation, which calls another program.
    while len(jaxpr.eqns) == 1 and called_by(jaxpr.eqns[0]) is not None:
        if jaxpr.eqns[0].primitive.name == "shard_map":
            break
        jaxpr = called_by(jaxpr.eqns[0])
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    undecided: dict[str, list[str]] = {}
    outputs: dict[str, None] = {}
    count = 0
    between: dict[tuple[Any, str], k.Kind] = {}
    for region in regions_of(jaxpr):
        count += 1
        leaves = [_leaf(jaxpr, var, out_names) for var in region.outvars]
        outputs |= dict.fromkeys(leaf for leaf in leaves if leaf)
        for axis in sorted(manual_axes(region)):
            if dict(region.params["mesh"].shape)[axis] == 1:
                continue
            at, kinds = _region(region, axis, between, scheduled)
            for where, message in at.findings:
                found.setdefault((axis, where, message), {})
            for leaf, kind in zip(leaves, kinds, strict=True):
                if isinstance(kind, k.Wrong) and leaf:
                    for where, message in kind.findings:
                        found.setdefault((axis, where, message), {})[leaf] = None
                elif isinstance(kind, k.Unknown) and leaf:
                    undecided.setdefault(leaf, []).extend(sorted(kind.reasons))
    findings = [
        Finding(axis, message, where, tuple(spoils))
        for (axis, where, message), spoils in found.items()
    ]
    return Typed(
        tuple(findings),
        {leaf: tuple(dict.fromkeys(why)) for leaf, why in undecided.items()},
        count,
        tuple(outputs),
    )


def _region(
    region: Any, axis: str, between: dict[tuple[Any, str], k.Kind], scheduled: frozenset[str]
) -> tuple[Pass, list[k.Kind]]:
    at = Pass(axis, dict(region.params["mesh"].shape)[axis], scheduled)
    values = [
        k.Value(k.WHOLE if isinstance(var, core.Literal) else between.get((var, axis), k.WHOLE))
        for var in region.invars
    ]
    kinds = [value.kind for value in at.equation(region, values)]
    for var, kind in zip(region.outvars, kinds, strict=True):
        # A value that is not whole has the same kind when it enters a later `shard_map`.
        if isinstance(kind, k.Terms | k.Unknown | k.Wrong):
            between[var, axis] = kind
    return at, kinds


def _leaf(jaxpr: Any, var: Any, out_names: Sequence[str]) -> str:
    """Return the name of the output that a result of `shard_map` becomes, or '' if there is none.

    Only arrays with the same number of elements are followed, and a scalar only into the array that
    it is stacked into. A scalar such as the norm of all gradients would lead to every output.
    """
    size, reached = var.aval.size, {var}
    names = []
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in reached for v in eqn.invars):
            stacks = size == 1 and eqn.primitive.name in ("stack", "concatenate")
            reached |= {
                out for out in eqn.outvars if stacks or getattr(out.aval, "size", 0) == size
            }
    for out, name in zip(jaxpr.outvars, out_names, strict=True):
        if not isinstance(out, core.Literal) and out in reached:
            names.append(name)
    return names[0] if names else ""
