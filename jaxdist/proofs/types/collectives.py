"""The rules for the collectives of jax and of jaxdist."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxdist.hlo.source.marks import BEGINS, ENDS, ENTERS, GIVES, LEAVES, TAKES
from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.elementwise import LINEAR, MOVING
from jaxdist.proofs.types.op import Found, Op, Rule

GATHERED = "gathers partial sums over AXIS as if they were shards"


def collective(rule: Callable[[Op, k.Kind], k.Kind]) -> Rule:
    """Return the rule of a collective for all mesh axes.

    Along an axis that the collective does not span, a result has the kind of its operand.

    Args:
      rule: the rule for the axes that the collective spans, from the kind of an operand to the kind
        of the result.
    """

    def chosen(op: Op) -> Found:
        if op.at.axis not in op.over:
            exchanged = {op.params.get("split_axis"), op.params.get("concat_axis")}
            if isinstance(op.kinds[0], k.Shard) and op.kinds[0].dims & exchanged:
                return op.no_rule("an all-to-all over another axis along a sharded dim")
            ndim = op.ins[0].ndim
            at = op.params.get("all_gather_dimension", op.params.get("scatter_dimension", 0))
            values = op.values[: len(op.eqn.outvars)]
            return [value.resized(ndim, op.out.ndim - ndim, at) for value in values]
        if op.params.get("axis_index_groups") is not None and not k.passes(op.kinds):
            return op.no_rule(f"{op.name} within groups of devices")
        keeps = op.name.startswith(("psum", "pm", "pperm", "jaxdist_all_reduce"))
        kinds = [k.passes([kind]) or rule(op, kind) for kind in op.kinds]
        pairs = zip(kinds, op.values, strict=True)
        return [k.Value(kind, value.constant if keeps else frozenset()) for kind, value in pairs]

    return chosen


def summed(op: Op, kind: k.Kind) -> k.Kind:
    """Return the kind of the sum over all devices of a value of the given kind.

    A sum of equal values is a `Multiple`, and a sum over the rows of different examples is an
    error.
    """
    if isinstance(kind, k.Joined):
        return k.each(kind, partial(summed, op))
    if k.passes([kind]) or isinstance(kind, k.Zero):
        return kind
    if isinstance(kind, k.Owed | k.Own | k.Count) or kind == k.TALLY:
        return k.WHOLE
    if isinstance(kind, k.Whole):
        return k.Multiple(op.at.place(op.eqn))
    if isinstance(kind, k.Shard):
        return op.wrong(f"sums over AXIS rows that belong to different examples ({kind})")
    return op.no_rule(f"a sum over {op.at.axis!r} of a value that is {kind}")


def _extreme(name: str, op: Op, kind: k.Kind) -> k.Kind:
    """Return the kind of the result of `pmax` (`name` is "max") or `pmin` (`name` is "min")."""
    if isinstance(kind, k.Part):
        return op.no_rule(f"{op.name} of a value that is {kind}")
    if isinstance(kind, k.Shard):
        return op.wrong(
            f"takes p{name} over AXIS, although each device has rows of different examples"
        )
    if isinstance(kind, k.Owed) or (isinstance(kind, k.Extreme) and kind.name != name):
        return op.wrong(f"takes p{name} over AXIS of a value that is {kind}")
    return k.WHOLE


def _gathered(op: Op, kind: k.Kind) -> k.Kind:
    """Return the kind of the result of `all_gather`, which makes a sharded value whole."""
    dim, tiled = op.params["all_gather_dimension"], op.params.get("tiled", False)
    if isinstance(kind, k.Part) or (isinstance(kind, k.Shard) and (dim in kind.dims or not tiled)):
        return k.WHOLE
    if tiled and isinstance(kind, k.Owed):
        return op.wrong(GATHERED)
    if not tiled and isinstance(kind, k.SAME | k.Own):
        return k.WHOLE
    return op.undecided(f"an all-gather along dim {dim} of a value that is {kind}")


def _scattered(op: Op, kind: k.Kind) -> k.Kind:
    """Return the kind of the result of `reduce_scatter`: a shard of the sum."""
    kind, tiled = summed(op, kind), op.params.get("tiled", False)
    sharded = k.shard(op.params["scatter_dimension"]) if tiled else k.OWN
    return sharded if isinstance(kind, k.Whole) else kind


def _exchanged(op: Op, kind: k.Kind) -> k.Kind:
    """Return the kind of the result of `all_to_all`: shards along another dim."""
    split, joined = op.params["split_axis"], op.params["concat_axis"]
    rows = isinstance(kind, k.Shard) and joined in kind.dims and kind.inner == 1
    if rows and split != joined and op.params.get("tiled", False):
        return k.shard(split)
    return op.no_rule(f"an all-to-all of a value that is {kind}")


def _permuted(op: Op, kind: k.Kind) -> k.Kind:
    """Return the kind of the result of `ppermute`.

    A whole value remains whole only if every device receives a message, since a device without a
    message gets zeros.
    """
    if isinstance(kind, k.Part) and op.at.axis in op.at.scheduled:
        return k.PART
    complete = isinstance(kind, k.Whole | k.Owed | k.Count) and len(op.params["perm"]) == op.at.size
    if complete or isinstance(kind, k.Zero | k.Own):
        return kind
    return op.undecided(f"a value that is {kind} goes to another device")


def parted(op: Op) -> k.Kind:
    """Return the kind of the results of an operation that has a `Part` among its operands.

    An operation on a device's entry of a stack and on whole values gives the device's entry of a
    stack of results.
    """
    kinds, name = op.kinds, op.name
    if passing := k.passes(kinds):
        return passing
    starts = {dim for dim, start in enumerate(kinds[1:]) if isinstance(start, k.Part)}
    indexed = name == "dynamic_slice" and isinstance(kinds[0], k.Shard) and kinds[0].dims <= starts
    if not indexed and op.has(UNLIKE):
        return op.no_rule(
            f"{name} of a device's entry of a stack together with other shards or partial sums"
        )
    if k.TALLY not in kinds:
        return k.PART
    # Every device would add a whole term to its tally, so that the sum of the tallies would contain
    # the term several times. A whole term is therefore accepted only in a branch that only some
    # devices take.
    others = [kind for kind in kinds if kind != k.TALLY]
    chosen = k.Part | k.Zero | (k.Whole | k.Count if op.at.chosen else k.Zero)
    adds = name in ("add", "add_any") and all(isinstance(kind, chosen) for kind in others)
    scales = name in ("mul", "div") and kinds[0] == k.TALLY and isinstance(kinds[1], k.Whole)
    moves = name in LINEAR | MOVING and len(kinds) == 1
    return k.TALLY if adds or scales or moves else k.PART


UNLIKE = k.Shard | k.Owed | k.Extreme | k.Joined | k.Multiple
"""The kinds that no rule combines with a device's entry of a stack."""


