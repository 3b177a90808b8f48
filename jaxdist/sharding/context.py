"""The choice of the method by which the devices of mesh axis `context` share a sequence."""

from __future__ import annotations

from dataclasses import replace

from jaxdist.cost.context import (
    ContextNeeds,
    Order,
    SequenceSplit,
    best_split,
    near_lengths,
    near_parts,
    splits_of,
)
from jaxdist.errors import ConfigError
from jaxdist.sharding.layout import Layout, ShardingConfig


def share_sequences(
    layout: Layout, config: ShardingConfig, needs: ContextNeeds, *, reorders: bool
) -> tuple[Layout, tuple[str, ...]]:
    """Choose the method by which devices share a sequence, and return the layout with this method.

    Args:
      layout: the layout, without a method.
      config: the config of the sharding, which sets a method or `auto`.
      needs: the attention that a device would compute if it had whole sequences.
      reorders: whether the positions of a training batch may be in another order than in the
        sequence.

    Returns:
      The layout, and a tuple with a sentence about the method and the reason for it. If no axis
      splits sequences, the layout is unchanged and the tuple is empty.

    Raises:
      ConfigError: the number of devices does not divide the length of sequences, or the method does
        not fit the number of devices or the heads.
    """
    given = layout.split
    if given is None:
        return layout, ()
    _check_length(needs.length, given.size)
    apart = layout.parts("heads") != layout.parts("kv_heads")
    if apart and needs.kv_heads > 1:
        raise ConfigError(
            f"mesh.context {given.size} needs kv_heads to be split like heads, so that "
            "each key head is on the device of its queries. Here heads are in "
            f"{layout.parts('heads')} parts, but kv_heads in {layout.parts('kv_heads')}; "
            "map heads and kv_heads to the same axis",
            setting=("sharding", "rules"),
        )
    splits = splits_of(config.context, given.axes, given.size)
    if not splits:
        raise ConfigError(
            f"sharding.context {config.context} divides the axis context into groups of several "
            f"devices, but mesh.context {given.size} cannot be divided into such groups: use ring "
            "or ulysses, or a size such as 4 or 6",
            setting=("sharding", "context"),
        )
    ordered = [replace(one, order=_order(config, one, needs, reorders=reorders)) for one in splits]
    found = best_split(ordered, needs)
    if found is None:
        why = next((text for one in splits if (text := needs.why_not(one))), "needs ulysses")
        raise ConfigError(
            f"sharding.context {config.context} {why}; use ring or gather, or another mesh.context",
            setting=("sharding", "context"),
        )
    split, why = found
    _check_order(needs.length, split)
    chosen = f"context: attention by {split.describe()} over {split.size} devices"
    return replace(layout, shared=split), (f"{chosen}, {split.order} order; {why}",)


def _order(
    config: ShardingConfig, split: SequenceSplit, needs: ContextNeeds, *, reorders: bool
) -> Order:
    if config.context_order != "auto":
        return config.context_order
    balances = reorders and needs.causal and needs.window is None and split.groups > 1
    fits = needs.length % (2 * split.groups) == 0
    if not balances:
        return "contiguous"
    return "zigzag" if fits else "striped"


def _check_length(length: int, size: int) -> None:
    if length % size:
        raise ConfigError(
            f"mesh.context {size} does not divide sequences of {length} positions: use "
            f"mesh.context {near_parts(length, size)}, or data.window {near_lengths(length, size)}",
            setting=("mesh", "context"),
        )


def _check_order(length: int, split: SequenceSplit) -> None:
    if split.order == "zigzag" and length % (2 * split.groups):
        raise ConfigError(
            f"sharding.context_order zigzag divides sequences into {2 * split.groups} blocks, but "
            f"{length} positions do not divide by this number: use striped, or data.window "
            f"{near_lengths(length, 2 * split.groups)}",
            setting=("sharding", "context_order"),
        )
