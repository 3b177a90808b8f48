"""Muon: beside optax's, beside plain numpy, and the exchange of whole matrices between devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from built_optimizer import built_optimizer
from chosen import quick
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib
from pydantic import TypeAdapter

from jaxdist.errors import ConfigError
from jaxdist.hlo import ledger
from jaxdist.optim.build import OptimConfig
from jaxdist.optim.common import NamedParams
from jaxdist.optim.matrices import matrices_in, plan_matrices
from jaxdist.optim.muon import COEFFICIENTS, newton_schulz, newton_schulz_flops
from jaxdist.trees import flatten_with_names

DIMS = {
    "embedding": ("vocab", "embed"),
    "query": ("layers", "embed", "heads", "head_dim"),
    "out": ("layers", "heads", "head_dim", "embed"),
    "up": ("layers", "embed", "mlp"),
    "norm": ("layers", "embed"),
}
SHAPES = {
    "embedding": (12, 8),
    "query": (3, 8, 2, 4),
    "out": (3, 2, 4, 8),
    "up": (3, 8, 20),
    "norm": (3, 8),
}
NUMBERS = {
    "embedding": None,
    "query": contrib.MuonDimensionNumbers(1, (2, 3)),
    "out": contrib.MuonDimensionNumbers((1, 2), 3),
    "up": contrib.MuonDimensionNumbers(1, 2),
    "norm": None,
}
HEADS = {**NUMBERS, "query": contrib.MuonDimensionNumbers(1, 3)}


def tree(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in SHAPES.items()}


def config(**settings):
    given = {"type": "muon", "learning_rate": 0.1, "schedule": {"type": "constant"}, **settings}
    return TypeAdapter(OptimConfig).validate_python(given)


def moved(transform, steps=3):
    params = tree(0)
    state = transform.init(params)
    for step in range(steps):
        updates, state = transform.update(tree(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


PAIRS = {
    "as it is": ({}, {}),
    "spectral, without looking ahead": (
        {"scale": "spectral", "nesterov": False, "ns_steps": 3, "momentum": 0.8},
        {"consistent_rms": None, "nesterov": False, "ns_steps": 3, "beta": 0.8},
    ),
    "heads apart": (
        {"split_heads": True, "eps": 0.1},
        {"muon_weight_dimension_numbers": HEADS, "eps": 0.1},
    ),
    "decay": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize(
    "pair", quick("spectral, without looking ahead", "heads apart", of=PAIRS, slow=True)
)
@pytest.mark.every(2)
def test_three_steps_of_matrices_equal_those_of_optax(pair):
    ours, theirs = PAIRS[pair]
    given = {"muon_weight_dimension_numbers": NUMBERS, "consistent_rms": 0.2, **theirs}
    optimizer = built_optimizer(config(**ours), 3, tree(0), DIMS)
    found, expected = moved(optimizer.transform), moved(contrib.muon(0.1, **given))
    for name in ("query", "out", "up"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_others_are_updated_by_adamw():
    given = {"weight_decay": 0.1, "adamw": {"rate": 0.5, "b1": 0.8, "b2": 0.9, "eps": 0.1}}
    optimizer = built_optimizer(config(**given), 3, tree(0), DIMS)
    mask = {name: name == "embedding" for name in SHAPES}
    adamw = optax.adamw(0.05, 0.8, 0.9, 0.1, weight_decay=0.1, mask=mask)
    found, expected = moved(optimizer.transform), moved(adamw)
    for name in ("embedding", "norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_newton_schulz_equals_the_formula_in_float64(shape):
    a, b, c = COEFFICIENTS
    matrix = np.random.default_rng(1).normal(size=shape)
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    found = newton_schulz(jnp.asarray(matrix, jnp.float32)[None])[0]
    np.testing.assert_allclose(found, x, atol=2e-5)
    values = np.linalg.svd(found, compute_uv=False)
    assert 0.65 < values.min() < values.max() < 1.25


def test_a_matrix_of_zeros_stays():
    assert not newton_schulz(jnp.zeros((1, 3, 4))).any()


def test_only_adamw_keeps_a_second_moment():
    optimizer = built_optimizer(config(), 3, tree(0), DIMS)
    shapes = jax.eval_shape(optimizer.transform.init, tree(0))
    sizes = {n: math.prod(s.shape) for n, s in flatten_with_names(shapes) if s.shape}
    matrices = sum(math.prod(SHAPES[name]) for name in ("query", "out", "up"))
    others = sum(math.prod(SHAPES[name]) for name in ("embedding", "norm"))
    assert sum(sizes.values()) == matrices + 2 * others


def test_which_parameters_are_matrices_is_told():
    first, second = config(adamw={"params": ("o*",)}).explain(NamedParams(tree(0), DIMS))
    assert first == "muon updates matrices: query (3 of 8 x 8), up (3 of 8 x 20)"
    assert second == "adamw updates the others: embedding, norm, out"


def test_a_convolution_has_its_window_among_its_rows():
    found = matrices_in((3, 3, 4, 8), ("window", "window", "channels_in", "channels_out"))
    assert (found.count, found.size) == (1, (36, 8))


def test_a_pattern_without_effect_is_refused():
    with pytest.raises(ConfigError, match=r"'heads' matches no matrix that Muon would update"):
        config(adamw={"params": ("heads",)}).explain(NamedParams(tree(0), DIMS))


def test_a_model_without_matrices_is_refused():
    only = {"norm": tree(0)["norm"]}
    with pytest.raises(ConfigError, match=r"muon has no matrix to update.*use \{type: adamw\}"):
        config().explain(NamedParams(only, DIMS))


AXES = {"data": 2, "tensor": 2, "stage": 2}
SPLIT = {
    "query": ((6, 8, 4, 6), DIMS["query"], P("stage", None, "tensor", "data")),
    "out": ((4, 4, 6, 8), DIMS["out"], P("stage", "tensor", "data", None)),
    "gate": ((4, 8, 12), DIMS["up"], P("stage", None, ("data", "tensor"))),
    "up": ((4, 8, 12), DIMS["up"], P("stage", None, ("data", "tensor"))),
    "odd": ((7, 5), ("embed", "mlp"), P(("tensor", "stage"), "data")),
    "even": ((3, 7, 5), DIMS["up"], P(None, ("tensor", "stage"), "data")),
    "wide": ((5, 9), ("embed", "mlp"), P(None, ("stage", "data"))),
    "layers": ((4, 6, 6), DIMS["up"], P(("data", "tensor"), None, None)),
    "window": ((3, 3, 4, 5), (None, None, "a", "b"), P(None, None, "tensor", "data")),
}
"""Tensors with a split of their dims, which do not always divide."""


def exchange_of(names, axes=AXES):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    given = [SPLIT[name] for name in names]
    matrices = [matrices_in(shape, dims) for shape, dims, _ in given]
    return plan_matrices(matrices, [spec for *_, spec in given], mesh, newton_schulz_flops)


def test_every_matrix_is_whole_where_it_is_orthogonalized(devices):
    exchange = exchange_of(SPLIT)
    alone = plan_matrices(
        [held.of for held in exchange.held], [P()] * len(SPLIT), None, newton_schulz_flops
    )
    rng = np.random.default_rng(2)
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape, *_ in SPLIT.values()]
    found, expected = (
        jax.jit(lambda xs, e=e: e.apply(newton_schulz, xs))(given) for e in (exchange, alone)
    )
    for name, ours, theirs in zip(SPLIT, found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("names", [("layers",), ("query",), ("gate", "up"), ("query", "gate")])
def test_the_compiled_program_sends_the_bytes_of_the_formula(names, devices):
    exchange = exchange_of(names)
    given = [
        jax.ShapeDtypeStruct(
            SPLIT[name][0], jnp.float32, sharding=NamedSharding(exchange.mesh, SPLIT[name][2])
        )
        for name in names
    ]
    shardings = [x.sharding for x in given]
    run = jax.jit(lambda xs: exchange.apply(newton_schulz, xs), out_shardings=shardings)
    found = ledger(run.lower(given).compile(), exchange.mesh).collectives
    assert sum(one.sent_bytes for one in found) == exchange.sent_bytes
    assert (exchange.sent_bytes == 0) == (names == ("layers",))
    assert all(one.kind == "all-to-all" for one in found)


def test_matrices_that_are_left_over_go_to_the_device_with_least_work(devices):
    """No device has a second matrix besides one of the largest."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sizes = [(64, 64)] * 5 + [(32, 32)] * 3 + [(16, 16)] * 3
    matrices = [matrices_in(size, ("embed", "mlp")) for size in sizes]
    plan = plan_matrices(matrices, [P("data")] * 11, mesh, newton_schulz_flops)
    loads = np.zeros(8)
    for group in plan.groups:
        assert sorted(at for at in group.last if at is not None) == list(range(group.count))
        cost = newton_schulz_flops(group.held[0].of.size)
        loads += [cost * (at is not None) for at in group.last]
    total = sum(map(newton_schulz_flops, sizes))
    # Each matrix is computed once, and the longest device has no more than one of the largest.
    assert loads.sum() == total
    assert loads.max() == newton_schulz_flops((64, 64))
