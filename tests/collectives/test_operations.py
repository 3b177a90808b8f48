"""Gradients, transformations and typing of the operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded import label, mapped, mesh_of, run

from jaxdist.collectives import (
    DoubleTree,
    Halving,
    Hierarchical,
    Ring,
    Tree,
    Xla,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
    reference,
)

ALGORITHMS = [
    Xla(),
    Ring(directions=2),
    Tree(),
    DoubleTree(),
    Halving(),
    Hierarchical(),
    Hierarchical(inside=Ring(), across=Xla()),
]
SIZES = {"a": 2, "b": 2}
AXIS = ("a", "b")


def linear_operations(algorithm):
    """Name to (operation, the same on plain lists, shape of the input)."""
    n = {"algorithm": algorithm}
    return {
        "sum": (lambda x: all_reduce(x, AXIS, **n), reference.all_reduce, (5,)),
        "mean": (
            lambda x: all_reduce(x, AXIS, op="mean", **n),
            lambda b: reference.all_reduce(b, "mean"),
            (5,),
        ),
        "scatter": (lambda x: reduce_scatter(x, AXIS, **n), reference.reduce_scatter, (6,)),
        "gather": (
            lambda x: all_gather(x, AXIS, size=7, **n),
            lambda b: reference.all_gather(b, size=7),
            (2,),
        ),
        "broadcast": (
            lambda x: broadcast(x, AXIS, root=2, **n),
            lambda b: reference.broadcast(b, 2),
            (3,),
        ),
        "reduce": (
            lambda x: reduce(x, AXIS, root=1, **n),
            lambda b: reference.reduce(b, 1),
            (3,),
        ),
        "exchange": (lambda x: all_to_all(x, AXIS, **n), reference.all_to_all, (8,)),
    }


def matrix_of(plain, shape):
    """The linear map of all devices' numbers, column by column."""
    count = int(np.prod((4, *shape)))
    columns = np.eye(count, dtype="float32").reshape(count, 4, *shape)
    return np.stack([np.stack(plain(list(column))).ravel() for column in columns], axis=1)


@pytest.mark.parametrize(
    ("algorithm", "check_vma"),
    [*((algorithm, True) for algorithm in ALGORITHMS), (Xla(), False), (Ring(), False)],
    ids=label,
)
@pytest.mark.every(3)
def test_the_transpose_is_the_transposed_matrix(algorithm, check_vma):
    """vjp of the whole shard_map, once and once more: the transpose's transpose is the map."""
    table = linear_operations(algorithm)
    rng = np.random.default_rng(0)
    whole = {
        name: mapped(function, SIZES, check_vma=check_vma, jit=False)
        for name, (function, _, _) in table.items()
    }
    x = {name: rng.normal(size=(4, *s)).astype("float32") for name, (_, _, s) in table.items()}
    shapes = jax.eval_shape(lambda t: {n: whole[n](t[n]) for n in t}, x)
    y = {n: rng.normal(size=s.shape).astype("float32") for n, s in shapes.items()}

    @jax.jit
    def both(x, y):
        found = {}
        for name, function in whole.items():
            _, transpose = jax.vjp(function, x[name])
            pulled, again = jax.vjp(lambda ct, t=transpose: t(ct)[0], y[name])
            found[name] = pulled, again(x[name])[0]
        return found

    for name, (pulled, pushed) in both(x, y).items():
        matrix = matrix_of(*table[name][1:])
        np.testing.assert_allclose(
            np.ravel(pulled), matrix.T @ y[name].ravel(), rtol=1e-5, atol=1e-5, err_msg=name
        )
        np.testing.assert_allclose(
            np.ravel(pushed), matrix @ x[name].ravel(), rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("algorithm", [Ring(), Halving(), Hierarchical()], ids=label)
def test_the_transpose_runs_the_same_algorithm(algorithm):
    """As many messages as the forward pass, and none of the slices that autodiff would pad."""

    def loss(x):
        return mapped(lambda a: all_reduce(a, AXIS, algorithm=algorithm), SIZES, jit=False)(x).sum()

    x = np.ones((4, 8), "float32")
    text = jax.jit(jax.grad(loss)).lower(x).as_text()
    forward = jax.jit(loss).lower(x).as_text()
    for operation in ("collective_permute", "dynamic_update_slice", "stablehlo.add"):
        assert text.count(operation) == forward.count(operation), operation


def training_loss(algorithm, axis="data"):
    """Mean loss of a linear model over the batch on `axis`; w is replicated."""

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    return lambda w, x: all_reduce(loss(w, x), axis, op="mean", algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [Ring(), Tree(), Halving()], ids=label)
def test_gradient_of_a_replicated_loss_equals_psum(algorithm):
    """Outside shard_map with check_vma=False, where both have replicated out_specs."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=3).astype("float32"), rng.normal(size=(8, 3)).astype("float32")

    def gradient(chosen):
        whole = jax.shard_map(
            training_loss(chosen),
            mesh=mesh_of({"data": 4}),
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(jax.value_and_grad(whole))(w, x)

    ours, theirs = gradient(algorithm), gradient(Xla())
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_gradient_inside_shard_map_reduced_by_hand(check_vma):
    """The data-parallel step: local gradient, then the mean of the devices' gradients."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=3).astype("float32"), rng.normal(size=(8, 3)).astype("float32")

    def step(w, x):
        if check_vma:
            w = lax.pcast(w, ("data",), to="varying")
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return all_reduce(gradient, "data", op="mean", algorithm=Ring())[None]

    found = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh_of({"data": 4}),
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )(w, x)
    wanted = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(jnp.asarray(w))
    np.testing.assert_allclose(found, np.stack([wanted] * 4), rtol=1e-5)


