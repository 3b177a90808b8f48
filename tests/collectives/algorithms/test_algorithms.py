"""The contract as a table: algorithm x axis size x operation x op x shape, against reference.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from sharded import FLAT, LEVELS, label, run

from jaxdist import collectives
from jaxdist.collectives import Auto, DoubleTree, Halving, Hierarchical, Ring, Tree, Xla, reference

SHAPES = {"scalar": (), "empty": (0,), "one": (1,), "odd": (13,), "matrix": (5, 3)}
OPS = ("sum", "mean", "max", "min")


def whole_numbers(shape, dtype="float32", seed=0):
    """Small enough that every order of summation gives the same bits."""
    values = np.random.default_rng(seed).integers(-4, 5, size=shape)
    if np.dtype(dtype).kind == "u":
        values = abs(values)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * values[::-1]
    return values.astype(dtype)


def cases(size, gathered):
    """Name to (operation, its arguments, the shape of its input)."""
    root = size - 1
    table = {f"all_reduce {name}": ("all_reduce", {}, shape) for name, shape in SHAPES.items()}
    table |= {f"all_reduce {op}": ("all_reduce", {"op": op}, (13,)) for op in OPS}
    table |= {f"reduce_scatter {op}": ("reduce_scatter", {"op": op}, (13,)) for op in OPS}
    table |= {f"reduce {op}": ("reduce", {"op": op, "root": root}, (5, 3)) for op in OPS}
    table |= {
        "reduce_scatter dim": ("reduce_scatter", {"dim": -1}, (3, 5)),
        "reduce_scatter even": ("reduce_scatter", {}, (2 * size, 2)),
        "reduce_scatter empty": ("reduce_scatter", {}, (0, 2)),
        "all_gather": ("all_gather", {}, (3,)),
        "all_gather dim": ("all_gather", {"dim": 1}, (2, 3)),
        "all_gather cut": ("all_gather", {"size": gathered}, (3, 2)),
        "all_gather empty": ("all_gather", {}, (0, 2)),
        "broadcast": ("broadcast", {"root": root}, (5, 3)),
        "broadcast middle": ("broadcast", {"root": size // 2}, (13,)),
        "broadcast scalar": ("broadcast", {}, ()),
        "broadcast empty": ("broadcast", {}, (0,)),
        "reduce empty": ("reduce", {}, (3, 0)),
        "reduce middle": ("reduce", {"root": size // 2}, (13,)),
        "all_to_all": ("all_to_all", {}, (2 * size,)),
        "all_to_all dims": ("all_to_all", {"split_dim": 1, "concat_dim": 0}, (3, 2 * size)),
        "all_to_all empty": ("all_to_all", {}, (0,)),
    }
    return table


def expected(operation, arguments, x):
    positive = {k: v % (x.ndim - 1) if "dim" in k else v for k, v in arguments.items()}
    return np.stack(getattr(reference, operation)(list(x), **positive))


CORE = (
    "all_reduce odd",
    "reduce_scatter max",
    "all_gather cut",
    "broadcast middle",
    "reduce middle",
    "all_to_all dims",
)


def check(algorithm, sizes, only=None):
    axis = tuple(sizes) if len(sizes) > 1 else next(iter(sizes))
    count = int(np.prod(list(sizes.values())))
    table = cases(count, 3 * count - 2)
    table = {name: table[name] for name in only or table}
    inputs = {name: whole_numbers((count, *shape)) for name, (_, _, shape) in table.items()}

    def every(tree):
        return {
            name: getattr(collectives, operation)(
                tree[name], axis, algorithm=algorithm, **arguments
            )
            for name, (operation, arguments, _) in table.items()
        }

    results = run(every, inputs, sizes)
    for name, (operation, arguments, _) in table.items():
        wanted = expected(operation, arguments, inputs[name])
        assert results[name].dtype == wanted.dtype
        # XLA divides by multiplying, which may round another way: one last bit.
        slack = 2e-7 if arguments.get("op") == "mean" else 0
        np.testing.assert_allclose(results[name], wanted, rtol=slack, err_msg=name, strict=True)


@pytest.mark.parametrize(
    "algorithm", [Xla(), Ring(directions=2), DoubleTree(), Halving()], ids=label
)
def test_the_whole_table_on_3_devices(algorithm):
    check(algorithm, {"data": 3})


@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("algorithm", FLAT, ids=label)
@pytest.mark.every(3)
def test_every_operation(algorithm, size):
    check(algorithm, {"data": size}, CORE)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("algorithm", FLAT, ids=label)
def test_the_whole_table(algorithm, size):
    check(algorithm, {"data": size})


@pytest.mark.parametrize("algorithm", [Xla(), Ring(), Halving()], ids=label)
def test_several_axes_count_as_one(algorithm):
    check(algorithm, {"a": 2, "b": 3}, CORE)


@pytest.mark.parametrize("algorithm", LEVELS, ids=label)
def test_two_levels(algorithm):
    check(algorithm, {"data_dcn": 3, "data_ici": 2}, CORE)


@pytest.mark.full
def test_the_whole_table_on_two_levels():
    check(Hierarchical(), {"data_dcn": 2, "data_ici": 3})


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (1, 1), (2, 1, 3)], ids=str)
def test_levels_of_one_device_and_three_axes(sizes):
    check(Hierarchical(), dict(zip("abc", sizes, strict=False)), CORE)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("algorithm", LEVELS, ids=label)
def test_the_whole_table_on_more_levels(algorithm, sizes):
    check(algorithm, dict(zip("abc", sizes, strict=False)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64])
def test_many_devices(size):
    """In a process of its own, which has that many."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(sharded.__file__).parent)!r})\n"
        "from jaxdist.runtime import environment\n"
        f"environment.prepare(fake_devices={size})\n"
        "from sharded import FLAT, LEVELS\n"
        "from test_algorithms import CORE, check\n"
        f"for algorithm in FLAT: check(algorithm, {{'data': {size}}}, CORE)\n"
        f"for algorithm in LEVELS: check(algorithm, {{'a': {size // 8}, 'b': 8}}, CORE)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def dtype_cases():
    numbers = "float32 bfloat16 float16 int8 int16 int32 uint8 uint32"
    table = [(dtype, op) for dtype in numbers.split() for op in ("sum", "max")]
    table += [(dtype, "mean") for dtype in ("float32", "bfloat16", "float16", "complex64")]
    return [*table, ("complex64", "sum"), ("bool", "max"), ("bool", "min")]


