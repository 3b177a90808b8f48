"""The rules of matrix products, convolutions, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxdist.proofs.types.elementwise import Context, all_constant
from jaxdist.proofs.types.kinds import (
    OWED,
    OWN,
    WHOLE,
    ZERO,
    Count,
    Owed,
    Own,
    Rank,
    Shard,
    Value,
    Whole,
    Zero,
    shard,
    spoiled,
)
from jaxdist.proofs.types.shapes import moved, written


def dot_general(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of a product: a partial sum if it contracts sharded dims of both operands."""
    spoilt = spoiled([value.kind for value in values])
    if spoilt is not None:
        return [Value(spoilt)]
    values = [_counted_as_whole(value) for value in values]
    (left, right), (contract, batch) = values, eqn.params["dimension_numbers"]
    kinds = left.kind, right.kind
    if any(isinstance(kind, Zero) for kind in kinds):
        return [Value(ZERO, all_constant(eqn.outvars[0].aval))]
    if any(isinstance(kind, Owed) for kind in kinds):
        if all(isinstance(kind, Owed | Whole) for kind in kinds) and type(kinds[0]) is not type(
            kinds[1]
        ):
            return [Value(OWED)]
        return [Value(at.wrong(eqn, f"multiplies a partial sum over {at.axis!r} by another value "
                               "that differs between devices"))]  # fmt: skip
    if not any(isinstance(kind, Shard) for kind in kinds):
        return [Value(OWN if any(isinstance(kind, Own) for kind in kinds) else WHOLE)]
    roles = [
        _roles(value, var.aval, contract[side], batch[side])
        for side, (value, var) in enumerate(zip(values, eqn.invars, strict=True))
    ]
    out = _product_dims(eqn, contract, batch)
    for role, position in sorted(roles[0] & roles[1]):
        if role == "contract":
            return [Value(OWED)]
        if role == "batch":
            return [Value(shard(position))]
    for side in (0, 1):
        other = values[1 - side]
        free = [dim for role, dim in roles[side] if role == "free"]
        if free and isinstance(other.kind, Whole):
            return [Value(Shard(frozenset(out[side][dim] for dim in free)))]
        # A whole operand that is constant along the contracted dim also counts as a shard.
        for role, position in roles[side]:
            contracted = role == "contract" and isinstance(other.kind, Whole)
            if contracted and contract[1 - side][position] in other.constant:
                return [Value(OWED)]
    return [Value(at.wrong(
        eqn,
        f"multiplies matrices whose dims do not meet: the left is {left.kind}, the right "
        f"{right.kind}, over {at.axis!r}",
    ))]  # fmt: skip


def _counted_as_whole(value: Value) -> Value:
    return value.of_kind(WHOLE) if isinstance(value.kind, Count) else value


def _roles(
    value: Value, aval: Any, contract: Sequence[int], batch: Sequence[int]
) -> set[tuple[str, int]]:
    """Return how a product uses each dim along which an operand may be sharded.

    A dim is contracted, a batch dim, or free; the number is its place among dims of that use, or
    for a free dim the dim itself.
    """
    if not isinstance(value.kind, Shard):
        return set()
    found = set()
    for dim in value.kind.dims:
        if dim in contract:
            found.add(("contract", list(contract).index(dim)))
        elif dim in batch:
            found.add(("batch", list(batch).index(dim)))
        else:
            found.add(("free", dim))
    return found


def _product_dims(
    eqn: Any, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
) -> list[dict[int, int]]:
    """Return for each operand the dim of the product that each of its free dims becomes."""
    at, found = len(batch[0]), []
    for side in (0, 1):
        taken = {*contract[side], *batch[side]}
        free = [dim for dim in range(eqn.invars[side].aval.ndim) if dim not in taken]
        found.append({dim: at + place for place, dim in enumerate(free)})
        at += len(free)
    return found


