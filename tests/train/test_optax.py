"""Every optimizer of optax on a mesh, whatever it keeps for a parameter, equals one device."""

import inspect
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from built_optimizer import built_optimizer
from flax import nnx
from jax.sharding import PartitionSpec as P
from optax import contrib
from programs import by_rows, exchange_of, place

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.functional import functional
from jaxdist.models.layers import scan_blocks, stack
from jaxdist.models.loss import Mean
from jaxdist.optim.build import (
    ImportedOptimizerConfig,
    Optimizer,
    taking_extra,
)
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.parallel.zero import ZeroConfig, plan_zero
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.train.assemble import assemble
from jaxdist.trees import flatten_with_names

ROWS, STEPS = 20, 2
MESH = {"data": 4, "tensor": 2}


class Block(nnx.Module):
    """A parameter split by tensor and ZeRO, one that is square, and a vector; filled up."""

    def __init__(self, rngs):
        self.up = nnx.Param(rngs.normal((13, 24)) / 4, dims=("embed", "mlp"))
        self.square = nnx.Param(rngs.normal((13, 13)) / 4, dims=("embed", "features"))
        self.bias = nnx.Param(jnp.ones((13,)), dims=("embed",))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up) @ self.up.T + x @ self.square + self.bias[None]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Param(rngs.normal((8, 13)) / 4, dims=("features", "embed"))
        self.blocks = stack(Block, 2, rngs)

    def __call__(self, x):
        return scan_blocks(self.blocks, x @ self.first)


def squares(module, batch):
    error = jnp.square(module(batch["x"]) - batch["y"]).sum(-1)
    return {"loss": Mean((error * batch["weight"]).sum(), batch["weight"].sum())}


def rows(step):
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(ROWS, 8)), rng.normal(size=(ROWS, 13))
    weight = np.arange(ROWS) % 3
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "weight": weight.astype("f")}


def program_of(optimizer, mesh, stage=0, reduce=None):
    """A program for a transformation, or for the config of one."""
    devices = jax.devices()[: int(np.prod([*mesh.values()]))]
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig.model_validate(mesh), devices))
    model = functional(Model)
    zero = plan_zero(ZeroConfig(stage=stage, whole_below=20), layout, model.params, model.dims)
    if isinstance(optimizer, ImportedOptimizerConfig):
        made = built_optimizer(optimizer, 9, model.params, model.dims)
    else:
        made = Optimizer(optimizer, lambda _: jnp.float32(1))
    batch = {
        name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=by_rows(layout, v))
        for name, v in rows(0).items()
    }
    explicit = {"scanned": model.scanned} if reduce else {}
    exchange = exchange_of(model, layout, zero, reduce, **explicit)
    return assemble(model, squares, made, layout, model.dims, batch, exchange=exchange)


def trained(program, steps=STEPS):
    state = program.init()
    for step in range(steps):
        state, _ = program.train(state, place(program, rows(step)))
    return state


NEEDS_MORE = ("dpsgd", "sophia")
"""Optimizers that the gradients and the loss of a step are not enough for."""
GIVEN = {
    "adafactor": {"min_dim_size_to_factor": 4},
    "galore": {"rank": 4},
    "lbfgs": {"linesearch": None, "memory_size": 2},
    "noisy_sgd": {"key": 0},
}


def dims_of(params):
    return jax.tree.map(lambda p: p.ndim, params)


