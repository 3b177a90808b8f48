"""The rules of matrix products, convolutions, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.elementwise import Context, Found, all_constant
from jaxdist.proofs.types.shapes import written


def dot_general(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a product: a partial sum if it contracts sharded dims of both operands."""
    values = [_counted_as_whole(value) for value in values]
    (left, right), (contract, batch) = values, eqn.params["dimension_numbers"]
    kinds = left.kind, right.kind
    if any(isinstance(kind, k.Zero) for kind in kinds):
        return k.Value(k.ZERO, all_constant(eqn.outvars[0].aval))
    if any(isinstance(kind, k.Owed) for kind in kinds):
        if all(isinstance(kind, k.Owed | k.Whole) for kind in kinds) and type(kinds[0]) is not type(
            kinds[1]
        ):
            return k.OWED
        return at.wrong(eqn, f"multiplies a partial sum over {at.axis!r} by another value "
                               "that differs between devices")  # fmt: skip
    if not any(isinstance(kind, k.Shard) for kind in kinds):
        return k.OWN if any(isinstance(kind, k.Own) for kind in kinds) else k.WHOLE
    roles = [
        _roles(value, var.aval, contract[side], batch[side])
        for side, (value, var) in enumerate(zip(values, eqn.invars, strict=True))
    ]
    out = _product_dims(eqn, contract, batch)
    for role, position in sorted(roles[0] & roles[1]):
        if role == "contract":
            return k.OWED
        if role == "batch":
            return k.shard(position)
    for side in (0, 1):
        other = values[1 - side]
        free = [dim for role, dim in roles[side] if role == "free"]
        if free and isinstance(other.kind, k.Whole):
            return k.Shard(frozenset(out[side][dim] for dim in free))
        # A whole operand that is constant along the contracted dim also counts as a shard.
        for role, position in roles[side]:
            contracted = role == "contract" and isinstance(other.kind, k.Whole)
            if contracted and contract[1 - side][position] in other.constant:
                return k.OWED
    return at.wrong(
        eqn,
        f"multiplies matrices whose dims do not meet: the left is {left.kind}, the right "
        f"{right.kind}, over {at.axis!r}",
    )  # fmt: skip


def _counted_as_whole(value: k.Value) -> k.Value:
    return value.of_kind(k.WHOLE) if isinstance(value.kind, k.Count) else value


def _roles(
    value: k.Value, aval: Any, contract: Sequence[int], batch: Sequence[int]
) -> set[tuple[str, int]]:
    """Return how a product uses each dim along which an operand may be sharded.

    A dim is contracted, a batch dim, or free; the number is its place among dims of that use, or
    for a free dim the dim itself.
    """
    if not isinstance(value.kind, k.Shard):
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


