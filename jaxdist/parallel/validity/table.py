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
from jaxdist.compression import NoFeedback
from jaxdist.compression.config import Compression
from jaxdist.errors import ConfigError
from jaxdist.mesh import ICI, describe
from jaxdist.parallel.zero import ZeroConfig


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
      compression: of gradients; None sends them as they are.
      shards: logical ones, of `parallel.deterministic`; None without it.
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
    compression: Compression | None = None
    shards: int | None = None

    @property
    def stages(self) -> int:
        """The number of stages; 1 is no pipeline."""
        return self.mesh.get("stage", 1)

    @property
    def reduction(self) -> Algorithm | None:
        """What sums the gradients: the config's choice, or what a pipeline puts in; None is XLA."""
        # Left to XLA, each of a pipeline's microbatches would be reduced by itself, and messages
        # need a device's own gradients.
        named = self.stages > 1 or self.compression is not None
        if self.reduce is None and named and self.batch_axes:
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


def shown_mesh(facts: Facts) -> str:
    return f"mesh {describe(facts.mesh)}"


def _kind(facts: Facts) -> str | None:
    return getattr(facts.reduce, "type", None)


def shown_reduce(facts: Facts) -> str:
    kind = _kind(facts)
    return "parallel.reduce null" if kind is None else f"parallel.reduce.type {kind}"


def shown_stage(facts: Facts) -> str:
    return f"parallel.zero.stage {facts.zero.stage}"


def shown_compression(facts: Facts) -> str:
    kind = getattr(facts.compression, "type", "")
    return f"parallel.compression.type {kind}"


def _messages_over(axis: str, *, fed_back: bool | None = None) -> Feature:
    def active(facts: Facts) -> bool:
        found = facts.compression
        if found is None or found.axis != axis:
            return False
        return fed_back in (None, not isinstance(found.feedback, NoFeedback))

    def shown(facts: Facts) -> str:
        return f"{shown_compression(facts)} over axis {axis}"

    return Feature(active, shown)


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
    "no axis splits the batch": Feature(lambda f: not f.batch_axes, shown_mesh),
    "data on one network": Feature(lambda f: bool(f.batch_axes) and not f.fast_axes, shown_mesh),
    "data: {dcn, ici}": Feature(lambda f: bool(f.fast_axes), shown_mesh),
    "tensor (or another axis)": Feature(lambda f: bool(f.others), shown_mesh),
    "stage (a pipeline)": Feature(lambda f: f.stages > 1, shown_mesh),
    "a sharding rule over data": Feature(lambda f: bool(f.split), _rule),
    "zero 1": Feature(_at_stage(1), shown_stage),
    "zero 2": Feature(_at_stage(2), shown_stage),
    "zero 3": Feature(_at_stage(3), shown_stage),
    "parallel.zero.scope: all": Feature(
        lambda f: f.zero.stage > 0 and f.zero.scope == "all", lambda f: "parallel.zero.scope all"
    ),
    "parallel.zero.scope: ici": Feature(
        lambda f: f.zero.stage > 0 and f.zero.scope == "ici", lambda f: "parallel.zero.scope ici"
    ),
    "reduce: null": Feature(lambda f: f.reduce is None, shown_reduce),
    "reduce: xla": Feature(_is("xla"), shown_reduce),
    f"reduce: {', '.join(_FLAT)}": Feature(_is(*_FLAT), shown_reduce),
    "reduce: hierarchical": Feature(_is("hierarchical"), shown_reduce),
    "compression over data": _messages_over("data", fed_back=True),
    "compression over data, error_feedback: false": _messages_over("data", fed_back=False),
    "compression over data.dcn": _messages_over("data.dcn"),
    "parallel.zero.secondary": Feature(
        lambda f: f.zero.stage == 3 and f.zero.secondary, lambda f: "parallel.zero.secondary"
    ),
    "deterministic: strict": Feature(
        lambda f: f.shards is not None, lambda f: "parallel.deterministic.type strict"
    ),
    "train.microbatches": Feature(lambda f: True, lambda f: "train.microbatches"),
    "model.remat": Feature(lambda f: True, lambda f: "model.remat"),
    "model.remat: {...: offload}": Feature(
        lambda f: f.offloads, lambda f: "offload in model.remat"
    ),
}
"""All that the table can speak of, in the order of the matrix."""

