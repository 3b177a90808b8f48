"""What does not combine: one table of features, why not, and what to do instead.

A row is refused where each of its groups has a feature that is active, so the table is at once what
a config is checked against and the matrix in the docs. Printed by
`python -m jaxdist.parallel.validity`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.contract import Algorithm
from jaxdist.errors import ConfigError
from jaxdist.mesh import ICI, describe
from jaxdist.parallel.zero import Zero, ZeroConfig


@dataclass(frozen=True)
class Facts:
    """What of a config and a model decides whether they go together; plain data.

    Attributes:
      mesh: size of each mesh axis; one over two networks is two, `data_dcn` and `data_ici`.
      batch_axes: those that split the batch, slowest first; none where the mesh has no such axis.
      split: a parameter that a sharding rule splits over them, to the dim that the rule names.
      empty_axes: those larger than 1 that no rule puts anything on.
      reduce_dtype: in which gradients travel; None is their own.
      local_statistics: whether batch norms keep to each device's own rows.
      pipeline: settings of parallel.pipeline that are not the default, as the user knows them.
      offloads: whether the model's activations go to the host's memory.
    """

    mesh: Mapping[str, int]
    batch_axes: tuple[str, ...]
    reduce: Algorithm | None = None
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    split: Mapping[str, str] = field(default_factory=dict)
    empty_axes: tuple[str, ...] = ()
    reduce_dtype: str | None = None
    local_statistics: bool = False
    pipeline: tuple[str, ...] = ()
    offloads: bool = False

    @property
    def stages(self) -> int:
        """The number of stages; 1 is no pipeline."""
        return self.mesh.get("stage", 1)

    @property
    def reduction(self) -> Algorithm | None:
        """What sums the gradients: the config's choice, or what a pipeline puts in; None is XLA."""
        if self.reduce is None and self.stages > 1 and self.batch_axes:
            # Left to XLA, each microbatch's gradients would be reduced by themselves.
            return Xla()
        return self.reduce

    @property
    def fast_axes(self) -> tuple[str, ...]:
        """The part of the batch's axis that lies inside the fast network."""
        return tuple(name for name in self.batch_axes if name.endswith(ICI))

    @property
    def state_axes(self) -> tuple[str, ...]:
        """Those over which ZeRO splits the training state."""
        return self.fast_axes if self.zero.scope == "ici" else self.batch_axes

    @property
    def others(self) -> dict[str, int]:
        """Axes larger than 1 that do not split the batch."""
        return {
            name: size
            for name, size in self.mesh.items()
            if name not in self.batch_axes and size > 1
        }

    def parts(self, axes: Sequence[str]) -> int:
        """The number of devices along these axes."""
        return math.prod(self.mesh[name] for name in axes)


@dataclass(frozen=True)
class Feature:
    """Something that a config can have: whether it does, and the setting as the user knows it."""

    active: Callable[[Facts], bool]
    shown: Callable[[Facts], str]


def _mesh(facts: Facts) -> str:
    return f"mesh {describe(facts.mesh)}"


def _kind(facts: Facts) -> str | None:
    return getattr(facts.reduce, "type", None)


def _reduce(facts: Facts) -> str:
    kind = _kind(facts)
    return "parallel.reduce null" if kind is None else f"parallel.reduce.type {kind}"


def _stage(facts: Facts) -> str:
    return f"parallel.zero.stage {facts.zero.stage}"


def _rule(facts: Facts) -> str:
    (name, dim), *more = facts.split.items()
    also = f" and {len(more)} more" if more else ""
    return f"sharding.rules.{dim}, which splits {name}{also} over {', '.join(facts.batch_axes)}"


def _is(*types: str) -> Callable[[Facts], bool]:
    return lambda facts: _kind(facts) in types


def _at_stage(stage: int) -> Callable[[Facts], bool]:
    return lambda facts: facts.zero.stage == stage


_FLAT = ("ring", "tree", "double_tree", "halving", "auto")

FEATURES: Mapping[str, Feature] = {
    "no axis splits the batch": Feature(lambda f: not f.batch_axes, _mesh),
    "data on one network": Feature(lambda f: bool(f.batch_axes) and not f.fast_axes, _mesh),
    "data: {dcn, ici}": Feature(lambda f: bool(f.fast_axes), _mesh),
    "tensor (or another axis)": Feature(lambda f: bool(f.others), _mesh),
    "stage (a pipeline)": Feature(lambda f: f.stages > 1, _mesh),
    "a sharding rule over data": Feature(lambda f: bool(f.split), _rule),
    "zero 1": Feature(_at_stage(1), _stage),
    "zero 2": Feature(_at_stage(2), _stage),
    "zero 3": Feature(_at_stage(3), _stage),
    "zero.scope: ici": Feature(
        lambda f: f.zero.stage > 0 and f.zero.scope == "ici", lambda f: "parallel.zero.scope ici"
    ),
    "reduce: null": Feature(lambda f: f.reduce is None, _reduce),
    "reduce: xla": Feature(_is("xla"), _reduce),
    f"reduce: {', '.join(_FLAT)}": Feature(_is(*_FLAT), _reduce),
    "reduce: hierarchical": Feature(_is("hierarchical"), _reduce),
    "train.microbatches": Feature(lambda f: True, lambda f: "train.microbatches"),
    "model.remat": Feature(lambda f: True, lambda f: "model.remat"),
    "model.remat: {...: offload}": Feature(
        lambda f: f.offloads, lambda f: "offload in model.remat"
    ),
}
"""All that the table can speak of, in the order of the matrix."""