def gather(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of rows that are gathered from a table by index."""
    table, indices = values[0], values[1]
    numbers = eqn.params["dimension_numbers"]
    ndim = eqn.outvars[0].aval.ndim
    batch = [dim for dim in range(ndim) if dim not in numbers.offset_dims]
    if isinstance(table.kind, k.Zero):
        return k.Value(k.ZERO, all_constant(eqn.outvars[0].aval))
    if isinstance(indices.kind, k.Shard):
        dims = frozenset(batch[dim] for dim in indices.kind.dims if dim < len(batch))
        shared = {
            batch[index]
            for dim, index in zip(
                numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
            )
            if isinstance(table.kind, k.Shard) and dim in table.kind.dims
        }
        if isinstance(table.kind, k.Whole):
            return k.Shard(dims, indices.kind.inner)
        if shared & dims:
            return k.Shard(frozenset(shared & dims))
        return at.undecided(eqn, f"rows of {table.kind} by indices {indices.kind}")
    if isinstance(indices.kind, k.Own | k.Rank):
        return at.undecided(eqn, "rows by indices that differ between devices")
    if isinstance(table.kind, k.Shard):
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]
        to = dict(zip(kept, numbers.offset_dims, strict=True))
        dims = {to[dim] for dim in table.kind.dims if dim in to}
        looked_up = set(numbers.start_index_map)
        if table.kind.dims & looked_up or not dims:
            return at.undecided(eqn, "rows of a table whose rows are sharded")
        return k.Shard(frozenset(dims))
    return table.kind


def scatter_add(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a table to which rows are added; sharded rows give partial sums."""
    table, indices, updates = values
    numbers = eqn.params["dimension_numbers"]
    window = set(numbers.update_window_dims)
    kind = updates.kind
    scattered = [dim for dim in range(eqn.invars[2].aval.ndim) if dim not in window]
    if isinstance(kind, k.Whole | k.Count) and isinstance(indices.kind, k.Shard):
        rows = {scattered[dim] for dim in indices.kind.dims if dim < len(scattered)}
        if rows & updates.constant:  # equal numbers for all rows also count as sharded rows
            kind = k.Shard(frozenset(rows & updates.constant))
    if isinstance(kind, k.Zero):
        return table.kind
    if isinstance(kind, k.Shard):
        rows = kind.dims - window
        batched = set(numbers.operand_batching_dims)
        if rows and not batched:
            kind = k.OWED
        elif batched and rows and isinstance(table.kind, k.Shard | k.Zero):
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
            kind = k.Shard(frozenset(dims)) if dims else k.OWED
        elif isinstance(indices.kind, k.Whole | k.Zero):
            kind = k.moved(kind, _windows(eqn))
        else:
            kind = at.undecided(eqn, "rows are added at indices that differ between devices")
    elif isinstance(kind, k.Whole | k.Owed | k.Count) and isinstance(
        indices.kind, k.Shard | k.Own | k.Rank
    ):
        kind = at.undecided(eqn, "values are added at indices that differ between devices")
    if isinstance(table.kind, k.Zero) or table.kind == kind:
        return k.Value(kind, _constant_windows(eqn, table, updates))
    if isinstance(kind, k.Owed) and isinstance(table.kind, k.Whole):
        kind = at.wrong(
            eqn, f"adds a partial sum over {at.axis!r} to a whole value, which each device adds"
        )
    return kind if k.spoiled([kind]) else at.undecided(eqn, f"{kind} added to {table.kind}")


def _windows(eqn: Any) -> dict[int, int]:
    """Return the dim of the table that each window dim of a scatter's updates is."""
    numbers = eqn.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]
    return dict(zip(sorted(numbers.update_window_dims), kept, strict=True))


def _constant_windows(eqn: Any, table: k.Value, updates: k.Value) -> frozenset[int]:
    """Return the dims along which a table remains constant when rows are added to it.

    The added rows must be constant along a dim of the result, and as long as the table.
    """
    before, added = eqn.invars[0].aval, eqn.invars[2].aval
    return frozenset(
        to
        for dim, to in _windows(eqn).items()
        if dim in updates.constant and to in table.constant and added.shape[dim] == before.shape[to]
    )


def scatter(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a table of which rows are replaced, at equal places on every device."""
    table, indices, updates = values
    if not isinstance(indices.kind, k.Whole | k.Zero | k.Count):
        return at.undecided(eqn, "each device writes to places of its own")
    return written(at, eqn, table, updates.of_kind(k.moved(updates.kind, _windows(eqn))))


def convolution(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a convolution: that of a product of `[batch, in]` and `[in, out]`."""
    left, right = (_counted_as_whole(value).kind for value in values)
    if isinstance(left, k.Zero) or isinstance(right, k.Zero):
        return k.ZERO
    numbers = eqn.params["dimension_numbers"]
    batch, features = numbers.lhs_spec[:2]
    out_features, in_features = numbers.rhs_spec[:2]
    grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    if isinstance(left, k.Whole) and isinstance(right, k.Whole):
        return k.WHOLE
    if grouped:
        return at.undecided(eqn, "a grouped convolution of shards")
    if isinstance(left, k.Shard) and isinstance(right, k.Whole) and batch in left.dims:
        return k.shard(numbers.out_spec[0])
    if isinstance(left, k.Whole) and isinstance(right, k.Shard) and out_features in right.dims:
        return k.shard(numbers.out_spec[1])
    if isinstance(left, k.Shard) and features in left.dims:  # noqa: SIM102
        if isinstance(right, k.Shard) and in_features in right.dims:
            return k.OWED
    if {type(left), type(right)} == {k.Owed, k.Whole}:
        return k.OWED
    return at.undecided(eqn, f"a convolution of {left} with {right}")