def test_a_gradient_inside_is_that_of_all_losses_together():
    """What the docstring says: a varying result, N losses; the same as psum without vma."""

    def gradient(algorithm):
        def inside(x):
            return jax.grad(lambda x: all_reduce(x, "data", algorithm=algorithm) ** 2)(x)

        return run(inside, np.arange(4.0, dtype="float32"), {"data": 4})

    np.testing.assert_allclose(gradient(Ring()), [48.0] * 4)
    np.testing.assert_allclose(gradient(Xla()), [48.0] * 4)


def test_xla_is_typed_as_jax_types_psum():
    whole = jax.shard_map(
        lambda x: (all_reduce(x, "data"), broadcast(x, "data")),
        mesh=mesh_of({"data": 4}),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=True,
    )
    total, first = whole(jnp.arange(4.0))
    assert total.tolist() == [6.0]
    assert first.tolist() == [0.0]


def test_a_hand_written_result_counts_as_varying():
    mesh = mesh_of({"data": 4})
    specs = {"mesh": mesh, "in_specs": P("data"), "out_specs": P()}

    def total(x):
        return all_reduce(x, "data", algorithm=Ring())

    with pytest.raises(ValueError, match="check_vma"):
        jax.jit(jax.shard_map(total, **specs, check_vma=True))(jnp.arange(4.0))
    whole = jax.jit(jax.shard_map(total, **specs, check_vma=False))
    assert whole(jnp.arange(4.0)).tolist() == [6.0]


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
def test_a_replicated_input_counts_once_for_each_device(algorithm, check_vma):
    def total(x):
        return all_reduce(jnp.ones(3), AXIS, algorithm=algorithm) + x

    found = run(total, np.zeros((4, 3), "float32"), SIZES, check_vma=check_vma)
    assert found.tolist() == np.full((4, 3), 4.0).tolist()