def marked(op: Op) -> Found:
    """Return the kinds of the results of jax's primitive `name`, which may mark a value.

    The marks of `jaxdist.hlo.source.marks` enclose code of jaxdist that no rule can follow. Between
    the marks a value is a message. At the last mark the value is the sum over devices of the value
    at the first mark, or the shard that entered. For any other name, the results have the kinds of
    the operands.
    """
    mark, _, rest = str(op.params["name"]).partition(":")
    if mark in (TAKES, GIVES):
        side = dict(pair.split("=") for pair in rest.split(",") if pair).get(op.at.axis)
        if side is not None and not k.spoiled(op.kinds):
            return _crossed(op, mark, side)
    if mark not in (BEGINS, ENDS, ENTERS, LEAVES):
        return list(op.values)
    axes, number, dim = rest.split(":")
    over, kind, begun = op.at.axis in axes.split(","), op.kinds[0], op.at.begun
    sums = mark in (BEGINS, ENDS)
    if mark in (BEGINS, ENTERS):
        if over and not sums and isinstance(kind, k.Owed):
            kind = op.wrong("takes a partial sum over AXIS as if it were a shard")
        begun[sums, number] = summed(op, kind) if over and sums else kind, op.out.ndim
        return kind if k.spoiled([kind]) else k.MESSAGE
    total, ndim = begun[sums, number]
    gone = ndim - op.out.ndim
    total = k.moved(total, {dim: dim - gone for dim in range(gone, ndim)}) if gone else total
    if isinstance(kind, k.Wrong) or k.spoiled([total]):
        return k.spoiled([kind, total]) or total
    return k.shard(int(dim)) if over and dim and isinstance(total, k.Whole) else total


