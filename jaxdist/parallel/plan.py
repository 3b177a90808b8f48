"""The config section `parallel`, and the choice of an exchange from it.

The package `jaxdist.validity` refuses combinations of settings that do not work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import jax

from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.collectives.operations import XLA
from jaxdist.compression.config import CompressAuto, Compression, CompressionConfig
from jaxdist.config.schema import Config
from jaxdist.errors import CollectiveError, CompressionError, ConfigError
from jaxdist.parallel.compiler import XlaConfig
from jaxdist.parallel.contract import Exchange
from jaxdist.parallel.exchange.all_reduce import AllReduce
from jaxdist.parallel.exchange.compressed import (
    CompressedAllReduce,
    CompressedScatter,
    CompressedUnsharded,
)
from jaxdist.parallel.exchange.messages import Messages, blocks_of
from jaxdist.parallel.exchange.scatter import Scatter
from jaxdist.parallel.exchange.strict import Strict
from jaxdist.parallel.exchange.unsharded import Unsharded
from jaxdist.parallel.exchange.xla import XlaExchange
from jaxdist.parallel.pipeline.planning.plan import AXIS, PipelineConfig
from jaxdist.parallel.strict.check import check_devices
from jaxdist.parallel.strict.config import StrictConfig
from jaxdist.parallel.strict.tree import Order
from jaxdist.parallel.zero import ZeroConfig, ZeroSplit, plan_zero
from jaxdist.sharding import Dims, Layout
from jaxdist.trees import divide, flatten_with_names
from jaxdist.types import Leaf, Params, Shardings
from jaxdist.validity.features import Facts
from jaxdist.validity.notices import notices
from jaxdist.validity.table import check


class ParallelConfig(Config):
    """The distribution of a step over devices: collectives, ZeRO, pipeline and compiler options."""

    reduce: ReduceConfig | None = None
    """The algorithm that sums gradients over the data axis; null lets XLA insert the reductions."""
    reduce_dtype: Literal["bfloat16", "float32"] | None = None
    """The dtype in which `reduce` sends and sums gradients; null keeps the gradients' dtype."""
    batch_norm: Literal["global", "local"] = "global"
    """The rows over which a BatchNorm computes statistics with `reduce`: the rows of all devices
    (global), or the rows of one device (local)."""
    compression: CompressionConfig | None = None
    """The codec that compresses gradients for sending; null sends gradients uncompressed."""
    deterministic: StrictConfig | None = None
    """The guarantee of the same bits on any number of devices. With null, results have the same
    bits only on the same number of devices."""
    zero: ZeroConfig = ZeroConfig()
    """The part of the training state of which each device keeps only a shard."""
    pipeline: PipelineConfig = PipelineConfig()
    """The division of the work among the stages of mesh axis `stage`. On a mesh with several
    stages, `reduce: null` means `xla`."""
    xla: XlaConfig = XlaConfig()
    """The options for the compiler."""

    @property
    def shards(self) -> int | None:
        """The number of logical shards of a batch, or None without `deterministic`."""
        return None if self.deterministic is None else self.deterministic.shards


def plan_exchange(
    config: ParallelConfig,
    layout: Layout,
    params: Params,
    dims: Mapping[str, Dims],
    whole: Shardings,
    scanned: frozenset[str] = frozenset(),
    *,
    frozen: frozenset[str] = frozenset(),
    offloads: bool = False,
    seed: int = 0,
    whole_matrices: bool = False,
) -> tuple[Exchange, tuple[str, ...]]:
    """Build the exchange of a config, and collect the notices about its settings.

    Args:
      config: the config section `parallel`.
      layout: the layout of the training state.
      params: the parameters, or their shapes.
      dims: the logical dims of each parameter, by name.
      whole: the shardings that the parameters have without ZeRO, a tree like the parameters.
      scanned: the names of the parameters whose first dim counts layers.
      frozen: the names of the parameters that are not trained.
      offloads: whether activations are offloaded to the host's memory.
      seed: the seed of codecs that draw at random.
      whole_matrices: whether the optimizer needs whole matrices.

    Returns:
      The exchange, and the notices: sentences about settings that have no effect or a hidden cost.

    Raises:
      ConfigError: some settings contradict each other or the layout (one message lists all of
        them), or the codec cannot encode the gradient of a parameter.
    """
    facts = plan_facts(config, layout, dims, offloads=offloads)
    check(facts)
    strict = config.deterministic
    if strict is not None:
        check_devices(layout.mesh, facts.batch_axes, strict.shards)
    given = config.zero, layout, params, dims
    zero = plan_zero(*given, parts=config.shards, by_layer=whole_matrices)
    if zero.stage == 3 and facts.stages > 1:
        zero = replace(zero, once=config.pipeline.gather == "step")
    told = tuple(notices(facts, zero))
    settings: dict[str, Any] = {"scanned": scanned, "frozen": frozen}
    if strict is not None:
        settings |= {"axes": facts.batch_axes, "algorithm": XLA, "order": Order(strict.shards)}
        return Strict(whole, zero, **settings), told
    if facts.reduction is None:
        return XlaExchange(whole, zero, frozen=frozen), told
    settings |= {
        "axes": facts.batch_axes,
        "algorithm": facts.reduction,
        "reduce_dtype": config.reduce_dtype,
        "global_statistics": config.batch_norm == "global",
    }
    if config.compression is None:
        return explicit_exchange(whole, zero, **settings), told
    if zero.stage >= 2 and config.compression.axis == "data":
        settings["reduce_codec"] = config.compression.codec
        return explicit_exchange(whole, zero, **settings), told
    sent, placed = (divide(tree, frozen)[0] for tree in (params, whole))
    compression = _chosen_codec(config.compression, facts, sent, placed, scanned)
    inside = zero
    if not zero.stage and compression.axis == "data.dcn":
        # Small tensors are split too, or every device would send them on the slow network.
        shards = ZeroConfig(stage=1, scope="ici", whole_below=0)
        inside = plan_zero(shards, layout, params, dims)
    messages = _messages(compression, facts, inside, sent, placed, scanned, seed)
    kinds = CompressedAllReduce, CompressedScatter, CompressedUnsharded, CompressedUnsharded
    return kinds[zero.stage](whole, zero, messages=messages, inside=inside, **settings), told