@pytest.mark.parametrize("algorithm", [Ring(), Tree(), Hierarchical()], ids=label)
def test_gradient_of_a_replicated_input(algorithm):
    """Four devices add up w of each: 4 w on each of them, 16 in all."""

    def gradient(w):
        return jax.grad(lambda w: all_reduce(w, AXIS, algorithm=algorithm).sum())(w)

    whole = jax.shard_map(
        gradient, mesh=mesh_of(SIZES), in_specs=P(), out_specs=P(), check_vma=True
    )
    assert jax.jit(whole)(jnp.ones(3)).tolist() == [16.0] * 3


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("algorithm", [Xla(), Ring(), Tree(), Halving()], ids=label)
def test_partly_manual(algorithm, check_vma):
    """Axis `data` by hand, axis `tensor` by XLA."""
    mesh = mesh_of({"data": 4, "tensor": 2})
    x = np.random.default_rng(0).integers(0, 9, (8, 6)).astype("float32")
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data", "tensor")))

    def step(x):
        total = all_reduce(x, "data", algorithm=algorithm)
        block = reduce_scatter(x, "data", dim=1, algorithm=algorithm)
        return total, all_gather(block, "data", dim=1, size=6, algorithm=algorithm)

    whole = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=check_vma,
    )
    wanted = np.tile(x.reshape(4, 2, 6).sum(0), (4, 1))
    for found in jax.jit(whole)(sharded):
        np.testing.assert_array_equal(found, wanted)
    gradient = jax.jit(jax.grad(lambda x: (whole(x)[0] ** 2).sum()))(sharded)
    np.testing.assert_array_equal(gradient, 8 * wanted)


@pytest.mark.parametrize("algorithm", [Xla(), Ring(chunks=2), Tree(), Halving()], ids=label)
def test_vmap_scan_and_remat(algorithm):
    def loss(x):
        def body(carry, row):
            total = jax.vmap(lambda a: all_reduce(a, "data", op="mean", algorithm=algorithm))(row)
            return carry + (total**2).sum(), None

        return lax.scan(jax.checkpoint(body), jnp.zeros(()), x)[0]

    def inside(x):
        return loss(x), jax.grad(loss)(x)

    x = np.random.default_rng(0).normal(size=(2, 2, 3, 5)).astype("float32")
    found, gradient = run(inside, x, {"data": 2})
    mean = x.mean(0)
    np.testing.assert_allclose(found, [(mean**2).sum()] * 2, rtol=1e-5)
    np.testing.assert_allclose(gradient, np.stack([2 * mean] * 2), rtol=1e-5)


def test_xla_has_a_forward_mode():
    def inside(x):
        return jax.jvp(lambda x: all_reduce(x, "data") ** 2, (x,), (jnp.ones_like(x),))[1]

    assert run(inside, np.arange(2.0, dtype="float32"), {"data": 2}).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("algorithm", [Xla(), Ring(), Tree(), Halving(), Hierarchical()], ids=label)
def test_several_axes_count_in_the_order_of_the_tuple(algorithm):
    """Against the mesh's order: device (a, b) has rank 2 b + a."""
    x = np.arange(36, dtype="int32").reshape(6, 6)
    options = {"axis": ("b", "a"), "algorithm": algorithm}

    def every(a):
        scattered = reduce_scatter(a, **options)
        return all_gather(a[:1], **options), scattered, broadcast(a[:1], root=2, **options)

    gathered, scattered, first = run(every, x, {"a": 2, "b": 3})
    assert gathered.tolist() == [[0, 18, 6, 24, 12, 30]] * 6
    assert scattered.ravel().tolist() == x.sum(0)[[0, 2, 4, 1, 3, 5]].tolist()
    assert first.ravel().tolist() == [6] * 6


def test_python_numbers_and_lists_of_names():
    found = run(lambda a: all_reduce(2.0, ["data"]) + a, np.zeros(2, "float32"), {"data": 2})
    assert found.tolist() == [4.0, 4.0]


def test_the_result_takes_the_memory_of_a_donated_input():
    """No second buffer, and no copy of the whole array at each step."""
    whole = mapped(lambda a: all_reduce(a, "data", algorithm=Ring()), {"data": 4}, jit=False)
    x = jax.ShapeDtypeStruct((4, 4096), jnp.float32)
    compiled = jax.jit(whole, donate_argnums=0).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 3 * 4096
    assert " copy(" not in compiled.as_text()