def _crossed(op: Op, mark: str, side: str) -> k.Kind:
    """Return the kind of an operand or a result of a contract, as `marks.py` defines contracts.

    An operand must have the kind that the contract requires. Its kind is `CONTRACT` until the
    contract gives a result. The result has the kind that the contract states. Only `CONTRACT` or
    zeros can become a result, so that the contract does not cover code outside of it.

    Args:
      op: the mark as an operation, which has a single operand.
      mark: the name of the mark, which distinguishes operands from results.
      side: the kind that the contract states: "whole", "sum", or the number of the sharded dim.
    """
    (value,), (kind,) = op.values, op.kinds
    states = {"whole": k.WHOLE, "sum": k.OWED}.get(side) or k.shard(int(side))
    if mark == GIVES:
        if kind == k.CONTRACT or isinstance(kind, k.Zero):
            return states
        said = f"the result of a contract is {kind}, although the contract has not computed it"
        return op.undecided(said)
    if isinstance(kind, k.Owed):
        return op.wrong(
            "gives a contract a partial sum over AXIS, but the contract expects a complete value"
        )
    if isinstance(kind, k.SAME) if side == "whole" else int(side) in value.held:
        return k.CONTRACT
    return op.undecided(f"a contract takes a value that is {states}, but this value is {kind}")


COLLECTIVES: dict[str, Rule] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), collective(summed)),
    **{f"p{name}": collective(partial(_extreme, name)) for name in ("max", "min")},
    **{f"all_gather{end}": collective(_gathered) for end in ("", "_invariant", "_reduced")},
    "reduce_scatter": collective(_scattered),
    "all_to_all": collective(_exchanged),
    "ppermute": collective(_permuted),
    "axis_index": lambda op: k.Rank() if op.at.axis in op.over else k.WHOLE,
    "name": marked,
    "optimization_barrier": lambda op: list(op.values),
}
"""The rules of jax's collectives, and of other operations with a result for each operand, by the
name of the primitive."""


def _own_block(op: Op, kind: k.Kind) -> k.Kind:
    """Return the kind of a reduce-scatter's result, a device's block [c] of the sum of [N, c]."""
    kind = summed(op, kind)
    if isinstance(kind, k.Joined) and kind.dim == 0:
        return op.undecided(f"a reduce-scatter of {kind}")
    return k.each(kind, lambda part: k.shard(0) if isinstance(part, k.Whole) else part, -1)


def _all_blocks(op: Op, kind: k.Kind) -> k.Kind:
    def gathered(part: k.Kind) -> k.Kind:
        if isinstance(part, k.Owed):
            return op.wrong(GATHERED)
        return k.passes([part]) or k.WHOLE

    return k.each(kind, gathered, 1)


OWN_COLLECTIVES: dict[str, Rule] = {
    "jaxdist_all_reduce": collective(summed),
    "jaxdist_reduce_scatter": collective(_own_block),
    "jaxdist_all_gather": collective(_all_blocks),
    "jaxdist_broadcast": collective(lambda op, kind: k.WHOLE),
    "jaxdist_all_to_all": collective(lambda op, kind: op.undecided("an all-to-all of blocks")),
}
"""The rules of jaxdist's collectives, by the name of the called function.

No rule can follow the algorithms of these collectives, since the blocks that a device sends depend
on its index. `tests/collectives` tests that the algorithms sum and gather. The last operand is a
flat array, or blocks [N, c]."""
