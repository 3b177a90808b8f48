"""Notices about valid settings that have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from jaxdist.errors import some_of
from jaxdist.validity.features import (
    Facts,
    shown_compression,
    shown_mesh,
    shown_reduce,
    shown_stage,
)


class SplitDims(Protocol):
    """The dims that ZeRO splits, and the shapes of the parameters of which no dim can be split."""

    @property
    def dims(self) -> Mapping[str, int | None]: ...
    @property
    def uneven(self) -> Mapping[str, tuple[int, ...]]: ...


def notices(facts: Facts, plan: SplitDims) -> list[str]:
    """Return a sentence, with the reason, for each valid setting that has no effect.

    Args:
      facts: the facts about the config and its model.
      plan: the dims that ZeRO splits, all of which are None at stage 0.
    """
    rest = [*_of_messages(facts), *_of_gathers(facts), *_of_mesh(facts)]
    return [*_of_stage(facts, plan), *_of_reduction(facts), *rest]


def _of_stage(facts: Facts, plan: SplitDims) -> Iterator[str]:
    zero, parts, axes = facts.zero, facts.parts(facts.state_axes), ", ".join(facts.state_axes)
    if zero.stage and parts == 1 and not (zero.offload or zero.offload_parameters):
        yield (
            f"{shown_stage(facts)} has no effect: {axes} of {shown_mesh(facts)} has size 1, so "
            "that nothing is split; leave parallel.zero out, or use more devices along this axis"
        )
    elif zero.stage and all(dim is None for dim in plan.dims.values()):
        yield (
            f"{shown_stage(facts)} has no effect: ZeRO splits no parameter over {parts} devices. "
            f"Parameters of less than {zero.whole_below} elements (parallel.zero.whole_below) stay "
            "whole; leave parallel.zero out, or lower whole_below"
        )
    elif plan.uneven:
        uneven = [f"{name} {list(shape)}" for name, shape in plan.uneven.items()]
        yield (
            f"{shown_stage(facts)} keeps {some_of(uneven, 1)} whole on every device: no "
            f"dim divides by {parts} ({axes}). Padding would more than double the parameter, or "
            f"another axis splits the dim. To split the parameter, choose a size that {parts} "
            "divides"
        )
    if zero.stage == 2 and facts.shards is not None and parts > 1:
        yield (
            f"{shown_stage(facts)} saves no more memory than stage 1 with parallel.deterministic, "
            "because the whole gradient of a logical shard is kept until it is added to the "
            "gradient of the next logical shard; set parallel.zero.stage: 1"
        )
    if zero.stage:
        return
    for setting, has_value, why in (
        ("scope ici", zero.scope == "ici", ""),
        ("offload true", zero.offload, ": the host's memory keeps only state that ZeRO splits"),
        ("offload_parameters", zero.offload_parameters, ""),
    ):
        if has_value:
            yield (
                f"parallel.zero.{setting} has no effect at parallel.zero.stage 0{why}; set "
                "parallel.zero.stage: 1"
            )


def _of_reduction(facts: Facts) -> Iterator[str]:
    mesh = shown_mesh(facts)
    if facts.reduce is not None and facts.parts(facts.batch_axes) == 1:
        axes = ", ".join(facts.batch_axes)
        yield (
            f"{shown_reduce(facts)} has no effect: {axes} of {mesh} has size 1; leave "
            "parallel.reduce out, or use more devices along this axis"
        )
    if facts.reduce_dtype is not None and facts.reduction is None:
        narrow = f"parallel.reduce_dtype {facts.reduce_dtype} has no effect"
        yield (
            f"{narrow} with parallel.reduce null: XLA sums gradients in their own dtype; set "
            "parallel.reduce: {type: xla}"
            if facts.batch_axes
            else f"{narrow}: no axis of {mesh} splits the batch, so that no gradients are summed; "
            "leave parallel.reduce_dtype out, or set mesh.data"
        )
    if facts.local_statistics and facts.reduction is None and facts.shards is None:
        yield (
            "parallel.batch_norm local has no effect with parallel.reduce null: XLA computes with "
            "the whole batch as one array; set parallel.reduce: {type: xla}"
        )


def _of_messages(facts: Facts) -> Iterator[str]:
    found = facts.compression
    if found is None:
        return
    across = found.axis == "data.dcn"
    axes = [name for name in facts.batch_axes if not across or name not in facts.fast_axes]
    if facts.parts(axes) == 1:
        yield (
            f"{shown_compression(facts)} affects only the state that is kept: {', '.join(axes)} "
            f"of {shown_mesh(facts)} has size 1, so that no message is sent; leave "
            "parallel.compression out, or use more devices along this axis"
        )
    if facts.reduce_dtype is not None and not across:
        yield (
            f"parallel.reduce_dtype {facts.reduce_dtype} has no effect with "
            f"{shown_compression(facts)}: the codec sets the form of messages, and they are "
            "summed in float32; leave parallel.reduce_dtype out"
        )


def _of_gathers(facts: Facts) -> Iterator[str]:
    zero = facts.zero
    if facts.stages > 1 and zero.stage < 3 and "parallel.pipeline.gather task" in facts.pipeline:
        yield (
            f"parallel.pipeline.gather task has no effect with {shown_stage(facts)}: only stage 3 "
            "gathers parameters; set parallel.zero.stage: 3, or leave parallel.pipeline.gather out"
        )
    if zero.stage == 3 and facts.reduction is not None:
        return
    for name, value, unset in (
        ("gather_dtype", zero.gather_dtype, None),
        ("prefetch", str(zero.prefetch).lower(), "false"),
        ("gather_codec", zero.gather_codec and zero.gather_codec.type, None),
        ("secondary", str(zero.secondary).lower(), "false"),
    ):
        if value != unset:
            yield (
                f"parallel.zero.{name} {value} has no effect with {shown_stage(facts)} and "
                f"{shown_reduce(facts)}: only stage 3 with an explicit reduction gathers "
                f"parameters; leave {name} out, or set parallel.zero.stage: 3 and "
                "parallel.reduce: {type: xla}"
            )


def _of_mesh(facts: Facts) -> Iterator[str]:
    if facts.pipeline and facts.stages == 1:
        has = "has" if len(facts.pipeline) == 1 else "have"
        yield (
            f"{' and '.join(facts.pipeline)} {has} no effect: {shown_mesh(facts)} has one stage; "
            "set mesh.stage"
        )
    for name in facts.empty_axes:
        yield (
            f"mesh axis {name} of size {facts.mesh[name]} has no effect: no sharding rule names "
            "the axis, so all devices along the axis compute the same. Add the axis to "
            "sharding.rules, or remove it from mesh"
        )