@pytest.mark.parametrize("algorithm", [Xla(), Ring(), Tree(), Hierarchical()], ids=label)
@pytest.mark.every(3)
def test_dtypes(algorithm):
    """Whole numbers of two devices: exact in every dtype, half of their sum as well."""
    sizes = {"a": 1, "b": 2}
    inputs = {case: whole_numbers((2, 6), jnp.dtype(case[0])) for case in dtype_cases()}

    def every(tree):
        return {
            case: collectives.all_reduce(x, ("a", "b"), op=case[1], algorithm=algorithm)
            for case, x in tree.items()
        }

    results = run(every, inputs, sizes)
    for (dtype, op), x in inputs.items():
        wanted = np.stack(reference.all_reduce(list(x), op))
        np.testing.assert_array_equal(results[dtype, op], wanted, err_msg=f"{dtype} {op}")
        assert results[dtype, op].dtype == jnp.dtype(dtype)


SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -3.0)


def special(shape, dtype, seed=0):
    """Of floats the values that are treated apart, of integers the ends of their range too."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.choice([jnp.iinfo(dtype).min, 0, 1, jnp.iinfo(dtype).max], shape).astype(dtype)
    drawn = rng.choice(SPECIAL, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        drawn = drawn + 1j * rng.choice([-0.0, 1.0], shape)
    return drawn.astype(dtype)


@pytest.mark.parametrize(
    "algorithm", [Xla(), Auto(), Ring(), Tree(), DoubleTree(), Halving()], ids=label
)
@pytest.mark.every(3)
def test_what_only_moves_keeps_every_bit_of_every_dtype(algorithm):
    dtypes = ("float8_e4m3fn", "bfloat16", "float16", "bool", "complex64", "int8", "float32")
    with np.errstate(invalid="ignore"):
        inputs = {dtype: special((3, 6), dtype) for dtype in dtypes}

    def every(tree):
        return {
            dtype: (
                collectives.all_gather(x, "data", algorithm=algorithm),
                collectives.all_to_all(x, "data", algorithm=algorithm),
                collectives.broadcast(x, "data", root=1, algorithm=algorithm),
            )
            for dtype, x in tree.items()
        }

    results = run(every, inputs, {"data": 3})
    for dtype, x in inputs.items():
        gathered, exchanged, copied = results[dtype]
        assert gathered.tobytes() == np.stack(reference.all_gather(list(x))).tobytes()
        assert exchanged.tobytes() == np.stack(reference.all_to_all(list(x))).tobytes()
        assert copied.tobytes() == np.stack(reference.broadcast(list(x), 1)).tobytes(), dtype
        assert copied.dtype == x.dtype


ONE_OF_A_KIND = [Xla(), Ring(), Tree(), Halving(), LEVELS[0]]
OTHERS = [a for a in (*FLAT, *LEVELS[:2], Auto()) if a not in ONE_OF_A_KIND]


@pytest.mark.parametrize(
    "algorithm",
    [
        *ONE_OF_A_KIND,
        *(
            pytest.param(a, marks=pytest.mark.slow if isinstance(a, Ring) else pytest.mark.full)
            for a in OTHERS
        ),
    ],
    ids=label,
)
@pytest.mark.every(3)
def test_special_values_are_combined_by_one_meaning(algorithm):
    levels = isinstance(algorithm, Hierarchical)
    sizes = {"a": 2, "b": 2} if levels else {"a": 3}
    count, axis = (4, ("a", "b")) if levels else (3, "a")
    cases = [
        (operation, op, dtype)
        for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint32", "bool")
        for op in ("max", "min", "sum")[: 3 if dtype in ("float32", "bfloat16") else 2]
        for operation in ("all_reduce", "reduce", "reduce_scatter")
    ]
    inputs = {case: special((count, 40), case[2], seed) for seed, case in enumerate(cases)}

    def every(tree):
        return {
            (operation, op, dtype): getattr(collectives, operation)(
                x, axis, op=op, algorithm=algorithm
            )
            for (operation, op, dtype), x in tree.items()
        }

    results = run(every, inputs, sizes)
    for case, x in inputs.items():
        with np.errstate(invalid="ignore"):
            wanted = np.stack(getattr(reference, case[0])(list(x), op=case[1]))
        assert results[case].dtype == x.dtype
        np.testing.assert_array_equal(
            *(found.astype(np.float64) for found in (results[case], wanted)), err_msg=str(case)
        )


def ring_order(x, d):
    size = len(x)
    return sum_in_order([x[(d + i) % size] for i in range(1, size + 1)])


def two_way_order(x, d):
    size = len(x)
    right, left = size // 2, (size - 1) // 2
    first = sum_in_order([x[(d - i) % size] for i in range(right, -1, -1)])
    return first + sum_in_order([x[(d + i) % size] for i in range(left, 0, -1)])


def halving_order(x, d):
    return (x[d] + x[d - 2]) + (x[d - 1] + x[d - 3])


def tree_order(x, _):
    return (x[0] + x[1]) + (x[2] + x[3])


def double_tree_order(x, d):
    return tree_order(x, d) if d < 2 else (x[3] + x[0]) + (x[1] + x[2])


def sum_in_order(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize(
    ("algorithm", "order"),
    [
        (Ring(), ring_order),
        (Ring(chunks=2), ring_order),
        (Ring(directions=2), two_way_order),
        (Halving(), halving_order),
        (Tree(), tree_order),
        (DoubleTree(), double_tree_order),
    ],
    ids=label,
)
def test_the_documented_order_of_summation(algorithm, order):
    x = np.random.default_rng(0).normal(size=(4, 4, 5)).astype("float32")
    x *= 10.0 ** np.arange(4, dtype="float32")[:, None, None]
    summed = run(lambda a: collectives.all_reduce(a, "data", algorithm=algorithm), x, {"data": 4})
    wanted = np.stack([order(x[:, d], d) for d in range(4)])
    np.testing.assert_array_equal(summed, np.broadcast_to(wanted, summed.shape))
    assert (wanted != x.sum(0, dtype="float64")).any(), "orders differ, or this proves nothing"


@pytest.mark.parametrize("algorithm", [*FLAT, *LEVELS], ids=label)
def test_the_same_bits_on_all_devices(algorithm):
    x = np.random.default_rng(1).normal(size=(6, 77)).astype("float32")
    summed = run(
        lambda a: collectives.all_reduce(a, ("a", "b"), algorithm=algorithm), x, {"a": 2, "b": 3}
    )
    assert len({row.tobytes() for row in summed}) == 1
    np.testing.assert_allclose(summed[0], x.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algorithm", [Ring, Xla, Halving])
def test_accumulate_rounds_once(algorithm, dtype):
    """256 + 1 is 256 in bfloat16; seven ones and more get lost one by one."""
    big = {"bfloat16": 256, "float16": 2048}[dtype]
    x = np.stack([np.full(8, big)] + [np.full(8, 1)] * 7).astype(jnp.dtype(dtype))

    def total(a, accumulate):
        chosen = algorithm(accumulate=accumulate)
        return collectives.all_reduce(a, "data", algorithm=chosen)

    exact = x.astype("float32").sum(0).astype(x.dtype)
    summed = run(lambda a: total(a, "float32"), x, {"data": 8})
    np.testing.assert_array_equal(summed, np.stack([exact] * 8))
    assert summed.dtype == x.dtype
    if algorithm is Ring:
        plain = run(lambda a: total(a, None), x, {"data": 8})
        assert (plain != summed).any()


def test_accumulate_leaves_other_dtypes_and_ops_alone():
    x = np.arange(8, dtype="int32").reshape(2, 4)
    summed = run(
        lambda a: collectives.all_reduce(a, "data", algorithm=Ring(accumulate="float32")),
        x,
        {"data": 2},
    )
    assert summed.dtype == np.int32
    np.testing.assert_array_equal(summed[0], x.sum(0))
