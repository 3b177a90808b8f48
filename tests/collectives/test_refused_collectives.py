"""What the operations and their configs refuse, at trace time, and in which words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from pydantic import TypeAdapter, ValidationError
from sharded import label, mesh_of, run

from jaxdist import collectives
from jaxdist.collectives import (
    CollectiveError,
    Halving,
    Hierarchical,
    Ring,
    Xla,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
)


def inside(call, sizes=None, shape=(6,), dtype="float32"):
    sizes = sizes or {"data": 4, "tensor": 2}
    count = int(np.prod(list(sizes.values())))
    return run(call, np.zeros((count, *shape), dtype), sizes)


REFUSED = {
    "unknown axis": (
        lambda x: all_reduce(x, "dat"),
        r"all_reduce over 'dat' needs axis 'dat', but the bound axes are \{data: 4, tensor: 2\}: "
        "did you mean 'data'",
    ),
    "no axis": (lambda x: broadcast(x, ()), r"broadcast over \(\) names no axis"),
    "axis twice": (
        lambda x: all_gather(x, ("data", "data")),
        r"all_gather over \('data', 'data'\) names an axis twice",
    ),
    "axis by number": (lambda x: all_reduce(x, 0), "all_reduce over 0: the axis must be the name"),
    "op": (lambda x: all_reduce(x, "data", op="avg"), "op='avg': allowed: sum, mean, max, min"),
    "op of reduce": (lambda x: reduce(x, "data", op="summ"), "op='summ': did you mean 'sum'"),
    "algorithm": (
        lambda x: all_reduce(x, "data", algorithm="ring"),
        r"algorithm='ring': pass an instance of an algorithm, such as Ring\(\)",
    ),
    "root": (
        lambda x: broadcast(x, "data", root=4),
        "broadcast over 'data': root 4 is out of range: the axis has 4 devices, so use 0 to 3",
    ),
    "negative root": (lambda x: reduce(x, "data", root=-1), "root -1 is out of range"),
    "traced root": (
        lambda x: broadcast(x, "data", root=lax.axis_index("data")),
        "root must be a whole number known at trace time",
    ),
    "dim": (
        lambda x: all_gather(x, "data", dim=1),
        r"all_gather: dim 1 is out of range for shape \[6\]",
    ),
    "scalar": (
        lambda x: reduce_scatter(x[0], "data"),
        r"dim 0 is out of range for shape \[\]; reshape the scalar to \[1\]",
    ),
    "not divisible": (
        lambda x: all_to_all(x, "data"),
        r"all_to_all over 'data' \(4 devices\): split_dim 0 of shape \[6\] does not divide by 4; "
        "pad the dim to 8",
    ),
    "gathered size": (
        lambda x: all_gather(x, "data", size=25),
        "size 25 is out of range: the gathered dim has 24",
    ),
    "one level": (
        lambda x: all_reduce(x, "data", algorithm=Hierarchical()),
        r"hierarchical over 'data' \(4 devices\) needs two axes, the slow one first",
    ),
    "tree": (
        lambda x: all_reduce({"w": x}, "data"),
        "expects a single array, not a dict: use jax.tree.map, or reduce_tree",
    ),
    "keys": (
        lambda x: all_gather(jax.random.split(jax.random.key(0), 2), "data"),
        "all_gather of key<fry> is not defined: .*jax.random.key_data",
    ),
    "integer mean": (
        lambda x: all_reduce(x.astype(jnp.int32), "data", op="mean"),
        r"op='mean' of int32\[6\]: the mean of integers is not an integer; cast to float32",
    ),
    "sum of bools": (
        lambda x: reduce_scatter(x > 0, "data"),
        r"reduce_scatter with op='sum' of bool\[6\] is not defined: cast to int32 to count, or use",
    ),
    "complex max": (
        lambda x: reduce(x + 1j, "data", op="max"),
        r"op='max' of complex64\[6\]: complex numbers have no order",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_trace_time(name):
    call, message = REFUSED[name]
    with pytest.raises(CollectiveError, match=message):
        inside(call)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "reduce"])
@pytest.mark.parametrize("algorithm", [Xla(), Ring()], ids=label)
def test_max_has_no_derivative(operation, algorithm):
    def gradient(x):
        call = getattr(collectives, operation)
        return jax.grad(lambda x: call(x, "data", op="max", algorithm=algorithm).sum())(x)

    message = rf"{operation} with op='max' of float32\[.*\] has no derivative.*stop_gradient"
    with pytest.raises(CollectiveError, match=message):
        inside(gradient)


def test_max_of_what_is_not_differentiated():
    def gradient(x):
        def loss(x):
            highest = all_reduce(lax.stop_gradient(x), "data", op="max", algorithm=Ring())
            return (x - highest).sum()

        return jax.grad(loss)(x)

    assert inside(gradient).tolist() == np.ones((8, 6)).tolist()


def test_outside_shard_map():
    message = (
        "all_reduce over 'data' was called outside of jax.shard_map, where no axis is bound: "
        "call the operation in a "
        "function that jax.shard_map maps over a mesh with axis 'data'"
    )
    with pytest.raises(CollectiveError, match=message):
        all_reduce(jnp.ones(3), "data")
    with pytest.raises(CollectiveError, match=message), jax.set_mesh(mesh_of({"data": 2})):
        jax.jit(lambda x: all_reduce(x, "data"))(jnp.ones(3))


def test_an_axis_that_xla_places():
    whole = jax.shard_map(
        lambda x: all_reduce(x, "tensor"),
        mesh=mesh_of({"data": 4, "tensor": 2}),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    with pytest.raises(
        CollectiveError,
        match=r"'tensor', but the axis is automatic: add the axis to axis_names .*: data\)",
    ):
        jax.jit(whole)(jnp.ones(4))


def test_devices_whose_arrays_differ_cannot_be_written():
    """SPMD: the shape is of the one program; shard_map refuses what does not divide."""
    whole = jax.shard_map(
        lambda x: all_reduce(x, "data"),
        mesh=mesh_of({"data": 4}),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    with pytest.raises(ValueError, match="divisible"):
        whole(jnp.ones(6))


def test_a_config_is_an_algorithm():
    read = TypeAdapter(Ring).validate_json('{"type": "ring", "directions": 2}')
    assert read == Ring(directions=2)
    assert hash(read) == hash(Ring(directions=2))
    levels = '{"inside": {"type": "halving"}, "across": {"type": "ring", "chunks": 4}}'
    assert TypeAdapter(Hierarchical).validate_json(levels) == Hierarchical(
        inside=Halving(), across=Ring(chunks=4)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ring(directions=3), "less than or equal to 2"),
        (lambda: Ring(chunks=0), "greater than or equal to 1"),
        (lambda: Ring(accumulate="float64"), "float32"),
        (lambda: Ring(bucket_bytes=0), "greater than or equal to 1"),
        (
            lambda: Hierarchical(inside=Ring(accumulate="float32")),
            "accumulate has no effect on .*: set accumulate on hierarchical",
        ),
        (
            lambda: Hierarchical(across=Xla(bucket_bytes=1024)),
            "bucket_bytes has no effect on .*: set bucket_bytes on hierarchical",
        ),
        (lambda: Hierarchical(inside=Hierarchical()), "inside"),
    ],
)
def test_refused_settings(make, message):
    with pytest.raises(ValidationError, match=message):
        make()