_ZERO = ("zero 1", "zero 2", "zero 3")
_REDUCE = ("reduce: xla", f"reduce: {', '.join(_FLAT)}", "reduce: hierarchical")


@dataclass(frozen=True)
class Row:
    """Features that do not combine.

    Attributes:
      groups: refused where one feature of each is active.
      why, instead: two halves of a sentence.
    """

    groups: tuple[tuple[str, ...], ...]
    why: str
    instead: str

    def problem(self, facts: Facts) -> str | None:
        """What to tell the user; None where the row does not apply."""
        found = [
            [FEATURES[name] for name in group if FEATURES[name].active(facts)]
            for group in self.groups
        ]
        if not all(found):
            return None
        settings = " with ".join(features[0].shown(facts) for features in found)
        return f"{settings}: {self.why}; {self.instead}"


ROWS: tuple[Row, ...] = (
    Row(
        ((*_ZERO, "zero.scope: ici"), ("no axis splits the batch",)),
        "ZeRO splits the training state over the axis that splits the batch, and none does",
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.zero.stage: 0",
    ),
    Row(
        ((*_ZERO, "zero.scope: ici"), ("a sharding rule over data",)),
        "what ZeRO would split over the axis of the batch is split over it already",
        "set that rule to null, or parallel.zero.stage: 0",
    ),
    Row(
        (("zero.scope: ici",), ("data on one network",)),
        "the state would be split inside the fast network of an axis that names only one",
        "set mesh.data: {dcn: D, ici: I}, or parallel.zero.scope: all",
    ),
    Row(
        (_REDUCE, ("no axis splits the batch",)),
        "gradients are summed over the axis that splits the batch, and none does",
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.reduce: null",
    ),
    Row(
        (_REDUCE, ("a sharding rule over data",)),
        "a reduction of ours needs parameters that are whole along the axis of the batch",
        "set that rule to null, or parallel.reduce: null",
    ),
    Row(
        (("reduce: hierarchical",), ("data on one network",)),
        "it sums inside a fast network and then across a slow one, and the axis names only one",
        "set mesh.data: {dcn: D, ici: I}, or parallel.reduce.type: ring",
    ),
    Row(
        (("reduce: hierarchical",), ("zero.scope: ici",)),
        "shards are summed inside the fast network and across the slow one in two steps already, "
        "each on one network",
        "set parallel.reduce.type: ring, or parallel.zero.scope: all",
    ),
    Row(
        (("zero 3",), ("stage (a pipeline)",)),
        "each microbatch would gather the parameters of its layers two times, which a stage that "
        "holds its own layers alone does not pay back",
        "set parallel.zero.stage: 1, or 2",
    ),
    Row(
        (
            ("zero 2",),
            ("stage (a pipeline)",),
            (f"reduce: {', '.join(_FLAT)}", "reduce: hierarchical"),
        ),
        "gradients are reduced within a stage's tasks, and what permutes among its devices waits "
        "for those of the other stages",
        "set parallel.reduce.type: xla, or parallel.zero.stage: 1",
    ),
    Row(
        (("stage (a pipeline)",), ("a sharding rule over data",)),
        "gradients of stages are summed by a reduction of ours (xla, where none is chosen), which "
        "needs parameters that are whole along the axis of the batch",
        "set that rule to null, or take mesh.stage away",
    ),
    Row(
        (("model.remat: {...: offload}",), ("stage (a pipeline)",)),
        "a stage keeps activations of its microbatches in buffers of its own, which are in the "
        "device's memory",
        "save or recompute them, or take mesh.stage away",
    ),
)
"""Every combination that is refused."""


def violations(facts: Facts) -> list[str]:
    """What does not combine, a sentence each with its settings, the reason and the remedy.

    >>> from jaxdist.collectives.algorithms.hierarchical import Hierarchical
    >>> print(*violations(Facts({"data": 8}, ("data",), Hierarchical(type="hierarchical"))))
    ... # doctest: +ELLIPSIS
    parallel.reduce.type hierarchical with mesh {data: 8}: it sums inside a fast network ...
    """
    return [problem for row in ROWS if (problem := row.problem(facts)) is not None]


def check(facts: Facts) -> None:
    """Refuse what does not combine.

    Raises:
      ConfigError: every row of the table that applies, a line each.
    """
    found = violations(facts)
    if found:
        raise ConfigError("\n".join(found))


