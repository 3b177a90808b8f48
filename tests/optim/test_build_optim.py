"""From an optimizer's config to its learning rate, its wrappers, and what it says of itself."""

import jax
import jax.numpy as jnp
import optax
import pytest
from built_optimizer import built_optimizer
from chosen import quick
from pydantic import ValidationError

from jaxdist.errors import ConfigError
from jaxdist.experimental.onebit import OnebitAdamConfig
from jaxdist.optim.batch_scaling import ScaleFromConfig
from jaxdist.optim.build import (
    AdamWConfig,
    ImportedOptimizerConfig,
    SgdConfig,
    build_optimizer,
    plan_rate,
)
from jaxdist.optim.lars import LarsConfig
from jaxdist.optim.loss_scale import DynamicLossScaleConfig
from jaxdist.optim.safety import SkipSpikesConfig, SkipState, clip_to_norm, skip_states
from jaxdist.optim.schedules import ScheduleConfig

SCALING = DynamicLossScaleConfig(type="dynamic")
PARAMS = {"w": jnp.ones((2, 2))}
DIMS = {"w": ("embed", "mlp")}
SCALE = ScaleFromConfig(batch_size=16, learning_rate=0.1, rule="linear", warmup_fraction=0.1)


def made(total_steps=20, batch_size=64, examples_per_epoch=None, **settings):
    config = SgdConfig(type="sgd", **{"momentum": 0.0, **settings})
    rate = plan_rate(
        config,
        total_steps=total_steps,
        batch_size=batch_size,
        examples_per_epoch=examples_per_epoch,
    )
    return build_optimizer(config, rate=rate, params=PARAMS, dims=DIMS)


def test_a_scaled_rate_and_its_warmup_are_in_the_schedule_and_explained():
    found = made(scale_from=SCALE, schedule=ScheduleConfig(type="constant"))
    assert [round(float(found.schedule(step)), 3) for step in range(4)] == [0.2, 0.4, 0.4, 0.4]
    assert found.explained == (
        "learning rate 0.4 = 0.1 x 64 / 16, rule linear",
        "warm-up 2 of 20 steps (10%) = 10% of the run at batch 16, rule linear",
    )


def test_a_rate_that_is_given_explains_nothing():
    assert made(learning_rate=0.3).explained == ()
    assert float(made(learning_rate=0.3).schedule(0)) == pytest.approx(0.3)


def test_the_warmup_in_epochs_takes_their_size():
    scaled = SCALE.model_copy(update={"warmup_fraction": None, "warmup_epochs": 2.0})
    assert made(scale_from=scaled, examples_per_epoch=160).explained[1].startswith("warm-up 5 of")
    with pytest.raises(ConfigError, match=r"warmup_epochs 2.0 needs a data set of known size"):
        made(scale_from=scaled)


def test_a_rate_must_be_given_once():
    config = SgdConfig(type="sgd")
    with pytest.raises(ConfigError, match="exactly one of learning_rate and scale_from"):
        plan_rate(config, total_steps=3)
    with pytest.raises(ValidationError, match=r"learning_rate \(0.5\) and scale_from"):
        made(learning_rate=0.5, scale_from=SCALE)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"skip_nonfinite": True}, 20),
        ({"skip_spikes": SkipSpikesConfig()}, 20),
        ({"loss_scale": DynamicLossScaleConfig(type="dynamic"), "max_skipped": 7}, 7),
    ],
)
def test_what_may_be_skipped_is_counted(settings, expected):
    found = made(learning_rate=0.1, **settings)
    assert found.max_skipped == expected
    state = found.transform.init(PARAMS)
    assert len(skip_states(state)) == (expected is not None)
    assert isinstance(state, SkipState) == (expected is not None)


