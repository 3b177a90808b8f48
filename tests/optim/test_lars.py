import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built_optimizer import built_optimizer
from pydantic import TypeAdapter

from jaxdist.optim.build import OptimConfig
from jaxdist.optim.lars import LARS_RULES, lars

PARAMS = {"kernel": jnp.full((2, 2, 3), 2.0), "bias": jnp.ones((2, 3))}
GRADS = {"kernel": jnp.arange(12.0).reshape(2, 2, 3) - 5, "bias": jnp.zeros((2, 3))}
DIMS = {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")}
NAMES = {"kernel": ["layers", None, None], "bias": ["layers", None]}


def second(transform):
    """The update of the second of two equal steps."""
    state = transform.init(PARAMS)
    for _ in range(2):
        updates, state = transform.update(GRADS, state, PARAMS)
    return updates


def built(**settings):
    config = TypeAdapter(OptimConfig).validate_python(
        {"type": "lars", "learning_rate": 0.1, "schedule": {"type": "linear"}, **settings}
    )
    return built_optimizer(config, 10, PARAMS, DIMS)


@pytest.mark.parametrize("variant", LARS_RULES)
def test_a_config_builds_what_the_function_builds(variant):
    optimizer = built(variant=variant, weight_decay=0.1)
    plain = lars(optimizer.schedule, weight_decay=0.1, variant=variant, layer_dims=NAMES)
    found, expected = second(optimizer.transform), second(plain)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


OPTIONS = {
    "norm_of_sum": True,
    "rate_in_momentum": False,
    "clip_to_rate": True,
    "nesterov": True,
    "exclude_vectors": False,
    "layer_dims": (),
    "eps": 1.0,
    "decay_zero_grads": False,
    "adapt_undecayed": False,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_a_config_changes_the_update(option):
    base = {"weight_decay": 0.0 if option == "adapt_undecayed" else 0.5}
    if option == "decay_zero_grads":
        base["exclude_vectors"] = False
    plain, changed = (
        second(built(**base, **more).transform) for more in ({}, {option: OPTIONS[option]})
    )
    far = [jnp.abs(a - b).max() for a, b in zip(plain.values(), changed.values(), strict=True)]
    assert max(far) > 1e-6
