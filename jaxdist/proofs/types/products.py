"""The rules of matrix products, convolutions, gathers and scatters."""

from __future__ import annotations

from collections.abc import Mapping

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.elementwise import kind_of_elementwise
from jaxdist.proofs.types.op import Found, Op
from jaxdist.proofs.types.shapes import dropped, written


def dot_general(op: Op) -> Found:
    """Return the kind of a product of arrays with contracted dims and dims of a batch."""
    contract, batch = op.params["dimension_numbers"]
    uses, after = [], len(batch[0])
    for side, aval in enumerate(op.ins):
        free = dropped([*contract[side], *batch[side]], aval.ndim)
        uses.append(
            {dim: ("contract", n) for n, dim in enumerate(contract[side])}
            | {dim: ("batch", n) for n, dim in enumerate(batch[side])}
            | {dim: ("free", after + n) for dim, n in free.items()}
        )
        after += len(free)
    return _product(op, *uses)


def convolution(op: Op) -> Found:
    """Return the kind of a convolution, a product of `[batch, in]` and `[in, out]` for features."""
    lhs, rhs, out = op.params["dimension_numbers"]
    grouped = op.params["feature_group_count"] != 1 or op.params["batch_group_count"] != 1
    left = {} if grouped else {lhs[0]: ("free", out[0]), lhs[1]: ("contract", 0)}
    right = {} if grouped else {rhs[0]: ("free", out[1]), rhs[1]: ("contract", 0)}
    return _product(op, left, right)


Uses = Mapping[int, tuple[str, int]]
"""The uses that a product makes of an operand's dims: "contract", "batch" or "free", with the
number of a contracted dim, or the dim of the result."""


def _product(op: Op, *uses: Uses) -> Found:
    """Return the kind of a product.

    The product is a partial sum if sharded dims of both operands are contracted.

    A product is an error if the sharded dims of its operands do not match.
    """
    if op.has(k.Zero):
        return k.Value(k.ZERO, op.every)
    if op.has(k.Owed) or op.all(k.SAME | k.APART):
        return kind_of_elementwise(op.of(op.values, name="mul"))
    # A whole operand also counts as a shard along a dim along which it is constant.
    pairs = zip(uses, op.values, strict=True)
    roles = [{use for dim, use in used.items() if dim in one.held} for used, one in pairs]
    lost = any(isinstance(op.kinds[side], k.Shard) and not roles[side] for side in (0, 1))
    if lost or not op.all(k.Shard | k.SAME):
        return op.no_rule(f"{op.name} of operands that are {op.kinds[0]} and {op.kinds[1]}")
    for side, other in enumerate(op.kinds[::-1]):
        free = [number for role, number in roles[side] if role == "free"]
        if free and isinstance(other, k.Whole | k.Count):
            return k.Shard(frozenset(free), getattr(op.kinds[side], "inner", 1))
    for role, number in sorted(roles[0] & roles[1]):
        if role != "free":
            return k.OWED if role == "contract" else k.shard(number)
    left, right = op.kinds
    said = f"over AXIS, the left matrix is {left}, and the right matrix is {right}"
    return op.wrong(f"multiplies matrices whose dims do not meet: {said}")


def gather(op: Op) -> Found:
    """Return the kind of the rows that a gather takes from a table by index."""
    (table, indices), numbers = op.kinds, op.params["dimension_numbers"]
    batch = [dim for dim in range(op.out.ndim) if dim not in numbers.offset_dims]
    if isinstance(table, k.Zero):
        return k.Value(k.ZERO, op.every)
    if isinstance(indices, k.Shard):
        dims = frozenset(batch[dim] for dim in indices.dims if dim < len(batch))
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        shared = {batch[index] for dim, index in pairs if dim in op.values[0].held} & dims
        if isinstance(table, k.Whole) or shared:
            return k.Shard(frozenset(shared)) if shared else k.Shard(dims, indices.inner)
        return op.no_rule(f"indices that are {indices} into a table that is {table}")
    if isinstance(indices, k.APART):
        return op.no_rule("indices that differ between devices")
    if isinstance(table, k.Shard):
        gone = [*numbers.collapsed_slice_dims, *numbers.operand_batching_dims]
        to = dict(zip(dropped(gone, op.ins[0].ndim), numbers.offset_dims, strict=True))
        if table.dims & {*numbers.start_index_map} or not table.dims & to.keys():
            return op.no_rule("indices into a table whose rows are sharded")
        return k.shard(*(to[dim] for dim in table.dims if dim in to))
    return table


def scatter_add(op: Op) -> Found:
    """Return the kind of a table after rows were added to it.

    If the rows are sharded, the table is a partial sum.
    """
    table, _, updates = op.values
    if isinstance(updates.kind, k.Zero):
        return table.kind
    added = k.Value(_added(op))
    if not isinstance(table.kind, k.Zero):
        return kind_of_elementwise(op.of([table, added], name="add", ins=[op.out, op.out]))
    # The table stays constant along a dim if the rows are constant along the dim and cover the
    # table.
    constant = (
        new
        for dim, new in _windows(op).items()
        if dim in updates.constant and new in table.constant
        if op.ins[2].shape[dim] == op.ins[0].shape[new]
    )
    return k.Value(added.kind, frozenset(constant))


def _added(op: Op) -> k.Kind:
    """Return the kind of a table of zeros after rows were added to it."""
    (table, indices, updates), numbers = op.values, op.params["dimension_numbers"]
    kind, window = updates.kind, {*numbers.update_window_dims}
    scattered = [dim for dim in range(op.ins[2].ndim) if dim not in window]
    sharded = getattr(indices.kind, "dims", ())
    equal = {scattered[dim] for dim in sharded if dim < len(scattered)} & updates.constant
    if isinstance(kind, k.Whole | k.Count) and equal:
        # An update that is the same for all rows counts as a shard of the updates of these rows.
        kind = k.shard(*equal)
    if not isinstance(kind, k.Shard):
        apart = isinstance(indices.kind, k.Shard | k.APART)
        if apart and isinstance(kind, k.Whole | k.Owed | k.Count):
            return op.undecided("values are added at indices that differ between devices")
        return kind
    rows, batched = kind.dims - window, numbers.operand_batching_dims
    if rows and (not batched or isinstance(table.kind, k.Shard | k.Zero)):
        own = {scattered.index(dim) for dim in rows}
        pairs = zip(batched, numbers.scatter_indices_batching_dims, strict=True)
        dims = [dim for dim, index in pairs if index in own]
        return k.shard(*dims) if dims else k.OWED
    if isinstance(indices.kind, k.Whole | k.Zero):
        return k.moved(kind, _windows(op))
    return op.undecided("rows are added at indices that differ between devices")


def _windows(op: Op) -> dict[int, int]:
    """Return the dim of the table for each window dim of a scatter's updates."""
    numbers = op.params["dimension_numbers"]
    gone = [*numbers.inserted_window_dims, *numbers.operand_batching_dims]
    return dict(zip(sorted(numbers.update_window_dims), dropped(gone, op.ins[0].ndim), strict=True))


def scatter(op: Op) -> Found:
    """Return the kind of a table after some of its rows were replaced."""
    table, indices, updates = op.values
    moved = updates.of_kind(k.moved(updates.kind, _windows(op)))
    return written(op, table, moved, [indices.kind])
