"""An imported optimizer treats each layer of a stack as it would treat a layer of a list."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from built_optimizer import built_optimizer
from chosen import quick
from optax import contrib

from jaxdist.errors import ConfigError
from jaxdist.optim.build import ImportedOptimizerConfig, taking_extra
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.optim.stacks.by_layer import by_layer

LAYERS = 3
STACKED = ("blocks/norm", "blocks/up")
DIMS = {
    "blocks/norm": ("layers", "embed"),
    "blocks/up": ("layers", "embed", "mlp"),
    "head": ("embed", "vocab"),
}


def stacks(seed):
    """Parameters or gradients whose layers differ in size."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** np.arange(LAYERS)
    found = {
        "blocks": {
            "norm": rng.normal(size=(LAYERS, 6)) * sizes[:, None],
            "up": rng.normal(size=(LAYERS, 6, 8)) * sizes[:, None, None],
        },
        "head": rng.normal(size=(6, 5)),
    }
    return jax.tree.map(jnp.float32, found)


def listed(tree):
    layers = [jax.tree.map(lambda x, i=i: x[i], tree["blocks"]) for i in range(LAYERS)]
    return {"blocks": layers, "head": tree["head"]}


def stacked(tree):
    return {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *tree["blocks"]), "head": tree["head"]}


def by_dims(params):
    return jax.tree.map(lambda p: p.ndim, params)


SGD = optax.sgd(1.0)
ALIKE = {
    "adamw": optax.adamw(1e-2),
    "a global clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "schedule_free": contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}
"""Rules for single elements, to which a stack is what a list is."""
SINGLE = {
    "muon": contrib.muon(1e-2),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), SGD),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), SGD),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "fromage": optax.fromage(1e-2),
    "novograd": optax.novograd(1e-2),
    "sm3": optax.sm3(1e-2),
    "galore": contrib.galore(1e-2, rank=4),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "a mask by dims": optax.adamw(
        1e-2, weight_decay=0.5, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    "partition by dims": optax.partition({1: SGD, 2: optax.adam(1e-2)}, by_dims),
}
"""Rules for single tensors."""
WHOLE = {
    "a global clip of muon": optax.chain(optax.clip_by_global_norm(0.1), contrib.muon(1e-2)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "prodigy": contrib.prodigy(1e-2),
    "lbfgs": optax.lbfgs(1e-2, memory_size=2, linesearch=None),
    "flatten": optax.flatten(optax.adam(1e-2)),
}
"""Rules over all parameters that are more than a factor."""
RULES = {**ALIKE, **SINGLE, **WHOLE}


def moved(transform, params, grads):
    state, begun = transform.init(params), params
    update = jax.jit(transform.update)
    for each in grads:
        given = {"grad_norm": jnp.float32(1), "value": jnp.float32(2)}
        updates, state = update(each, state, params, **given)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda new, old: new - old, params, begun)


FEW = ("muon", "lamb", "galore", "adafactor", "partition by dims", "apply_if_finite", "prodigy")
"""Rules that look at a matrix, at a layer, at dims, at all parameters."""


@pytest.mark.parametrize("name", quick(*FEW, of=RULES, slow=True))
@pytest.mark.every(3)
def test_a_stack_moves_as_a_list_of_layers_does(name):
    transform, params, grads = taking_extra(RULES[name]), stacks(0), [stacks(1), stacks(2)]
    found = moved(by_layer(transform, STACKED), params, grads)
    expected = stacked(moved(transform, listed(params), [listed(each) for each in grads]))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def equations(transform, layers=LAYERS):
    """The trace of an update of so many layers."""
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((layers, *x.shape[1:]), x.dtype), stacks(0)["blocks"]
    )
    state = jax.eval_shape(transform.init, params)
    return jax.make_jaxpr(transform.update)(params, state, params)


@pytest.mark.parametrize("name", ALIKE)
def test_a_rule_for_elements_keeps_its_program(name):
    transform = taking_extra(ALIKE[name])
    found = equations(by_layer(transform, ["norm", "up"]))
    assert str(found) == str(equations(transform))


@pytest.mark.parametrize("name", SINGLE)
def test_a_rule_for_tensors_is_mapped_over_layers(name):
    transform = by_layer(taking_extra(SINGLE[name]), ["norm", "up"])
    counts = {len(equations(transform, layers).jaxpr.eqns) for layers in (2, 7)}
    assert len(counts) == 1


def test_stacks_of_different_lengths_move_as_lists_do():
    transform = taking_extra(contrib.muon(1e-2))
    params = {"few": stacks(0)["blocks"]["up"][:2], "many": stacks(1)["blocks"]["up"]}
    grads = {"few": stacks(2)["blocks"]["up"][:2], "many": stacks(3)["blocks"]["up"]}
    found = moved(by_layer(transform, ["few", "many"]), params, [grads])
    for name, stack in found.items():
        for layer in range(len(stack)):
            own = {"one": params[name][layer]}
            (expected,) = moved(transform, own, [{"one": grads[name][layer]}]).values()
            np.testing.assert_allclose(stack[layer], expected, rtol=1e-4, atol=1e-6)


def test_the_same_noise_does_not_go_to_every_layer():
    transform = by_layer(taking_extra(optax.noisy_sgd(1.0, key=0)), STACKED)
    params = stacks(0)
    nothing = jax.tree.map(jnp.zeros_like, params)
    up = moved(transform, params, [nothing])["blocks"]["up"]
    assert np.abs(up[0] - up[1]).min() > 0


def test_a_rule_by_the_position_of_a_layer_is_refused():
    def names(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "first" if getattr(path[-1], "idx", 0) == 0 else "other", params
        )

    made = optax.partition({"first": SGD, "other": optax.adam(1e-2)}, names)
    with pytest.raises(ConfigError, match="treats the layers of a stack differently"):
        by_layer(taking_extra(made), STACKED).init(stacks(0))


def test_an_imported_optimizer_knows_the_stacks_of_the_model():
    config = ImportedOptimizerConfig(
        type="import", path="optax.contrib:muon", learning_rate=1e-2,
        schedule=ScheduleConfig(type="constant"),
    )  # fmt: skip
    params, grads = stacks(0), [stacks(1)]
    made = built_optimizer(config, 9, params, DIMS).transform
    found = moved(made, params, grads)["blocks"]["up"]
    expected = stacked(moved(contrib.muon(1e-2), listed(params), [listed(grads[0])]))
    np.testing.assert_allclose(found, expected["blocks"]["up"], rtol=1e-4, atol=1e-5)
    singular = np.linalg.svd(found, compute_uv=False)
    assert singular.min() > 0.3 * singular.max()  # every layer is orthogonalised