def notices(facts: Facts, plan: Zero | None) -> list[str]:
    """Settings that combine but do nothing, with the reason; a sentence each.

    Args:
      plan: what ZeRO splits.
    """
    found = []
    zero, mesh, parts = facts.zero, _mesh(facts), facts.parts(facts.state_axes)
    if zero.stage and parts == 1:
        axes = ", ".join(facts.state_axes)
        found.append(
            f"{_stage(facts)} has no effect: {axes} of {mesh} has size 1, so that nothing is split"
        )
    elif plan is not None and all(dim is None for dim in plan.dims.values()):
        found.append(
            f"{_stage(facts)} has no effect: no parameter has {zero.whole_below} elements or more "
            f"(parallel.zero.whole_below) and a dim that divides by {parts}"
        )
    elif plan is not None and plan.uneven:
        (name, shape), *more = plan.uneven.items()
        also = f" and {len(more)} more" if more else ""
        found.append(
            f"{_stage(facts)} keeps {name} {list(shape)}{also} whole on every device: no dim "
            f"divides by {parts} ({', '.join(facts.state_axes)}), and those that zeros could fill "
            "up would more than double, or are split by another axis; a size that divides would "
            "be split"
        )
    if zero.scope == "ici" and not zero.stage:
        found.append("parallel.zero.scope ici has no effect at parallel.zero.stage 0")
    if facts.reduce is not None and facts.parts(facts.batch_axes) == 1:
        axes = ", ".join(facts.batch_axes)
        found.append(f"{_reduce(facts)} has no effect: {axes} of {mesh} has size 1")
    if facts.reduce_dtype is not None and facts.reduction is None:
        narrow = f"parallel.reduce_dtype {facts.reduce_dtype} has no effect"
        found.append(
            f"{narrow} with parallel.reduce null: XLA sums gradients in their own dtype; set "
            "parallel.reduce: {type: xla}"
            if facts.batch_axes
            else f"{narrow}: no axis of {mesh} splits the batch, so that no gradients are summed"
        )
    if facts.pipeline and facts.stages == 1:
        has = "has" if len(facts.pipeline) == 1 else "have"
        found.append(
            f"{' and '.join(facts.pipeline)} {has} no effect: {mesh} has one stage; set mesh.stage"
        )
    if facts.local_statistics and facts.reduce is None:
        found.append(
            "parallel.batch_norm local has no effect with parallel.reduce null: XLA computes with "
            "the whole batch as one array; set parallel.reduce: {type: xla}"
        )
    gathers = zero.stage == 3 and facts.reduce is not None
    for name, value, unset in (
        ("gather_dtype", zero.gather_dtype, None),
        ("prefetch", str(zero.prefetch).lower(), "false"),
    ):
        if value != unset and not gathers:
            found.append(
                f"parallel.zero.{name} {value} has no effect with {_stage(facts)} and "
                f"{_reduce(facts)}: only stage 3 with a reduction of ours gathers parameters"
            )
    found += [
        f"mesh axis {name} of size {facts.mesh[name]} has no effect: no rule splits anything over "
        f"it, so that its devices all do the same"
        for name in facts.empty_axes
    ]
    return found


def footnotes(first: str, second: str) -> list[tuple[int, bool]]:
    """Rows (from 1) that refuse two features, and whether they do so by themselves."""
    found = []
    for number, row in enumerate(ROWS, 1):
        places = [[i for i, group in enumerate(row.groups) if name in group]
                  for name in (first, second)]  # fmt: skip
        if all(places) and places[0] != places[1]:
            found.append((number, len(row.groups) == 2))
    return found


def markdown() -> str:
    """The table as a page: a matrix of features with a footnote for each refusal."""
    names = list(FEATURES)
    lines = [
        "# What combines",
        "",
        "Generated by `python -m jaxdist.parallel.validity > docs/validity.md`.",
        "",
        "`+` combines. A number is the reason below why it does not; in brackets: only together",
        "with the third feature that the reason names. Everything else that does not fit (degrees",
        "that do not multiply to the devices, heads or a vocabulary that do not divide) is told",
        "with its numbers before anything is compiled.",
        "",
        "| | " + " | ".join(str(i) for i in range(1, len(names) + 1)) + " |",
        "|---|" + "---|" * len(names),
    ]
    for i, name in enumerate(names, 1):
        cells = [_cell(name, other) if j < i else "" for j, other in enumerate(names, 1)]
        lines.append(f"| {i} {name} | " + " | ".join(cells) + " |")
    lines += ["", "Refused, with the reason and what to do instead:", ""]
    for number, row in enumerate(ROWS, 1):
        groups = ", with ".join(" or ".join(f"`{name}`" for name in group) for group in row.groups)
        lines.append(f"{number}. {groups}: {row.why}. Instead: {row.instead}.")
    return "\n".join(lines) + "\n"


_EXCLUSIVE = (
    {"no axis splits the batch", "data on one network", "data: {dcn, ici}"},
    set(_ZERO),
    {"reduce: null", *_REDUCE},
    {"no axis splits the batch", "a sharding rule over data"},
)
"""Features of which a config has one at most."""


def _cell(first: str, second: str) -> str:
    if any({first, second} <= group for group in _EXCLUSIVE):
        return ""
    found = footnotes(first, second)
    alone = [str(number) for number, by_itself in found if by_itself]
    return " ".join(alone or [f"({number})" for number, _ in found]) or "+"


if __name__ == "__main__":
    print(markdown(), end="")
