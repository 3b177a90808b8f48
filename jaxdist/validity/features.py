"""The features of a config that the table of validity combines, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.contract import Algorithm
from jaxdist.compression import NoFeedback
from jaxdist.compression.config import Compression
from jaxdist.errors import some_of
from jaxdist.mesh import ICI, describe_mesh
from jaxdist.validity.zero import ZeroConfig


@dataclass(frozen=True)
class OptimFacts:
    """The facts about an optimizer on which the rows of the table depend.

    Attributes:
      type: the value of `optim.type`, or an empty string if it does not matter.
      momentum: the decay of the first moment, or 0 if the optimizer has no first moment.
      freeze_step: the step after which a onebit optimizer no longer changes its second moment, or
        None for any other optimizer.
      averages: whether an evaluation uses averaged parameters instead of the trained parameters.
    """

    type: str = ""
    momentum: float = 0.0
    freeze_step: int | None = None
    averages: bool = False


@dataclass(frozen=True)
class Facts:
    """The facts about a config and its model that determine whether the settings combine.

    Attributes:
      mesh: the size of each mesh axis; an axis over two networks counts as two axes, such as
        `data_dcn` and `data_ici`.
      batch_axes: the axes that split the batch, the slowest first, or an empty tuple if the mesh
        has no such axis.
      reduce: the algorithm of `parallel.reduce`, or None if it is not set.
      zero: the settings of `parallel.zero`.
      split: the dim that a sharding rule splits over `batch_axes`, by the parameter's name.
      empty_axes: the axes of a size above 1 to which no rule maps a dim.
      reduce_dtype: the dtype in which gradients are sent, or None to send them in the dtype that
        they have.
      local_statistics: whether each device computes the statistics of batch norms only from its
        rows.
      pipeline: the settings of parallel.pipeline that differ from the default, as in a config.
      offloads: whether the model's activations are offloaded to the host's memory.
      compression: the compression of gradients; None sends gradients without compression.
      shards: the number of logical shards of `parallel.deterministic`, or None if that is not set.
      scalars: the names of the values that the loss returns as scalars, not as sums with weights.
      microbatches: the number of microbatches of a batch.
      workers: the number of workers of a parameter server, each of which computes a share of a
        batch.
      weighted: whether the data has a weight for each example.
      evaluation: the reason why the held-out split cannot be evaluated as a single batch, or None
        if it can.
      strategy: the value of `strategy.type`.
      settings: the values of the settings of other sections that are not off, by dotted path.
      optim: the facts about the optimizer.
      buffers: the names of the arrays, other than parameters, that the model's forward pass
        changes.
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
    scalars: tuple[str, ...] = ()
    microbatches: int = 1
    workers: int = 1
    weighted: bool = False
    evaluation: str | None = None
    strategy: str = "synchronous"
    settings: Mapping[str, str] = field(default_factory=dict)
    optim: OptimFacts = OptimFacts()
    buffers: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """The number of pipeline stages, which is 1 without a pipeline."""
        return self.mesh.get("stage", 1)

    @property
    def reduction(self) -> Algorithm | None:
        """The algorithm that sums gradients, or None if the sums are left to XLA.

        A pipeline and compression need an explicit algorithm, which is `Xla` if none is set.
        """
        # If the sums were left to XLA, each microbatch of a pipeline would be reduced separately.
        # Compressed messages are made from the gradients of a single device.
        named = self.stages > 1 or self.compression is not None
        if self.reduce is None and named and self.batch_axes:
            return Xla()
        return self.reduce

    @property
    def fast_axes(self) -> tuple[str, ...]:
        """The axes that split the batch inside the fast network."""
        return tuple(name for name in self.batch_axes if name.endswith(ICI))

    @property
    def state_axes(self) -> tuple[str, ...]:
        """The axes over which ZeRO splits the training state."""
        return self.fast_axes if self.zero.scope == "ici" else self.batch_axes

    @property
    def others(self) -> dict[str, int]:
        """The size of each axis that does not split the batch, if it is larger than 1, by name."""
        return {
            name: size
            for name, size in self.mesh.items()
            if name not in self.batch_axes and size > 1
        }

    def parts(self, axes: Sequence[str]) -> int:
        """Return the number of devices along these axes together."""
        return math.prod(self.mesh[name] for name in axes)


