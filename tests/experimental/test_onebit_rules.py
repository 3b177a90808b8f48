"""1-bit optimizers without their wire: settings, the warm-up, and what is frozen after it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from built_optimizer import built_optimizer
from jax.sharding import PartitionSpec
from pydantic import TypeAdapter, ValidationError
from sharded import mesh_of

from jaxdist.errors import ConfigError
from jaxdist.experiment.config import AnyOptimConfig
from jaxdist.experimental.onebit import adam_bound, scale_by_frozen_adam
from jaxdist.experimental.onebit_lamb import OnebitLambRule, OnebitLambState, onebit_lamb

DIMS = {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")}
NAMES = {"kernel": ["layers", None, None], "bias": ["layers", None]}
SHAPES = {"kernel": (3, 4, 8), "bias": (3, 8)}
FREEZE = 3


def drawn(seed):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.standard_normal(shape), "f") for name, shape in SHAPES.items()}


PARAMS, GRADS = drawn(0), [drawn(seed) for seed in range(1, 7)]
# Variances that move apart between the layers.
GRADS = [jax.tree.map(lambda g, t=t: g * (1 + t) ** 0.5, g) for t, g in enumerate(GRADS)]


def parsed(settings):
    return TypeAdapter(AnyOptimConfig).validate_python({"learning_rate": 0.1, **settings})


def built(**settings):
    return built_optimizer(parsed(settings), 10, PARAMS, DIMS).transform


def walked(transform, grads=GRADS, params=PARAMS):
    """The parameters after each gradient, and the last state."""
    state, found = transform.init(params), []
    update = jax.jit(transform.update)
    for g in grads:
        moves, state = update(g, state, params)
        params = optax.apply_updates(params, moves)
        found.append(params)
    return found, state


def apart(left, right):
    far = [jnp.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (left, right)), strict=True)]
    return float(max(far))


BOUNDS = {"ratio_bounds": (0.01, 0.9), "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("plain", "onebit"),
    [
        ({"type": "adamw", "weight_decay": 0.1}, {"type": "onebit_adam", "weight_decay": 0.1}),
        ({"type": "lamb", "bias_correction": False, **BOUNDS}, {"type": "onebit_lamb", **BOUNDS}),
    ],
    ids=["adam", "lamb"],
)
def test_the_warm_up_is_the_plain_optimizer(plain, onebit):
    expected, _ = walked(built(**plain))
    found, _ = walked(built(**onebit, freeze_step=FREEZE))
    for ours, theirs in zip(found[:FREEZE], expected[:FREEZE], strict=True):
        assert apart(ours, theirs) < 2e-5
    assert apart(found[FREEZE], expected[FREEZE]) > 1e-3


ADAM = {"type": "onebit_adam", "freeze_step": FREEZE, "weight_decay": 0.1}
LAMB = {**ADAM, "type": "onebit_lamb"}


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        (ADAM, {"freeze_step": 4}),
        (ADAM, {"b1": 0.8}),
        (ADAM, {"b2": 0.9}),
        (ADAM, {"eps": 0.1}),
        (ADAM, {"weight_decay": 0.0}),
        (ADAM, {"bias_correction": False}),
        (LAMB, {"freeze_step": 4}),
        (LAMB, {"b1": 0.8}),
        (LAMB, {"b2": 0.9}),
        (LAMB, {"eps": 0.1}),
        (LAMB, {"weight_decay": 0.0}),
        (LAMB, {"coefficient_decay": 0.5}),
        (LAMB, {"ratio_bounds": (0.01, 0.02)}),
        (LAMB, {"factor_bounds": (0.99, 1.01)}),
        (LAMB, {"factor_change": 0.01}),
        (LAMB, {"layer_dims": ()}),
        ({**ADAM, "b1": 0.5, "b2": 0.5}, {"bounded": False}),  # of a bound of one rate
        ({**LAMB, "b1": 0.5, "b2": 0.5}, {"bounded": False}),
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_every_setting_changes_the_parameters(base, changed):
    assert apart(walked(built(**base))[0][-1], walked(built(**{**base, **changed}))[0][-1]) > 1e-4


@pytest.mark.parametrize("kind", ["onebit_adam", "onebit_lamb"])
def test_elements_without_a_gradient_in_the_warm_up_stay(kind):
    """Messages of one bit have no zero, and what they send of it would be divided by eps."""
    first = [jax.tree.map(lambda g: g.at[..., 2].set(0.0), g) for g in GRADS[:FREEZE]]
    found, _ = walked(
        built(type=kind, freeze_step=FREEZE, weight_decay=0.0), first + GRADS[FREEZE:]
    )
    for name, before in PARAMS.items():
        np.testing.assert_array_equal(found[-1][name][..., 2], before[..., 2])
        assert np.abs(found[-1][name] - before).max() > 0.1


def test_no_element_moves_further_than_adam_could():
    """Of gradients that were small in the warm-up, as those of a feature that is rarely there."""
    first = [jax.tree.map(lambda g: g.at[..., 2].multiply(1e-6), g) for g in GRADS[:FREEZE]]
    direction = partial(scale_by_frozen_adam, freeze_step=FREEZE)

    def moved(transform):
        """Of each step the largest element."""
        steps, _ = walked(transform, first + GRADS[FREEZE:])
        pairs = zip(steps, [PARAMS, *steps[:-1]], strict=True)
        return np.asarray([apart(after, before) for after, before in pairs])

    bound, free = moved(direction()), moved(direction(bounded=False))
    np.testing.assert_array_equal(bound[:FREEZE], free[:FREEZE])
    assert (free[FREEZE:] > 1e4).all()
    np.testing.assert_allclose(bound[FREEZE:], adam_bound(0.9, 0.999), rtol=1e-5)
    # What bounds them is what Adam does with one large gradient after another, and no less.
    grown = [{"w": jnp.float32((0.999 / 0.9) ** t)} for t in range(100)]
    moves, _ = walked(direction(freeze_step=200), grown, {"w": jnp.float32(0)})
    far = apart(moves[-1], moves[-2])
    assert 0.25 * adam_bound(0.9, 0.999) < far <= adam_bound(0.9, 0.999)


def test_the_second_moment_is_frozen_and_a_fresh_one_goes_on():
    _, warm = walked(built(**LAMB), GRADS[:FREEZE])
    _, after = walked(built(**LAMB))
    assert apart(warm.nu, after.nu) == 0
    assert apart(warm.nu, warm.fresh) == 0
    assert apart(after.nu, after.fresh) > 1e-4
    assert apart(warm.coefficient, after.coefficient) == 0
    assert jax.tree.map(jnp.shape, after.factor) == {"kernel": (3,), "bias": (3,)}
    # The variance grows: factors fall by a tenth a step, or as far as it has grown.
    assert np.all(np.asarray(after.factor["kernel"]) >= 0.9**3 - 1e-6)


@pytest.mark.full
def test_a_layer_split_over_devices_is_one_layer(devices):
    """Inside `jax.shard_map`, with the specs of what each device holds."""
    options = {"rule": OnebitLambRule(FREEZE, factor_bounds=(0.9, 4.0)), "layer_dims": NAMES}
    whole = onebit_lamb(0.1, weight_decay=0.1, **options)
    expected, _ = walked(whole)
    specs = {"kernel": PartitionSpec(None, "data"), "bias": PartitionSpec(None, "data")}
    ours = onebit_lamb(0.1, weight_decay=0.1, **options, specs=specs)
    none = dict.fromkeys(specs, PartitionSpec())
    state_specs = OnebitLambState(PartitionSpec(), specs, specs, specs, none, none)
    mapped = partial(jax.shard_map, mesh=mesh_of({"data": 4}), check_vma=True)
    split = optax.GradientTransformation(
        mapped(ours.init, in_specs=(specs,), out_specs=state_specs),
        mapped(ours.update, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs)),
    )
    for left, right in zip(walked(split)[0], expected, strict=True):
        assert apart(left, right) < 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze_step": 0}, "freeze_step"),
        ({"b1": 0.0}, "b1"),
        ({"b1": 1.0}, "b1"),
        ({"clip_norm": 1.0}, "clip_norm uses the norm of .*compressed_momentum, clip_norm"),
        ({"skip_spikes": {}}, "skip_spikes uses the norm of"),
        ({"factor_change": 1.0, "type": "onebit_lamb"}, "factor_change"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        parsed({**ADAM, **settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scale_by_frozen_adam(freeze_step=0), "freeze_step = 0: must be at least 1, b"),
        (lambda: scale_by_frozen_adam(1.0, freeze_step=1), r"b1 = 1.0: .* less than 1"),
        (lambda: scale_by_frozen_adam(eps=-1.0, freeze_step=1), "eps = -1.0"),
        (lambda: OnebitLambRule(0), "freeze_step = 0: must be at least 1, b"),
        (lambda: OnebitLambRule(1, coefficient_decay=1.0), "coefficient_decay = 1.0"),
        (lambda: OnebitLambRule(1, factor_change=0.0), "factor_change = 0.0: must be between 0"),
        (lambda: OnebitLambRule(1, factor_bounds=(4.0, 0.5)), r"factor_bounds = \(4.0, 0.5\)"),
        (lambda: built(**LAMB, ratio_bounds=(2, 1)), r"ratio_bounds = \(2.0, 1.0\): need 0 <= l"),
        (lambda: onebit_lamb(0.1, b2=-1.0, rule=OnebitLambRule(1)), "b2 = -1.0"),
        (lambda: onebit_lamb(-0.1, rule=OnebitLambRule(1)), "learning_rate = -0.1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_it_needs_the_parameters():
    transform = onebit_lamb(0.1, rule=OnebitLambRule(1))
    with pytest.raises(ConfigError, match="the trust ratio needs the parameters"):
        transform.update(GRADS[0], transform.init(PARAMS))
