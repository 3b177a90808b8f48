"""Tensors of which no dim divides: sharded all the same, and not one number changes."""

import itertools
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from built_optimizer import built_optimizer
from flax import nnx
from programs import put_state

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.errors import CheckpointError
from jaxdist.hlo import ledger
from jaxdist.mesh import MeshConfig, axis_names, build_mesh
from jaxdist.models.functional import functional
from jaxdist.models.layers import scan_blocks, stack
from jaxdist.models.loss import Mean
from jaxdist.optim.build import AdamWConfig, Optimizer
from jaxdist.optim.lamb import LambConfig
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.parallel.exchange.xla import XlaExchange as LeftToXla
from jaxdist.parallel.plan import explicit_exchange
from jaxdist.parallel.zero import ZeroConfig, plan_zero
from jaxdist.run.memory import bytes_per_device
from jaxdist.runtime.topology import topology_devices
from jaxdist.sharding import ShardingConfig, make_layout, param_shardings
from jaxdist.train.assemble import assemble
from jaxdist.train.evaluate import evaluate
from jaxdist.train.generate import Generator
from jaxdist.train.sampling import Sampling
from jaxdist.trees import flatten_with_names, tree_bytes

ROWS, EMBED, MLP = 60, 13, 22
LAMB = LambConfig(
    type="lamb", learning_rate=1e-2, clip_norm=0.5, exclude_vectors=False, eps=1e-4,
    schedule=ScheduleConfig(type="constant"),
)  # fmt: skip


def param(rngs, *dims):
    sizes = {"features": 7, "embed": EMBED, "mlp": MLP, "classes": 2}
    shape = tuple(sizes[dim] for dim in dims)
    return nnx.Param(rngs.normal(shape) / np.float32(2), dims=dims)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = param(rngs, "embed", "mlp")
        self.down = param(rngs, "mlp", "embed")
        self.bias = param(rngs, "embed")

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up) @ self.down + self.bias[None]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = param(rngs, "features", "embed")
        self.blocks = stack(Block, 2, rngs)
        self.last = param(rngs, "embed", "classes")

    def __call__(self, x):
        return scan_blocks(self.blocks, x @ self.first) @ self.last


def squares(module, batch):
    error = jnp.square(module(batch["x"]) - batch["y"]).sum(-1)
    return {"loss": Mean((error * batch["weight"]).sum(), batch["weight"].sum())}


def rows(step):
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(ROWS, 7)), rng.normal(size=(ROWS, 2))
    return {
        "x": x.astype(np.float32),
        "y": y.astype(np.float32),
        "weight": np.arange(ROWS, dtype=np.float32) % 3,
    }


def program_of(mesh, stage=0, reduce=None, *, optim=LAMB, microbatches=2, devices=None, **zero):
    config = MeshConfig.model_validate(mesh)
    count = math.prod(math.prod(v.values()) if isinstance(v, dict) else v for v in mesh.values())
    layout = make_layout(ShardingConfig(), build_mesh(config, (devices or jax.devices())[:count]))
    model = functional(Model)
    zero = {"stage": stage, "whole_below": 20, **zero}
    split = plan_zero(ZeroConfig.model_validate(zero), layout, model.params, model.dims)
    whole = param_shardings(layout, model.params, model.dims)
    exchange = LeftToXla(whole, split)
    if reduce:
        axes, scanned = axis_names(layout.mesh, "data"), model.scanned
        given = {"axes": axes, "algorithm": reduce, "scanned": scanned}
        exchange = explicit_exchange(whole, split, **given)
    optimizer = (
        Optimizer(optim, lambda _: jnp.float32(1))
        if isinstance(optim, optax.GradientTransformationExtraArgs)
        else built_optimizer(optim, 9, model.params, model.dims)
    )
    batch = {
        name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=by_rows(layout, v))
        for name, v in rows(0).items()
    }
    return assemble(
        model,
        squares,
        optimizer,
        layout,
        model.dims,
        batch,
        microbatches=microbatches,
        exchange=exchange,
    )


def by_rows(layout, values):
    return layout.sharding(("batch", *(None,) * (values.ndim - 1)))


def batches(program):
    for step in itertools.count():
        yield {k: jax.device_put(v, by_rows(program.layout, v)) for k, v in rows(step).items()}


def trained(program, steps=3, begun=None):
    """The state as it is stored, and the metrics of each step; `begun` None draws its first."""
    state = program.init() if begun is None else put_state(program, begun)
    metrics = []
    for batch in itertools.islice(batches(program), steps):
        state, values = program.train(state, batch)
        metrics.append(np.asarray(values))
    assert program.train._cache_size() == 1
    return state, np.stack(metrics)


@cache
def alone():
    """The state that one device draws, the last one, and the metrics of each step."""
    one = program_of({"data": 1})
    begun = jax.device_get(one.init())
    state, metrics = trained(one, begun=begun)
    return begun, jax.tree.map(np.asarray, state), metrics


