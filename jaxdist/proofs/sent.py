"""The comparison of the bytes that a compiled program sends with the bytes for which its code asks.

Inside `shard_map` the code itself names each collective. Elsewhere XLA places the collectives: XLA
must sum over dims that an axis splits, and may gather arrays that are stored in shards. Any other
collective is unasked: it moves values to a layout that the code did not ask for.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdist.hlo import LedgerError, ledger, program_text
from jaxdist.hlo.collective import SENT
from jaxdist.hlo.parse import parse
from jaxdist.hlo.records import Collective, CollectiveKind
from jaxdist.hlo.source.lines import Lines
from jaxdist.jaxprs import inner_jaxprs
from jaxdist.mesh import entry_names
from jaxdist.proofs.types.jaxprs import LIBRARIES, axes_over, line_of
from jaxdist.trees import leaf_bytes, tree_bytes

_PARTS: Mapping[str, CollectiveKind] = {
    **{kind.replace("-", "_"): kind for kind in SENT},
    **dict.fromkeys(("psum", "pmax", "pmin"), "all-reduce"),
    "ppermute": "collective-permute",
}
"""The kind of each collective, by a part of the name of the operation that asks for it."""
SUMS: tuple[CollectiveKind, ...] = ("all-reduce", "reduce-scatter")
"""The kinds of collectives that sum over devices."""


@dataclass(frozen=True)
class Unasked:
    """A collective that the code did not ask for.

    Attributes:
      where: the file and line of the operation, as far as the program states them.
      operation: the name of the operation for which XLA placed the collective.
      kind: the kind of collective.
      axes: the mesh axes that each group of devices spans, or None if the groups are not a product
        of axes.
      sent_bytes: the bytes that each device sends in a step.
    """

    where: str
    operation: str
    kind: str
    axes: tuple[str, ...] | None
    sent_bytes: float

    def __str__(self) -> str:
        over = ", ".join(self.axes) if self.axes else "groups that are not along a mesh axis"
        return (
            f"{self.where}: {self.kind} over {over} that no code asked for, "
            f"{self.sent_bytes:,.0f} B, for {self.operation}"
        )


@dataclass(frozen=True)
class Sent:
    """The bytes that each device sends in a step, for each set of mesh axes.

    A key of the mappings has the names of the axes, joined with ", ".

    Attributes:
      asked: the bytes of the collectives that the code asks for, by axes.
      placed: the bytes of the same collectives in the compiled program, by axes.
      summed: the bytes of the sums and gathers that XLA placed without being asked, by axes.
      unasked: all other collectives of the compiled program.
      missing: a sentence for each set of axes over which the compiled program sends too few bytes
        for the collectives that the code asks for, or for the sums of gradients.
      undecided: the reason why the compiled program was not compared, or an empty string.
    """

    asked: Mapping[str, float] = field(default_factory=dict)
    placed: Mapping[str, float] = field(default_factory=dict)
    summed: Mapping[str, float] = field(default_factory=dict)
    unasked: tuple[Unasked, ...] = ()
    missing: tuple[str, ...] = ()
    undecided: str = ""


ALIKE = 0.5
"""The least fraction of the asked bytes that a correct program sends. XLA may replace an all-reduce
with a reduce-scatter, which sends half as many bytes."""


def compare(
    closed: Any, compiled: Any, mesh: Mesh, stored: Any, owed: Mapping[str, float] | None = None
) -> Sent:
    """Compare the bytes that a program sends before and after compilation.

    Args:
      closed: the program as `jax.make_jaxpr` returns it.
      compiled: the compiled program.
      mesh: the mesh that the program was compiled for.
      stored: a pytree of arrays, or their shapes, with the shardings in which training stores them.
      owed: for each axis, the least number of bytes that a device must send to sum the gradients,
        or None to skip this check.

    Returns:
      The bytes, which are undecided if the compiled program cannot be read, or runs on other
      devices than the devices of the mesh.
    """
    try:
        text = program_text(compiled)
        module = parse(text)
        found = ledger(compiled, mesh, module).collectives
    except LedgerError as error:
        return Sent(undecided=str(error))
    asked, placed, summed = (defaultdict[str, float](float) for _ in range(3))
    lines: dict[str, dict[str, None]] = defaultdict(dict)
    for key, line, sent_bytes in asked_of(closed.jaxpr, mesh):
        asked[key] += sent_bytes
        lines[key][line] = None
    stored_axes, where = split_axes(stored), Lines(text, module, LIBRARIES)
    unasked: dict[Unasked, None] = {}
    for one in found:
        sent_bytes, names, axes = one.times_high * one.sent_bytes, operations(one), one.axes or ()
        gathers = one.kind == "all-gather" and {*axes} <= stored_axes
        if all(map(kind_of, names)):
            placed[_key(axes, mesh)] += sent_bytes
        elif axes and (one.kind in SUMS or gathers):
            summed[_key(axes, mesh)] += sent_bytes
        elif sent_bytes:
            name = " ".join(sorted(names))
            unasked[Unasked(where(one.name), name, one.kind, one.axes, sent_bytes)] = None
    sums = {key: placed[key] + summed[key] for key in {**asked, **placed, **summed}}
    seen, needs = {where(one.name) for one in found}, []
    for key, own in lines.items():
        # The error is in a line whose collectives the compiled program lacks. If the compiled
        # program has the collectives of all lines, the error may be in any line.
        left = ", ".join([line for line in own if line not in seen] or own)
        needs.append((left, key, ALIKE * asked[key], sums[key]))
    for axis, least in (owed or {}).items():
        total = sum(sums[key] for key in sums if axis in key.split(", "))
        needs.append(("sums of gradients", axis, least, total))
    missing = (
        f"{what}: each device must send at least {least:,.0f} B over {over}, but the compiled "
        f"program sends {total:,.0f} B"
        for what, over, least, total in needs
        if total < least * (1 - 1e-6)
    )
    return Sent(dict(asked), dict(placed), dict(summed), tuple(unasked), tuple(missing))


def kind_of(operation: str) -> CollectiveKind | None:
    """Return the kind of collective that an operation requests, or None if it requests none."""
    return next((kind for part, kind in _PARTS.items() if part in operation), None)


def owed_sums(params: Any, mesh: Mesh, axes: Collection[str]) -> dict[str, float]:
    """Return, for each axis, the least number of bytes that a device sends to sum all gradients.

    Args:
      params: a pytree of the trained parameters, or their shapes, with the shardings in which
        training stores them.
      mesh: the mesh of the shardings.
      axes: the mesh axes that split the batch.
    """
    owed = dict.fromkeys(axes, 0.0)
    for axis, leaf in itertools.product(axes, jax.tree.leaves(params)):
        # In a sum over several networks, each network carries only the shard that remains after
        # the reduce-scatters over the other networks.
        split = math.prod(mesh.shape[name] for name in (split_axes(leaf) | {*axes}) - {axis})
        # Of all algorithms that give every device a shard of the sum, a ring's reduce-scatter sends
        # the fewest bytes.
        owed[axis] += SENT["reduce-scatter"](mesh.shape[axis]) * leaf_bytes(leaf) / split
    return owed


def asked_of(jaxpr: Any, mesh: Mesh, times: int = 1) -> Iterator[tuple[str, str, float]]:
    """Yield the axes, line of code and sent bytes of each collective that a program asks for.

    A loop of unknown length counts as a single iteration, and every branch counts as taken.

    Args:
      jaxpr: the program.
      mesh: the mesh of the program.
      times: the number of executions of `jaxpr`.
    """
    for eqn in jaxpr.eqns:
        kind = kind_of(eqn.primitive.name)
        axes = tuple(axis for axis in axes_over(eqn) if isinstance(axis, str)) if kind else ()
        count = math.prod(mesh.shape[axis] for axis in axes)
        if kind and count > 1:
            # The operand of a gather is only a shard, so the result is counted instead.
            arrays = [v.aval for v in (eqn.outvars if kind == "all-gather" else eqn.invars)]
            sent_bytes = times * SENT[kind](count) * tree_bytes(arrays)
            yield _key(axes, mesh), line_of(eqn), sent_bytes
        repeated = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for inner in inner_jaxprs(eqn):
            yield from asked_of(inner, mesh, repeated)


def operations(one: Collective) -> set[str]:
    """Return the names of the operations for which XLA placed a collective.

    If XLA combines collectives, it also joins the names: `a/(x/psum:y/psum)`.
    """
    return {part.rsplit("/", 1)[-1].strip("()") for part in one.source.split(":")} - {""}


def _key(axes: tuple[str, ...], mesh: Mesh) -> str:
    return ", ".join(axis for axis in mesh.axis_names if axis in axes) or "no axis"


def split_axes(stored: Any) -> set[str]:
    """Return the mesh axes along which any array of a tree is sharded."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(stored))
    specs = (getattr(sharding, "spec", ()) for sharding in shardings)
    return {name for spec in specs for entry in spec for name in entry_names(entry)}