def gather(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of rows that are gathered from a table by index."""
    table, indices = values[0], values[1]
    spoilt = spoiled([table.kind, indices.kind])
    if spoilt is not None:
        return [Value(spoilt)]
    numbers = eqn.params["dimension_numbers"]
    ndim = eqn.outvars[0].aval.ndim
    batch = [dim for dim in range(ndim) if dim not in numbers.offset_dims]
    if isinstance(table.kind, Zero):
        return [Value(ZERO, all_constant(eqn.outvars[0].aval))]
    if isinstance(indices.kind, Shard):
        dims = frozenset(batch[dim] for dim in indices.kind.dims if dim < len(batch))
        shared = {
            batch[index]
            for dim, index in zip(
                numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
            )
            if isinstance(table.kind, Shard) and dim in table.kind.dims
        }
        if isinstance(table.kind, Whole):
            return [Value(Shard(dims, indices.kind.inner))]
        if shared & dims:
            return [Value(Shard(frozenset(shared & dims)))]
        return [Value(at.undecided(eqn, f"rows of {table.kind} by indices {indices.kind}"))]
    if isinstance(indices.kind, Own | Rank):
        return [Value(at.undecided(eqn, "rows by indices that differ between devices"))]
    if isinstance(table.kind, Shard):
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]
        to = dict(zip(kept, numbers.offset_dims, strict=True))
        dims = {to[dim] for dim in table.kind.dims if dim in to}
        looked_up = set(numbers.start_index_map)
        if table.kind.dims & looked_up or not dims:
            return [Value(at.undecided(eqn, "rows of a table whose rows are sharded"))]
        return [Value(Shard(frozenset(dims)))]
    return [Value(table.kind)]


def scatter_add(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of a table to which rows are added; sharded rows give partial sums."""
    table, indices, updates = values
    spoilt = spoiled([value.kind for value in values])
    if spoilt is not None:
        return [Value(spoilt)]
    numbers = eqn.params["dimension_numbers"]
    window = set(numbers.update_window_dims)
    kind = updates.kind
    scattered = [dim for dim in range(eqn.invars[2].aval.ndim) if dim not in window]
    if isinstance(kind, Whole | Count) and isinstance(indices.kind, Shard):
        rows = {scattered[dim] for dim in indices.kind.dims if dim < len(scattered)}
        if rows & updates.constant:  # equal numbers for all rows also count as sharded rows
            kind = Shard(frozenset(rows & updates.constant))
    if isinstance(kind, Zero):
        return [Value(table.kind)]
    if isinstance(kind, Shard):
        rows = kind.dims - window
        batched = set(numbers.operand_batching_dims)
        if rows and not batched:
            kind = OWED
        elif batched and rows and isinstance(table.kind, Shard | Zero):
            of_indices = {scattered.index(dim) for dim in rows}
            dims = {
                dim
                for dim, index in zip(
                    numbers.operand_batching_dims,
                    numbers.scatter_indices_batching_dims,
                    strict=True,
                )
                if index in of_indices
            }
            kind = Shard(frozenset(dims)) if dims else OWED
        elif isinstance(indices.kind, Whole | Zero):
            gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
            kept = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]
            to = dict(zip(sorted(window), kept, strict=True))
            kind = moved(kind, to)
        else:
            kind = at.undecided(eqn, "rows are added at indices that differ between devices")
    elif isinstance(kind, Whole | Owed | Count) and isinstance(indices.kind, Shard | Own | Rank):
        kind = at.undecided(eqn, "values are added at indices that differ between devices")
    if isinstance(table.kind, Zero) or table.kind == kind:
        return [Value(kind, _constant_windows(eqn, table, updates))]
    if isinstance(kind, Owed) and isinstance(table.kind, Whole):
        kind = at.wrong(
            eqn, f"adds a partial sum over {at.axis!r} to a whole value, which each device adds"
        )
    return [Value(kind if spoiled([kind]) else at.undecided(eqn, f"{kind} added to {table.kind}"))]


def _constant_windows(eqn: Any, table: Value, updates: Value) -> frozenset[int]:
    """Return the dims along which a table remains constant when rows are added to it.

    The added rows must be constant along a dim of the result, and as long as the table.
    """
    numbers = eqn.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    before, added = eqn.invars[0].aval, eqn.invars[2].aval
    kept = [dim for dim in range(before.ndim) if dim not in gone]
    pairs = zip(sorted(numbers.update_window_dims), kept, strict=True)
    return frozenset(
        to
        for dim, to in pairs
        if dim in updates.constant and to in table.constant and added.shape[dim] == before.shape[to]
    )


def scatter(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of a table of which rows are replaced, at equal places on every device."""
    table, indices, updates = values
    spoilt = spoiled([value.kind for value in values])
    if spoilt is not None:
        return [Value(spoilt)]
    if not isinstance(indices.kind, Whole | Zero | Count):
        return [Value(at.undecided(eqn, "each device writes to places of its own"))]
    numbers = eqn.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]
    kind = moved(updates.kind, dict(zip(sorted(numbers.update_window_dims), kept, strict=True)))
    return [Value(written(at, eqn, table, updates.of_kind(kind)))]


def convolution(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of a convolution: that of a product of `[batch, in]` and `[in, out]`."""
    spoilt = spoiled([value.kind for value in values])
    if spoilt is not None:
        return [Value(spoilt)]
    left, right = (_counted_as_whole(value).kind for value in values)
    if isinstance(left, Zero) or isinstance(right, Zero):
        return [Value(ZERO)]
    numbers = eqn.params["dimension_numbers"]
    batch, features = numbers.lhs_spec[:2]
    out_features, in_features = numbers.rhs_spec[:2]
    grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    if isinstance(left, Whole) and isinstance(right, Whole):
        return [Value(WHOLE)]
    if grouped:
        return [Value(at.undecided(eqn, "a grouped convolution of shards"))]
    if isinstance(left, Shard) and isinstance(right, Whole) and batch in left.dims:
        return [Value(shard(numbers.out_spec[0]))]
    if isinstance(left, Whole) and isinstance(right, Shard) and out_features in right.dims:
        return [Value(shard(numbers.out_spec[1]))]
    if isinstance(left, Shard) and features in left.dims:  # noqa: SIM102
        if isinstance(right, Shard) and in_features in right.dims:
            return [Value(OWED)]
    if {type(left), type(right)} == {Owed, Whole}:
        return [Value(OWED)]
    return [Value(at.undecided(eqn, f"a convolution of {left} with {right}"))]