def assert_close(program, state, expected, *, rtol=2e-5):
    used = jax.tree.map(np.asarray, program.home.used(state))
    for (name, ours), theirs in zip(
        flatten_with_names(used), jax.tree.leaves(expected), strict=True
    ):
        assert ours.shape == theirs.shape, name
        scale = np.abs(theirs.astype(np.float64)).max()
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * scale, err_msg=name)


def pads(program, state):
    """All that the stored state holds beyond the tensors' own shapes."""
    found = []
    for stored, own in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.own_shapes), strict=True
    ):
        inside = np.zeros(stored.shape, bool)
        inside[tuple(slice(length) for length in own.shape)] = True
        found.append(np.asarray(stored)[~inside].astype(np.float32))
    return np.concatenate(found)


FIVE, THREE = {"data": 5}, {"data": 3, "tensor": 2}
NETWORKS = {"data": {"dcn": 2, "ici": 3}}
XLA, RING = Xla(), Ring(type="ring")
full = partial(pytest.param, marks=pytest.mark.full)
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mesh", "stage", "reduce", "zero"),
    [
        slow(FIVE, 1, None, {}),
        slow(FIVE, 2, XLA, {}),
        full(FIVE, 3, RING, {}),
        slow(THREE, 1, XLA, {}),
        slow(THREE, 2, RING, {}),
        (THREE, 3, None, {}),
        slow(NETWORKS, 1, RING, {"scope": "ici"}),
        slow(NETWORKS, 2, None, {}),
        (NETWORKS, 3, XLA, {}),
    ],
)
@pytest.mark.every(2)
def test_the_numbers_are_those_of_one_device(mesh, stage, reduce, zero, devices):
    """Global norm, norms of layers, decay and moments of LAMB, over three steps of microbatches."""
    program = program_of(mesh, stage, reduce, **zero)
    assert (
        program.exchange.zero.padded.keys()
        == program.model.dims.keys() - program.exchange.zero.uneven.keys()
    )
    begun, expected, expected_metrics = alone()
    state, metrics = trained(program, begun=begun)
    np.testing.assert_allclose(metrics, expected_metrics, rtol=1e-5)
    assert_close(program, state, expected)
    assert len(pads(program, state))
    assert not pads(program, state).any()


def pushing():
    """Moves every element that it sees, and is given nothing but the tensors' own shapes."""

    def init(params):
        return {"seen": jax.tree.map(jnp.ones_like, params)}

    def update(updates, state, params=None, **extra):
        own = jax.tree.map(lambda p: p.shape, functional(Model).params)
        for tree in (updates, state["seen"], params):
            assert jax.tree.map(lambda x: x.shape, tree) == own
        moved = jax.tree.map(lambda g, seen: 1e-3 * (g - seen), updates, state["seen"])
        return moved, jax.tree.map(lambda x: x + 1, state)

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize(("stage", "reduce"), [(1, XLA), slow(3, None)])
@pytest.mark.full
def test_an_optimizer_never_meets_the_zeros(stage, reduce, devices):
    program = program_of(FIVE, stage, reduce, optim=pushing(), microbatches=1)
    state, _ = trained(program)
    assert not pads(program, state).any()
    np.testing.assert_array_equal(program.home.used(state).opt_state.inner["seen"]["first"], 4.0)


@pytest.mark.slow
def test_noise_and_rounding_are_those_of_one_device(devices):
    """Moments are rounded at random: other noise would change about half of them."""
    optim = AdamWConfig(
        type="adamw", learning_rate=1e-2, weight_decay=0.1, bf16_moments=True,
        master_weights="bfloat16", skip_nonfinite=True,
    )  # fmt: skip
    program = program_of(FIVE, 2, None, optim=optim, microbatches=1)
    state, _ = trained(program, steps=1)
    assert not pads(program, state).any()
    reference, _ = trained(program_of({"data": 1}, optim=optim, microbatches=1), steps=1)
    pairs = [
        (np.asarray(ours), np.asarray(theirs))
        for ours, theirs in zip(
            jax.tree.leaves(program.home.used(state).opt_state),
            jax.tree.leaves(reference.opt_state),
            strict=True,
        )
        if ours.dtype == jnp.bfloat16
    ]
    same = np.concatenate([(ours == theirs).ravel() for ours, theirs in pairs])
    assert same.mean() > 0.95


@pytest.mark.parametrize("reduce", [slow(None), XLA], ids=["auto", "manual"])
@pytest.mark.full
def test_an_evaluation_is_that_of_one_device(reduce, devices):
    program = program_of(FIVE, 3, reduce)
    found, expected = (
        evaluate(p, p.init().params, {}, itertools.islice(batches(p), 2))
        for p in (program, program_of({"data": 1}))
    )
    assert found == pytest.approx(expected, rel=1e-6)


class Bigrams(nnx.Module):
    def __init__(self, rngs):
        self.table = param(rngs, "embed", "embed")

    def __call__(self, tokens, segments):
        return jax.nn.one_hot(tokens, EMBED) @ self.table


