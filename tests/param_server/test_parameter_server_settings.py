"""`strategy.type: parameter_server` at load: what is refused where, and what is told."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chosen import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import DIGITS

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.optim.build import ImportedOptimizerConfig
from jaxdist.optim.common import OptimizerConfig
from jaxdist.param_server.training.separable import check_separable
from jaxdist.run.strategies import run_strategy
from jaxdist.simulation.rule import ServerRule
from jaxdist.train.strategy.config import ParameterServer
from jaxdist.trees import flatten_with_names

SGD = {"type": "sgd", "learning_rate": 0.1, "momentum": 0.0}


def built(strategy=None, **sections):
    strategy = {"type": "parameter_server", "workers": 4, **(strategy or {})}
    values = {**DIGITS, "optim": SGD, "mesh": {"data": 1}, "strategy": strategy, **sections}
    config = validate(Document(values), ExperimentConfig)
    return build(
        config, Document(values), devices=jax.devices()[: math.prod(values["mesh"].values())]
    )


def train(**more):
    return {"train": {"steps": 10, "batch_size": 64, **more}}


def optim(**settings):
    return {"optim": {"learning_rate": 0.1, **settings}}


PHASES = [{"batch_size": 64, "examples_fraction": 1.0, "learning_rate": 0.1}]
REFUSED = {
    "bound": ({"consistency": {"type": "ssp", "bound": -1}}, {}, r"bound = -1 .* at least 0"),
    "servers": ({"servers": 9}, {}, r"strategy.servers = 9 .* make only 4 ranges .* at most 4"),
    "central": (
        {"servers": 2, "placement": {"type": "central"}},
        {},
        r"strategy.servers = 2 .* set one server, or type balanced",
    ),
    "batch": (
        {"workers": 3},
        {},
        r"strategy.workers = 3 .* set train.batch_size: 63, .*batch_shares: by_speed",
    ),
    "shares": (
        {"batch_shares": [32, 16, 8]},
        {},
        r"strategy.batch_shares = .* 3 numbers that add up to 56: give a number .* of the 4 .* 64",
    ),
    "devices": (
        {"workers": 32},
        {"mesh": {"data": 4}},
        r"strategy.workers = 32 .* share of 2 examples: .* does not divide over 4 devices",
    ),
    "backups": (
        {"consistency": {"type": "bsp", "backups": 4}},
        {},
        r"strategy.consistency.backups = 4 .* at most 3",
    ),
    "elastic": (
        {"consistency": {"type": "elastic", "alpha": 1.99}},
        {},
        r"strategy.consistency.alpha = 1.99 .* diverges",
    ),
    "quorum": (
        {"consistency": {"type": "decoupled", "quorum": 5}},
        {},
        r"strategy.consistency.quorum = 5 .* at most 4",
    ),
    "racks": (
        {"aggregation": {"type": "racks", "size": 4}},
        {},
        r"strategy.aggregation.size = 4 .* at most 3, or set type: direct",
    ),
    "speeds": (
        {"simulation": {"step_seconds": [0.1, 0.2]}},
        {},
        r"strategy.simulation.step_seconds = .* 2 times for 4 workers",
    ),
    "straggler": (
        {"simulation": {"stragglers": [{"worker": 4, "factor": 2.0}]}},
        {},
        r"strategy.simulation.stragglers = .* no worker 4: workers are 0 to 3",
    ),
    "feedback": (
        {"codec": {"type": "randomk", "fraction": 0.1, "scaled": True}},
        {},
        r"strategy.codec = .*error_feedback: false",
    ),
    "elastic codec": (
        {"codec": {"type": "sign"}, "consistency": {"type": "elastic"}},
        {},
        r"strategy.codec = .* set strategy.codec: null",
    ),
    "clip": (
        {},
        optim(type="sgd", clip_norm=1.0),
        r"optim.clip_norm = 1.0 .* set optim.clip_norm: null",
    ),
    "spikes": (
        {},
        optim(type="sgd", skip_spikes={"factor": 3.0}),
        r"optim.skip_spikes = .* the norm over all parameters",
    ),
    "master": (
        {},
        optim(type="sgd", master_weights="bfloat16"),
        r"optim.master_weights = 'bfloat16' .* servers hold the parameters in float32",
    ),
    "lamb": (
        {},
        optim(type="lamb", variant="apex"),
        r"optim.max_grad_norm .* 1 \(of optim.variant apex\) .* lamb clips the gradient's norm"
        r".*max_grad_norm: off",
    ),
    "onebit": (
        {},
        optim(type="onebit_adam", freeze_step=5),
        r"optim.type = 'onebit_adam' .*|compressed_momentum",
    ),
    "imported": (
        {},
        optim(type="import", path="optax:adaptive_grad_clip"),
        r"optim.path = 'optax:adaptive_grad_clip'",
    ),
    "zero": ({}, {"parallel": {"zero": {"stage": 1}}}, r"parallel.zero = .* strategy.servers"),
    "deterministic": (
        {},
        {"parallel": {"deterministic": {"type": "strict", "shards": 8}}},
        r"parallel.deterministic = .* gradients by worker, .* `jaxdist replay` repeats a run",
    ),
    "stage": (
        {},
        {"mesh": {"data": 1, "stage": 2}},
        r"mesh = .*mesh axis stage of 2 devices with .* the mesh of a worker has only",
    ),
    "compression": (
        {},
        {"parallel": {"compression": {"type": "sign"}}},
        r"parallel.compression = .* set parallel.compression: null, and compress the pushes",
    ),
    "nonfinite": (
        {},
        optim(type="sgd", skip_nonfinite=True),
        r"optim.skip_nonfinite = True .* servers drop and count every push with a .*finite: false",
    ),
    "replicas": (
        {},
        train(check_replicas={"every": 5}),
        r"train.check_replicas = .* compares replicas that take every step .* leave the setting",
    ),
    "ramp": (
        {},
        train(batch_ramp={"start_batch_size": 16, "increment": 16, "ramp_examples": 96}),
        r"train.batch_ramp = .* leave the setting out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_at_its_setting(case):
    strategy, sections, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        built(strategy, **sections)


def test_all_that_is_refused_is_told_at_once():
    """Each at its own setting."""
    with pytest.raises(ConfigError) as refused:
        built(**optim(type="sgd", clip_norm=1.0, skip_nonfinite=True), **train(phases=PHASES))
    text = str(refused.value)
    assert text.startswith("3 problems")
    for setting in ("train.phases", "optim.clip_norm", "optim.skip_nonfinite"):
        assert f"\n  {setting} = " in text


@pytest.mark.full
def test_what_is_allowed():
    lamb = optim(type="lamb", variant="apex", max_grad_norm="off")
    for sections in (lamb, optim(type="lars"), optim(type="import", path="optax:adafactor")):
        assert built(**sections).program.outer is None
    assert built({"workers": 3, "batch_shares": "by_speed"}).config.strategy.shares(64) == (
        22,
        21,
        21,
    )


def test_what_is_told():
    assert built().notices == ()
    (told,) = built(optim={**SGD, "momentum": 0.9}).notices
    assert "consistency type ssp with optim.momentum 0.9" in told
    (told,) = built({"consistency": {"type": "elastic", "every": 7}}).notices
    assert "28 steps instead of 24" in told
    (told,) = built({"error_feedback": False}).notices
    assert "no effect without strategy.codec" in told


def test_the_law_of_clocks_and_updates():
    def cluster(**strategy):
        return built(strategy).config.strategy

    assert cluster().updates_per_step == 4
    assert cluster(aggregation={"type": "racks", "size": 2}).updates_per_step == 2
    assert cluster(consistency={"type": "bsp"}).updates_per_step == 1
    assert cluster(consistency={"type": "elastic", "every": 5}).clocks(24) == 5
    assert cluster(simulation={"step_seconds": [1.0, 1.0, 2.0, 2.0]}).step_seconds(64) == (
        1,
        1,
        2,
        2,
    )
    by_speed = {"simulation": {"step_seconds": [1.0, 1.0, 2.0, 2.0]}, "batch_shares": "by_speed"}
    times = cluster(**by_speed).step_seconds(64)
    assert max(times) / min(times) < 1.15


def random_transform(rng, count):
    """An update of each parameter that looks at some others, now or one step later."""
    looks = rng.random((count, count)) < rng.choice([0.0, 0.05, 0.2])
    late = bool(rng.random() < 0.5)

    def mixed(grads):
        leaves = list(grads.values())
        return {
            name: leaf + sum((leaves[j].sum() for j in range(count) if looks[i, j]), jnp.float32(0))
            for i, (name, leaf) in enumerate(grads.items())
        }

    def update(grads, state, params=None, **extra):
        found = mixed(grads)
        return (state, found) if late else (found, state)

    alone = not any(looks[i, j] for i, j in itertools.product(range(count), repeat=2) if i != j)
    start = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    return optax.GradientTransformationExtraArgs(start, update), alone


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 9))
def test_whatever_looks_at_another_parameter_is_found(seed, count):
    rng = np.random.default_rng(seed)
    transform, alone = random_transform(rng, count)
    params = {f"p{at}": jnp.ones(int(rng.integers(1, 4))) for at in range(count)}
    if alone:
        check_separable(transform, params)
        return
    with pytest.raises(ConfigError, match="depends on other parameters"):
        check_separable(transform, params)


TRANSFORMS = {
    "adam": (optax.adam(1e-3), True),
    "adafactor": (optax.adafactor(1e-3), True),
    "clipped by block": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), True),
    "global norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
    "finite": (optax.apply_if_finite(optax.sgd(0.1), 3), False),
    "the loss": (optax.polyak_sgd(), False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_rules_of_optax(name):
    transform, alone = TRANSFORMS[name]
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}
    wrapped = optax.with_extra_args_support(transform)
    if alone:
        check_separable(wrapped, params)
        return
    with pytest.raises(ConfigError, match="one tensor at a time"):
        check_separable(wrapped, params)


OPTIMIZERS = {
    "sgd": {"type": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adamw": {"type": "adamw", "weight_decay": 0.1, "bf16_moments": False},
    "lamb": {"type": "lamb"},
    "lars": {"type": "lars"},
    "adafactor": {"type": "import", "path": "optax:adafactor"},
}


# A rule that looks at a whole layer.
@pytest.mark.parametrize("name", quick("lamb", of=OPTIMIZERS))
@pytest.mark.full
def test_a_server_updates_ranges_as_the_optimizer_updates_the_whole(name):
    """Rows apart where it may, three steps, the learning rate by the step of all workers."""
    experiment = built(optim={"learning_rate": 0.1, **OPTIMIZERS[name]})
    program, rng = experiment.program, np.random.default_rng(5)
    config: OptimizerConfig = experiment.config.optim
    schedule, per_step = (lambda count: 0.1 / (1 + count)), 2
    rule = ServerRule(
        config, schedule, program.model.params, program.dims,
        learning_rate=0.1, updates_per_step=per_step,
    )  # fmt: skip
    assert rule.divisible == (name in ("sgd", "adamw"))
    named = flatten_with_names(program.init().params)
    whole = {key: np.array(leaf) for key, leaf in named}
    parts, states = {}, {}
    for key, array in whole.items():
        cut = array.shape[0] // 2 if rule.divisible else array.shape[0]
        parts[key] = [part for part in (array[:cut], array[cut:]) if len(part)]
        states[key] = [rule.init(key, part) for part in parts[key]]
    reference = ServerRule(config, schedule, program.model.params, program.dims, learning_rate=0.1)
    tree = jax.tree.structure(program.model.params)
    transform = experiment_transform(config, lambda c: schedule(c // per_step), program)
    params = jax.tree.unflatten(tree, list(whole.values()))
    state = transform.init(params)
    assert reference.learning_rate == 0.1
    for _ in range(3):
        grads = {key: rng.normal(size=array.shape).astype("f4") for key, array in whole.items()}
        nested = jax.tree.unflatten(tree, list(grads.values()))
        updates, state = transform.update(nested, state, params)
        params = optax.apply_updates(params, updates)
        for key, pieces in parts.items():
            at = 0
            for number, piece in enumerate(pieces):
                gradient = grads[key][at : at + len(piece)]
                at += len(piece)
                found = rule.update(key, piece, gradient, 1.0, states[key][number])
                pieces[number], states[key][number] = found
    for (key, expected), found in zip(flatten_with_names(params), parts.values(), strict=True):
        np.testing.assert_allclose(
            np.concatenate(found), expected, rtol=2e-5, atol=1e-6, err_msg=key
        )


def test_a_server_updates_each_layer_of_a_stack_by_itself():
    config = ImportedOptimizerConfig(type="import", path="optax:fromage", learning_rate=0.1)
    rng = np.random.default_rng(0)
    params = {"stack": rng.normal(size=(3, 4, 5)).astype("f4")}
    dims = {"stack": ("layers", "embed", "mlp")}
    rule = ServerRule(config, lambda count: 0.1, params, dims, learning_rate=0.1)
    grads = rng.normal(size=(3, 4, 5)).astype("f4") * np.float32([[[1]], [[10]], [[100]]])
    found, _ = rule.update(
        "stack", params["stack"], grads, 1.0, rule.init("stack", params["stack"])
    )
    single = optax.fromage(0.1)
    for at, layer in enumerate(params["stack"]):
        update, _ = single.update(grads[at], single.init(layer), layer)
        np.testing.assert_allclose(found[at], layer + update, rtol=1e-5, atol=1e-6)


def experiment_transform(config, schedule, program):
    from jaxdist.optim.build import Rate, build_optimizer

    given = {"params": program.model.params, "dims": program.dims, "rate": Rate(schedule)}
    return build_optimizer(config, **given).transform


def test_a_factor_of_the_rate_scales_the_update():
    program = built().program
    rule = ServerRule(
        validate(Document({**DIGITS, "optim": SGD}), ExperimentConfig).optim,
        lambda count: 0.5,
        program.model.params,
        program.dims,
        learning_rate=0.5,
    )
    (name, leaf), *_ = flatten_with_names(program.init().params)
    array = np.asarray(leaf)
    state = rule.init(name, array)
    full, _ = rule.update(name, array, np.ones_like(array), 1.0, state)
    half, _ = rule.update(name, array, np.ones_like(array), 0.5, state)
    np.testing.assert_allclose(array - full, 2 * (array - half), rtol=1e-5)
    np.testing.assert_allclose(array - full, 0.5, rtol=1e-6)


def test_one_process_starts_all_others(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ConfigError, match="starts its own processes, but this process is one of 4"):
        run_strategy(ParameterServer(workers=2), None)  # pyright: ignore[reportArgumentType]