COMPRESSION = tuple(name for name in FEATURES if name.startswith("compression over"))
SCOPES = ("parallel.zero.scope: all", "parallel.zero.scope: ici")
ZERO_STAGES = ("zero 1", "zero 2", "zero 3")
REDUCTIONS = ("reduce: xla", f"reduce: {', '.join(_FLAT)}", "reduce: hierarchical")


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
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary"), ("no axis splits the batch",)),
        "ZeRO splits the training state over the axis that splits the batch, and none does",
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.zero.stage: 0",
    ),
    Row(
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary"), ("a sharding rule over data",)),
        "what ZeRO would split over the axis of the batch is split over it already",
        "set that rule to null, or parallel.zero.stage: 0",
    ),
    Row(
        (("parallel.zero.scope: ici",), ("data on one network",)),
        "the state would be split inside the fast network of an axis that names only one",
        "set mesh.data: {dcn: D, ici: I}, or parallel.zero.scope: all",
    ),
    Row(
        (REDUCTIONS, ("no axis splits the batch",)),
        "gradients are summed over the axis that splits the batch, and none does",
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.reduce: null",
    ),
    Row(
        (REDUCTIONS, ("a sharding rule over data",)),
        "an explicit reduction needs parameters that are not split along the axis of the batch",
        "set that rule to null, or parallel.reduce: null",
    ),
    Row(
        (("reduce: hierarchical",), ("data on one network",)),
        "it sums inside a fast network and then across a slow one, and the axis names only one",
        "set mesh.data: {dcn: D, ici: I}, or parallel.reduce.type: ring",
    ),
    Row(
        (("reduce: hierarchical",), ("parallel.zero.scope: ici",)),
        "shards are summed inside the fast network and across the slow one in two steps already, "
        "each on one network",
        "set parallel.reduce.type: ring, or parallel.zero.scope: all",
    ),
    Row(
        (("zero 3", "parallel.zero.secondary"), ("stage (a pipeline)",)),
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
        "gradients of stages are summed by an explicit reduction (xla by default), which "
        "needs parameters that are not split along the axis of the batch",
        "set that rule to null, or take mesh.stage away",
    ),
    Row(
        (COMPRESSION, ("no axis splits the batch",)),
        "messages are of gradients that are summed over the axis of the batch, and there is none",
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.compression: null",
    ),
    Row(
        (COMPRESSION, ("a sharding rule over data",)),
        "messages are of gradients that are not split along the axis of the batch",
        "set that rule to null, or parallel.compression: null",
    ),
    Row(
        (("compression over data.dcn",), ("data on one network",)),
        "messages would cross the slow one of two networks, and the axis names only one",
        "set mesh.data: {dcn: D, ici: I}, or parallel.compression.axis: data",
    ),
    Row(
        (("zero 2", "zero 3", "parallel.zero.secondary"), ("compression over data",)),
        "no device ever has a whole gradient to compress, nor keeps what a message of it left out",
        "set mesh.data: {dcn: D, ici: I}, parallel.zero.scope: ici and parallel.compression.axis: "
        "data.dcn (exact in the fast network, messages of shards across the slow one), or "
        "parallel.zero.stage: 1, or error_feedback: false with 4 bits or more",
    ),
    Row(
        (("parallel.zero.secondary",), ("data on one network",)),
        "a second copy inside the fast one of two networks spares the slow one, and the axis names "
        "only one",
        "set mesh.data: {dcn: D, ici: I}, or parallel.zero.secondary: false",
    ),
    Row(
        (("parallel.zero.secondary",), ("parallel.zero.scope: ici",)),
        "the state lies inside the fast network already, and no parameter crosses the slow one",
        "set parallel.zero.scope: all, or parallel.zero.secondary: false",
    ),
    Row(
        (("parallel.zero.scope: ici",), COMPRESSION[:2]),
        "each part of the state is summed inside the fast network first",
        "set parallel.compression.axis: data.dcn, or parallel.zero.scope: all",
    ),
    Row(
        (("parallel.zero.scope: all", "parallel.zero.secondary"), ("compression over data.dcn",)),
        "the state is split over both networks, and messages of shards cross one",
        "set parallel.zero.scope: ici, or parallel.compression.axis: data",
    ),
    Row(
        (("compression over data.dcn",), ("reduce: hierarchical",)),
        "sums are made inside the fast network and across the slow one in two steps already, each "
        "on one network",
        "set parallel.reduce.type: ring",
    ),
    Row(
        (("model.remat: {...: offload}",), ("stage (a pipeline)",)),
        "a stage keeps activations of its microbatches in buffers of its own, which are in the "
        "device's memory",
        "save or recompute them, or take mesh.stage away",
    ),
    Row(
        (("deterministic: strict",), ("no axis splits the batch",)),
        "its logical shards lie along the axis of the batch, and there is none",
        "set mesh.data (1 will do; and leave sharding.rules.batch at data)",
    ),
    Row(
        (("deterministic: strict",), ("a sharding rule over data",)),
        "a logical shard needs parameters that are not split along the axis of the batch",
        "set that rule to null; parallel.zero splits the training state and keeps the bits",
    ),
    Row(
        (("deterministic: strict",), REDUCTIONS),
        "logical shards are added up in an order of their own, which no other reduction keeps",
        "set parallel.reduce: null",
    ),
    Row(
        (("deterministic: strict",), COMPRESSION),
        "messages are of a device's own sum of gradients, and they leave out some of it",
        "set parallel.compression: null",
    ),
    Row(
        (("deterministic: strict",), ("stage (a pipeline)",)),
        "stages add up microbatches in the order of their schedule, and not by logical shard",
        "take mesh.stage away",
    ),
    Row(
        (("deterministic: strict",), ("parallel.zero.scope: ici",)),
        "shards inside the fast network are added up there first, in the order of its devices",
        "set parallel.zero.scope: all",
    ),
    Row(
        (("deterministic: strict",), ("parallel.zero.secondary",)),
        "parameters are gathered once, at the beginning of a step, with no second copy to keep",
        "set parallel.zero.secondary: false",
    ),
    Row(
        (("deterministic: strict",), ZERO_STAGES, ("tensor (or another axis)",)),
        "the norm of gradients that two axes split would be added up in the order of devices",
        "set parallel.zero.stage: 0, or keep data alone in mesh",
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