def test_clipping_keeps_the_state_and_takes_a_norm_that_is_known():
    inner = optax.adam(1.0)
    clipped = clip_to_norm(inner, 0.5)
    assert jax.tree.structure(clipped.init(PARAMS)) == jax.tree.structure(inner.init(PARAMS))
    plain = clip_to_norm(optax.sgd(1.0), 0.5)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    state = plain.init(PARAMS)
    assert float(plain.update(grads, state)[0]["w"][0, 0]) == pytest.approx(-0.25)
    known = plain.update(grads, state, grad_norm=jnp.float32(5))[0]
    assert float(known["w"][0, 0]) == pytest.approx(-0.1)
    free = clip_to_norm(optax.sgd(1.0), None).update(grads, state, grad_norm=jnp.float32(5))[0]
    assert float(free["w"][0, 0]) == -1.0


LINEAR = ScheduleConfig(type="linear", warmup_steps=2)
COUNTED = {
    "sgd": SgdConfig(
        type="sgd", momentum=0.0, learning_rate=1.0, schedule=LINEAR, loss_scale=SCALING
    ),
    "adamw": AdamWConfig(type="adamw", learning_rate=1.0, schedule=LINEAR, skip_nonfinite=True),
    "spikes": AdamWConfig(
        type="adamw", learning_rate=1.0, schedule=LINEAR, skip_spikes=SkipSpikesConfig()
    ),
    "narrow": AdamWConfig(
        type="adamw", learning_rate=1.0, schedule=LINEAR, loss_scale=SCALING, bf16_moments=True
    ),
    "lars": LarsConfig(
        type="lars", learning_rate=1.0, schedule=LINEAR, skip_nonfinite=True, momentum=0.0,
        trust_coefficient=1.0, weight_decay=0.0, exclude_vectors=True,
    ),
    "onebit_adam": OnebitAdamConfig(
        type="onebit_adam", learning_rate=1.0, schedule=LINEAR, skip_nonfinite=True, freeze_step=9
    ),
    "imported": ImportedOptimizerConfig(
        type="import", path="optax:adam", learning_rate=1.0, schedule=LINEAR, skip_nonfinite=True
    ),
}  # fmt: skip


# What is not finite, with moments and without, and spikes.
@pytest.mark.parametrize("name", quick("lars", "adamw", "spikes", of=COUNTED, slow=True))
@pytest.mark.every(3)
def test_a_schedule_counts_steps_and_a_bias_correction_counts_updates(name):
    """The direction for equal gradients is 1 only where moments are corrected by updates."""
    params = {"b": jnp.zeros(4), "stack": jnp.zeros((2, 3))}
    dims = {"b": ("embed",), "stack": ("layers", "embed")}
    found = built_optimizer(COUNTED[name], 10, params, dims)
    state, given = found.transform.init(params), {"value": jnp.float32(1)}
    skipped = (0, 1, 4)
    for step in range(7):
        bad = jnp.float32(jnp.nan if step in skipped else 1.0)
        grads = jax.tree.map(lambda p, bad=bad: jnp.full_like(p, bad), params)
        moves, state = found.update(grads, state, params, grad_norm=jnp.float32(1), **given)
        expected = 0.0 if step in skipped else -float(found.schedule(step))
        for leaf in jax.tree.leaves(moves):
            assert leaf == pytest.approx(expected, rel=1e-2 if name == "narrow" else 1e-4)
    (counters,) = skip_states(state)
    counts = [
        int(leaf)
        for leaf in jax.tree.leaves(counters.inner)
        if leaf.dtype == jnp.int32 and leaf.shape == ()
    ]
    assert int(counters.skipped) == len(skipped)
    assert set(counts) == {7 - len(skipped)}


@pytest.mark.parametrize(
    ("path", "args"),
    [
        ("optax:adam", {"b2": 1.0}),
        ("optax:lamb", {"b1": 1.0}),
        ("optax:adam", {"eps": float("nan")}),
    ],
)
def test_an_imported_optimizer_whose_first_update_is_not_finite_is_refused(path, args):
    config = ImportedOptimizerConfig(type="import", path=path, args=args, learning_rate=0.1)
    with pytest.raises(ConfigError, match=rf"optim.path {path}: the first update .* is not finite"):
        built_optimizer(config, 4, PARAMS, DIMS)
    kept = config.model_copy(update={"args": {}})
    built_optimizer(kept, 4, PARAMS, DIMS)