def _chosen_codec(
    config: Compression,
    facts: Facts,
    params: Params,
    whole: Shardings,
    scanned: frozenset[str],
) -> Compression:
    """Return a config with a fixed codec: `config`, or for `auto` a choice by the mesh's links.

    Raises:
      ConfigError: the speeds of the links are unknown, or no codec can be chosen.
    """
    if not isinstance(config, CompressAuto):
        return config
    mesh = jax.tree.leaves(whole)[0].mesh
    blocks = blocks_of(params, jax.tree.map(lambda sharding: sharding.spec, whole), mesh)
    sizes = {axis: facts.mesh[axis] for axis in facts.batch_axes}
    assert facts.reduction is not None, "see Facts.reduction"
    try:
        kind = mesh.devices.flat[0].device_kind
        return config.chosen(blocks, scanned, sizes, kind, facts.reduction)
    except (CompressionError, CollectiveError) as error:
        raise ConfigError(str(error), setting=("compression",)) from error


def _messages(
    config: Compression,
    facts: Facts,
    inside: ZeroSplit,
    params: Params,
    whole: Shardings,
    scanned: frozenset[str],
    seed: int,
) -> Messages:
    """Build the compressed all-reduce of a compression config.

    Args:
      config: the compression config, with a fixed codec.
      facts: the facts about the plan.
      inside: the split of tensors over the fast network while messages are sent over the slow
        network; it is not used if messages with whole tensors are sent over all axes.
      params: the shapes of the trained parameters.
      whole: the shardings that these parameters have without ZeRO.
      scanned: the names of the parameters whose first dim counts layers.
      seed: the seed of random choices.

    Raises:
      ConfigError: the codec cannot encode a block.
    """
    across = config.axis == "data.dcn"
    axes = tuple(axis for axis in facts.batch_axes if not across or axis not in facts.fast_axes)
    specs, shapes = jax.tree.map(lambda sharding: sharding.spec, whole), params
    if across:
        specs = inside.specs(specs)
        shapes = jax.eval_shape(inside.filled, params)
    blocks = blocks_of(shapes, specs, inside.mesh)
    named = {name: tuple(leaf.shape) for name, leaf in flatten_with_names(blocks)}
    assert facts.reduction is not None, "see Facts.reduction"
    how = config.choice(named, scanned), config.feedback, facts.reduction, seed
    messages = Messages(inside.mesh, axes, blocks, *how)
    try:
        # Tracing the initial state checks that the codec can encode every block.
        jax.eval_shape(messages.init)
    except CompressionError as error:
        raise ConfigError(str(error), setting=("compression",)) from error
    return messages


def explicit_exchange(whole: Shardings, zero: ZeroSplit, **settings: Any) -> Exchange:
    """Build the uncompressed exchange with explicit collectives for a ZeRO stage.

    Args:
      whole: the shardings that the parameters have without ZeRO, a tree like the parameters.
      zero: the split of the training state.
      settings: the other fields of `jaxdist.parallel.exchange.explicit.Explicit`.
    """
    return (AllReduce, Scatter, Unsharded, Unsharded)[zero.stage](whole, zero, **settings)


def plan_facts(
    config: ParallelConfig, layout: Layout, dims: Mapping[str, Dims], *, offloads: bool = False
) -> Facts:
    """Collect the facts about a plan that the table of `jaxdist.validity` checks.

    Args:
      config: the config section `parallel`.
      layout: the layout of the training state.
      dims: the logical dims of each parameter, by name.
      offloads: whether activations are offloaded to the host's memory.
    """
    axis, batch_axes = layout.axis_of("batch"), layout.batch_axes
    split = {
        name: dim
        for name, found in dims.items()
        for dim in found
        if batch_axes and dim is not None and layout.axis_of(dim) == axis
    }
    named = {dim for found in dims.values() for dim in found} | {"batch", "seq"}
    busy = {name for dim in named for name in layout.names_of(dim)}
    sizes = dict(layout.mesh.shape)
    # The stage axis is in use even without a rule, because the stages of a model that is a sequence
    # of parts need no sharding rule.
    empty = tuple(n for n, size in sizes.items() if size > 1 and n not in {*busy, AXIS})
    return Facts(
        mesh=sizes,
        batch_axes=batch_axes,
        reduce=config.reduce,
        zero=config.zero,
        split=split,
        empty_axes=empty,
        reduce_dtype=config.reduce_dtype,
        local_statistics=config.batch_norm == "local",
        pipeline=_chosen(config.pipeline),
        offloads=offloads,
        compression=config.compression,
        shards=config.shards,
    )


def _chosen(config: PipelineConfig) -> tuple[str, ...]:
    """Format the settings of a pipeline that differ from their defaults, for a message."""
    default = PipelineConfig().model_dump(mode="json")
    return tuple(
        f"parallel.pipeline.{name} {_shown(value)}"
        for name, value in config.model_dump(mode="json").items()
        if value != default[name]
    )


def _shown(value: Leaf) -> str:
    if isinstance(value, dict):
        return value["type"]
    return str(value).lower() if isinstance(value, bool) else str(value)