ADAM = optax.adam(1e-2)
WRAPPED = {
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "flatten": optax.flatten(ADAM),
    "masked": optax.masked(ADAM, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "mechanize": contrib.mechanize(ADAM),
    "MultiSteps": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "partition": optax.partition({2: ADAM, 3: optax.sgd(1e-2)}, dims_of),
    "reduce_on_plateau": optax.chain(ADAM, contrib.reduce_on_plateau(patience=1)),
    "sam": contrib.sam(ADAM, optax.sgd(1e-2)),
    "schedule_free": contrib.schedule_free(ADAM, 1e-2),
}


def made_of(module):
    """By name: each optimizer of a module that a learning rate is enough for."""
    found = {}
    for name, make in inspect.getmembers(module, inspect.isfunction):
        given = inspect.signature(make).parameters
        rate = next((n for n in given if n in ("learning_rate", "max_learning_rate")), None)
        if rate is None or name in (*WRAPPED, *NEEDS_MORE) or name.startswith(("_", "scale_by_")):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found[name] = make(**{rate: 1e-2}, **GIVEN.get(name, {}))
    return found


CONTRIBUTED = made_of(contrib)
OPTIMIZERS = {
    name: taking_extra(made) for name, made in {**WRAPPED, **made_of(optax), **CONTRIBUTED}.items()
}


TABLE = [
    (name, stage)
    for name in OPTIMIZERS
    for stage in ((0, 3) if name in CONTRIBUTED else (0, 1, 2, 3))
]
"""The first and the last stage are enough for what optax calls contributed."""


def side_by_side(made):
    """All of them at once on parameters of their own, by the gradients of plain SGD's."""

    def init(params):
        return {name: (each.init(params), params) for name, each in made.items()}

    def update(grads, state, params=None, **extra):
        moved = {}
        for name, (inner, own) in state.items():
            updates, inner = made[name].update(grads, inner, own, **extra)
            moved[name] = (inner, optax.apply_updates(own, updates))
        return jax.tree.map(lambda g: -0.1 * g, grads), moved

    return optax.GradientTransformationExtraArgs(init, update)


def numbers(leaf):
    words = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(words)


@cache
def table(stage, contributed):
    """Of a stage, or None for one device: by name the optimizer's own state and its parameters."""
    mesh = {"data": 1} if stage is None else MESH
    names = [n for n in OPTIMIZERS if (n in CONTRIBUTED) == contributed]
    made = {n: OPTIMIZERS[n] for n in names if (n, stage) in TABLE or stage is None}
    program = program_of(side_by_side(made), mesh, stage or 0)
    state = program.home.used(trained(program))
    return jax.tree.map(numbers, state.opt_state.inner)


# Stage 3 splits and moves all that the others do; 1 splits the state alone, and 2 its gradients.
MARKS = {0: pytest.mark.slow, 1: pytest.mark.slow, 2: pytest.mark.slow, 3: ()}


def marks(name, stage):
    """What optax calls contributed is one more program of the same machinery."""
    return pytest.mark.slow if name in CONTRIBUTED else MARKS[stage]


@pytest.mark.parametrize(
    ("name", "stage"), [pytest.param(*row, marks=marks(*row)) for row in TABLE]
)
def test_each_optimizer_of_optax_equals_one_device(name, stage, devices):
    contributed = name in CONTRIBUTED
    found, expected = (table(at, contributed)[name] for at in (stage, None))
    for (path, ours), theirs in zip(
        flatten_with_names(found), jax.tree.leaves(expected), strict=True
    ):
        # What divides by a gradient's own size keeps the relative error of a small one.
        scale = np.abs(theirs.astype(np.float64)).max(initial=0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * scale, err_msg=path)


ADAFACTOR = ImportedOptimizerConfig(
    type="import", path="optax:adafactor", args={"min_dim_size_to_factor": 4},
    learning_rate=1e-2, schedule=ScheduleConfig(type="constant"),
)  # fmt: skip
PLANS = {
    "one device": ({"data": 1}, 0, None),
    "tensor, zero 2": (MESH, 2, None),
    "5, zero 3": ({"data": 5}, 3, Ring(type="ring")),
    "2, zero 1": ({"data": 2}, 1, None),
}


def test_a_factored_statistic_lies_where_its_dims_of_the_parameter_do(devices):
    shapes = program_of(ADAFACTOR, MESH, 1).state_shapes.opt_state
    found = optax.tree.get(shapes, "v_row"), optax.tree.get(shapes, "v_col")
    placed = [{n: (s.shape, s.sharding.spec) for n, s in flatten_with_names(x)} for x in found]
    assert placed[0]["blocks/up"] == ((2, 16), P(None, "data"))
    assert placed[1]["blocks/up"] == ((2, 24), P(None, "tensor"))
    # Of a square either dim may be the one that is left.
    assert placed[0]["blocks/square"] == placed[1]["blocks/square"] == ((2, 13), P(None, None))
    assert {placed[0]["first"], placed[1]["first"]} == {((8,), P("data")), ((13,), P(None))}
    # A placeholder for each layer, which belongs to no other dim of the parameter.
    assert optax.tree.get(shapes, "v")["blocks"]["up"].sharding.spec == P(None, None)


MUON = ImportedOptimizerConfig(
    type="import", path="optax.contrib:muon", learning_rate=1e-2,
    schedule=ScheduleConfig(type="constant"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        pytest.param(ADAFACTOR, "tensor, zero 2", marks=pytest.mark.full),
        (ADAFACTOR, "5, zero 3"),
        pytest.param(MUON, "tensor, zero 2", marks=pytest.mark.slow),
        pytest.param(MUON, "5, zero 3", marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else value.path,
)
@pytest.mark.every(2)
@pytest.mark.full
def test_a_rule_for_tensors_sees_whole_layers(optimizer, plan, devices):
    """A layer lies in shards on several devices, some of them filled up with zeros."""
    mesh, stage, reduce = PLANS[plan]
    found, expected = (
        program_of(optimizer, *given) for given in ((mesh, stage, reduce), ({"data": 1},))
    )
    ours, theirs = (p.home.used(trained(p)) for p in (found, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)


HISTORY = ImportedOptimizerConfig(
    type="import", path="optax:lbfgs", args={"linesearch": None, "memory_size": 2},
    learning_rate=1e-2,
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(ADAFACTOR, id="factored"),
        pytest.param(HISTORY, id="history", marks=pytest.mark.full),
    ],
)
def test_what_one_plan_saved_another_loads(optimizer, tmp_path, devices):
    programs = {plan: program_of(optimizer, *given) for plan, given in PLANS.items()}
    rng = np.random.default_rng(0)
    own = programs["one device"].own_shapes
    state = jax.tree.map(lambda s: rng.uniform(1, 2, s.shape).astype(s.dtype), own)
    for step, (writer, reader) in enumerate(zip(programs, [*programs][1:], strict=False)):
        program = programs[writer]
        shardings = jax.tree.map(lambda s: s.sharding, program.state_shapes)
        stored = jax.jit(program.home.stored, out_shardings=shardings)(state)
        with CheckpointStore(tmp_path, keep=9, keep_best=False, on_event=print) as store:
            store.save(step, stored, metadata={}, shapes=program.own_shapes)
            store.wait()
            to = programs[reader]
            found = store.restore(to.state_shapes, shapes=to.own_shapes, step=step).state
        assert jax.tree.all(
            jax.tree.map(lambda x, s: x.sharding == s.sharding, found, to.state_shapes)
        )
        jax.tree.map(np.testing.assert_array_equal, to.home.used(found), state)


def test_what_a_step_does_not_give_is_named(devices):
    program = program_of(taking_extra(optax.lbfgs(1e-2)), {"data": 1})
    with pytest.raises(
        ConfigError,
        match="'value_fn'; a step computes the loss once, and passes to the update only",
    ):
        jax.eval_shape(program.train, program.state_shapes, program.batch)
