import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from built_optimizer import built_optimizer
from pydantic import TypeAdapter

from jaxdist.errors import ConfigError
from jaxdist.optim.build import OptimConfig
from jaxdist.optim.lamb import LAMB_RULES, lamb

PARAMS = {"kernel": jnp.full((2, 2, 3), 2.0), "bias": jnp.ones((2, 3))}
GRADS = {"kernel": jnp.arange(12.0).reshape(2, 2, 3) - 5, "bias": jnp.ones((2, 3)) / 2}
DIMS = {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")}
NAMES = {"kernel": ["layers", None, None], "bias": ["layers", None]}


def first(transform, grads=GRADS):
    return transform.update(grads, transform.init(PARAMS), PARAMS)[0]


def built(**settings):
    config = TypeAdapter(OptimConfig).validate_python({"learning_rate": 0.1, **settings})
    return built_optimizer(config, 10, PARAMS, DIMS).transform


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("variant", LAMB_RULES)
@pytest.mark.every(3)
def test_a_config_builds_what_the_function_builds(variant):
    found = first(built(type="lamb", variant=variant, weight_decay=0.1))
    same(found, first(lamb(0.1, weight_decay=0.1, variant=variant, layer_dims=NAMES)))


OPTIONS = {
    "bias_correction": False,
    "decay_in_ratio": False,
    "nesterov": True,
    "phi": (0.0, 0.5),
    "ratio_bounds": (0.0, 0.5),
    "max_grad_norm": 1e-6,
    "exclude_vectors": False,
    "layer_dims": (),
    "adapt_undecayed": False,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_a_config_changes_the_update(option):
    base = {"type": "lamb", "eps": 1e-3, "weight_decay": 0.0 if option[0] == "a" else 0.5}
    plain, changed = (first(built(**base, **more)) for more in ({}, {option: OPTIONS[option]}))
    far = [jnp.abs(a - b).max() for a, b in zip(plain.values(), changed.values(), strict=True)]
    assert max(far) > 1e-5


def test_off_takes_a_bound_of_the_variant_away():
    bounded = built(type="lamb", variant="deepspeed", ratio_bounds="off")
    same(
        first(bounded),
        first(lamb(0.1, variant="deepspeed", layer_dims=NAMES, ratio_bounds=(0, 1e9))),
    )
    unclipped = built(type="lamb", variant="apex", max_grad_norm="off")
    same(first(unclipped), first(lamb(0.1, variant="apex", layer_dims=NAMES, max_grad_norm=1e9)))


def test_decay_outside_the_ratio():
    inside, outside = (
        first(lamb(0.1, weight_decay=0.5, decay_in_ratio=flag, layer_dims=NAMES)) for flag in (1, 0)
    )
    bare = first(lamb(0.1, weight_decay=0.0, layer_dims=NAMES))
    np.testing.assert_allclose(outside["kernel"], bare["kernel"] - 0.05 * 2.0, rtol=1e-5)
    assert float(jnp.abs(inside["kernel"] - outside["kernel"]).max()) > 1e-3


def test_a_typo_in_layer_dims():
    with pytest.raises(ConfigError, match="no parameter has a dim 'layrs': did you mean 'layers'"):
        built(type="lamb", layer_dims=("layrs",))


def test_a_model_without_matrices_and_without_layers():
    config = TypeAdapter(OptimConfig).validate_python({"type": "lamb", "learning_rate": 0.1})
    params = {"w": jnp.ones(3)}
    made = built_optimizer(config, 1, params, {"w": ("embed",)})
    updates, _ = made.transform.update(params, made.transform.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_a_step_has_the_temporaries_and_the_traffic_that_it_promises(bias_correction):
    """Many tensors of one shape, whose scalars XLA would broadcast together."""
    params = [jnp.full((256, 128), 1.0 + i) for i in range(6)]
    transform = lamb(0.1, bias_correction=bias_correction)

    def step(params, state, grads):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    compiled = jitted.lower(params, transform.init(params), params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < params[0].nbytes / 7.5
    cost = compiled.cost_analysis()["bytes accessed"]
    assert cost / (6 * params[0].size) < 53.1