@pytest.mark.full
def test_what_is_generated_is_that_of_one_device(monkeypatch, devices):
    monkeypatch.setattr(f"{__name__}.Model", Bigrams)
    sampling = Sampling(temperature=1.0)
    settings = {"prompts": [[1]], "count": 8, "sampling": sampling}
    found, expected = (
        Generator(p, 4, EMBED)(p.init().params, {}, **settings)
        for p in (program_of(FIVE, 3), program_of({"data": 1}))
    )
    assert found == expected


STATE_BYTES = {1: 4 + 8 / 5, 2: 4 + 8 / 5, 3: 12 / 5}
"""Of float32 parameters and AdamW's moments on five devices, a parameter."""


@pytest.mark.parametrize("stage", [full(1), full(2), 3])
@pytest.mark.parametrize("reduce", [None, XLA], ids=["auto", "manual"])
@pytest.mark.every(2)
def test_the_state_is_split(stage, reduce, devices):
    """13 to 15 elements, 22 to 25: a device holds that much more, and of nothing all."""
    optim = AdamWConfig(type="adamw", learning_rate=1e-2)
    program = program_of(FIVE, stage, reduce, optim=optim, microbatches=1)
    found = ledger(
        program.train.lower(program.state_shapes, program.batch).compile(), program.layout.mesh
    )
    parameters = tree_bytes(program.model.params) / 4
    held = found.memory.argument_bytes - bytes_per_device(program.batch)
    assert STATE_BYTES[stage] < held / parameters < STATE_BYTES[stage] * 25 / 22 + 0.1


@pytest.mark.needs_libtpu
@pytest.mark.parametrize(
    ("stage", "reduce"),
    [
        slow(1, None), slow(2, None), full(3, None),
        slow(1, XLA), slow(2, XLA), full(3, XLA),
        slow(1, RING), slow(2, RING), slow(3, RING),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
def test_a_tpu_program_has_shards_and_sends_little_more_than_that_of_cpu(stage, reduce):
    """XLA:TPU makes reduce-scatters as small as these all-reduces, which send twice as much."""
    sent = {}
    for devices in (topology_devices("v5e:2x2"), jax.devices()):
        program = program_of({"data": 4}, stage, reduce, microbatches=1, devices=devices)
        assert program.exchange.zero.padded
        step = program.train.lower(program.state_shapes, program.batch).compile()
        sent[devices[0].platform] = ledger(step, program.layout.mesh).sent_bytes("data")
    assert sent["tpu"] <= 3 / 2 * sent["cpu"]


PLANS = {
    "one device": ({"data": 1}, 0, None),
    "5, zero 3": (FIVE, 3, XLA),
    "3 x tensor 2, zero 3": (THREE, 3, None),
    "2 x 3, zero 2": (NETWORKS, 2, XLA),
}


def some_state(program):
    """Numbers that are nowhere zero, of the tensors' own shapes."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.uniform(1, 2, s.shape).astype(s.dtype), program.own_shapes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, devices):
    """A directory with a checkpoint by plan, all of them of the same state."""
    found = {}
    for plan in PLANS:
        program, path = program_of(*PLANS[plan]), tmp_path_factory.mktemp("plan") / "checkpoints"
        shardings = jax.tree.map(lambda s: s.sharding, program.state_shapes)
        state = jax.jit(program.home.stored, out_shardings=shardings)(some_state(program))
        with store(path) as checkpoints:
            checkpoints.save(1, state, metadata={}, shapes=program.own_shapes)
        found[plan] = path
    return found


def store(path):
    return CheckpointStore(path, keep=1, keep_best=False, on_event=print)


HUB = "5, zero 3"


def pair(writer, reader):
    across = ("3 x tensor 2, zero 3", "2 x 3, zero 2")
    always = HUB in (writer, reader) or (writer, reader) == across
    return pytest.param(writer, reader, marks=() if always else pytest.mark.full)


@pytest.mark.parametrize(
    ("writer", "reader"), [pair(*both) for both in itertools.product(PLANS, PLANS)]
)
@pytest.mark.every(3)
def test_what_one_plan_saved_another_loads(writer, reader, saved):
    program = program_of(*PLANS[reader])
    with store(saved[writer]) as checkpoints:
        state = checkpoints.restore(program.state_shapes, shapes=program.own_shapes).state
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
        lambda struct: struct.sharding, program.state_shapes
    )
    jax.tree.map(np.testing.assert_array_equal, program.home.used(state), some_state(program))
    assert not pads(program, state).any()


def test_a_model_that_is_filled_up_to_the_same_sizes_is_another(saved, monkeypatch):
    monkeypatch.setattr(f"{__name__}.EMBED", EMBED + 1)
    program = program_of(*PLANS["5, zero 3"])
    with (
        store(saved["5, zero 3"]) as checkpoints,
        pytest.raises(CheckpointError, match=r"saved float32\[2,13,22\], expected .*\[2,14,22\]"),
    ):
        checkpoints.restore(program.state_shapes, shapes=program.own_shapes)