@dataclass(frozen=True)
class Feature:
    """A property that a config may have.

    Attributes:
      active: the function that returns whether a config has the property.
      text: the setting as in a config, for a message, or the function that returns this text.
    """

    active: Callable[[Facts], bool]
    text: str | Callable[[Facts], str]

    def shown(self, facts: Facts) -> str:
        """Return the setting as in a config, for a message."""
        return self.text if isinstance(self.text, str) else self.text(facts)


def shown_mesh(facts: Facts) -> str:
    return f"mesh {describe_mesh(facts.mesh)}"


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


def has_strategy(kind: str) -> Feature:
    """Return the feature of configs with this `strategy.type`."""
    return Feature(lambda f: f.strategy == kind, f"strategy.type {kind}")


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
    dim, names = next(iter(facts.split.values())), some_of([*facts.split], 1)
    return f"sharding.rules.{dim}, which splits {names} over {', '.join(facts.batch_axes)}"


def _is(*types: str) -> Callable[[Facts], bool]:
    return lambda facts: _kind(facts) in types


def _at_stage(stage: int) -> Callable[[Facts], bool]:
    return lambda facts: facts.zero.stage == stage


FLAT = ("ring", "tree", "double_tree", "halving", "auto")

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
        lambda f: f.zero.stage > 0 and f.zero.scope == "all", "parallel.zero.scope all"
    ),
    "parallel.zero.scope: ici": Feature(
        lambda f: f.zero.stage > 0 and f.zero.scope == "ici", "parallel.zero.scope ici"
    ),
    "reduce: null": Feature(lambda f: f.reduce is None, shown_reduce),
    "reduce: xla": Feature(_is("xla"), shown_reduce),
    f"reduce: {', '.join(FLAT)}": Feature(_is(*FLAT), shown_reduce),
    "reduce: hierarchical": Feature(_is("hierarchical"), shown_reduce),
    "compression over data": _messages_over("data", fed_back=True),
    "compression over data, error_feedback: false": _messages_over("data", fed_back=False),
    "compression over data.dcn": _messages_over("data.dcn"),
    "parallel.zero.secondary": Feature(
        lambda f: f.zero.stage == 3 and f.zero.secondary, "parallel.zero.secondary"
    ),
    "deterministic: strict": Feature(
        lambda f: f.shards is not None, "parallel.deterministic.type strict"
    ),
    "train.microbatches": Feature(
        lambda f: f.microbatches > 1, lambda f: f"train.microbatches {f.microbatches}"
    ),
    # No row names this feature. The matrix thus shows that the feature combines with all other
    # features.
    "model.remat": Feature(lambda f: True, "model.remat"),
    "model.remat: {...: offload}": Feature(lambda f: f.offloads, "offload in model.remat"),
    "workers of a parameter server": Feature(
        lambda f: f.workers > 1, lambda f: f"strategy.workers {f.workers}"
    ),
    "weights in the data": Feature(lambda f: f.weighted, "a weight in each example"),
    "a held-out split in several batches": Feature(
        lambda f: f.evaluation is not None, lambda f: f"held-out evaluation of {f.evaluation}"
    ),
    "a scalar as loss": Feature(
        lambda f: bool(f.scalars),
        lambda f: "a loss that returns a scalar for " + " and ".join(map(repr, f.scalars)),
    ),
    "strategy: parameter_server": has_strategy("parameter_server"),
}
"""The features of the matrix in the docs, in its order. `jaxdist.validity.sections` has the
features that are not in the matrix.
"""
