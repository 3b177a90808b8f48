"""A channel for each collective: of a function, and of the step that is trained."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded import mesh_of

from jaxdist.collectives import Ring, SeparateChannels, Tree, all_reduce
from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build

P = jax.sharding.PartitionSpec
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def sums(x):
    """Through a loop of rings; beside it, which needs nothing of the loop, through a tree."""

    def body(x, _):
        return all_reduce(x, "data", algorithm=Ring()) / 8, None

    return jax.lax.scan(body, x, length=3)[0], all_reduce(x, "data", algorithm=Tree())


def mapped(**options):
    whole = jax.shard_map(
        sums, mesh=mesh_of({"data": 8}), in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    return jax.jit(whole, **options)


def channels(program) -> Counter:
    """How many collectives of a compiled program each channel has."""
    return Counter(re.findall(r"channel_id=(\d+)", program.as_text()))


def test_jax_gives_all_collectives_one_channel(devices):
    """Where it does no longer, `SeparateChannels` can go."""
    assert len(channels(mapped().lower(X).compile())) == 1


def test_each_collective_has_a_channel(devices):
    found = channels(SeparateChannels(mapped()).lower(X).compile())
    permutes = 14 + 6  # one of the loop's rings, in its two phases, and a tree up and down
    assert set(found.values()) == {1}
    assert len(found) == permutes


def test_it_is_called_like_the_jitted_function(devices):
    separate, plain = SeparateChannels(mapped()), mapped()
    for x in (X, 2 * X, X[:, :2]):
        found, expected = separate(jnp.asarray(x)), plain(jnp.asarray(x))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert separate._cache_size() == 2
    assert jax.eval_shape(separate, X) == jax.eval_shape(plain, X)
    assert separate.trace(X).jaxpr.out_avals == plain.trace(X).jaxpr.out_avals


def test_it_gives_away_what_the_jitted_function_does(devices):
    given = jax.device_put(X, jax.NamedSharding(mesh_of({"data": 8}), P("data")))
    SeparateChannels(mapped(donate_argnums=0))(given)
    assert given.is_deleted()


def program(parallel, *, mesh=None, devices=None):
    sections = {
        "model": {"type": "gpt", "layers": 4, "embed": 32, "heads": 4, "vocab_multiple": 8},
        "data": {"type": "synthetic", "kind": "tokens", "window": 16, "vocab_size": 64},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 5, "batch_size": 32, "microbatches": 2 if "pipeline" in parallel else 1},
        "parallel": parallel,
        "mesh": mesh or {"data": 8},
    }
    return build(validate(Document(sections), ExperimentConfig), devices=devices).program


DOUBLE_TREE = {"reduce": {"type": "double_tree"}}


@pytest.mark.parametrize(
    ("parallel", "mesh"),
    [
        pytest.param(DOUBLE_TREE, None, marks=pytest.mark.slow),
        pytest.param({**DOUBLE_TREE, "zero": {"stage": 1}}, None, marks=pytest.mark.full),
        ({**DOUBLE_TREE, "zero": {"stage": 3}}, None),
        pytest.param(
            {"pipeline": {"schedule": {"type": "1f1b"}}},
            {"data": 4, "stage": 2},
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.every(2)
def test_each_collective_of_the_step_has_a_channel(parallel, mesh, devices):
    found = program(parallel, mesh=mesh)
    compiled = found.train.lower(found.state_shapes, found.batch).compile()
    assert set(channels(compiled).values()) == {1}


@pytest.mark.full
def test_what_xla_places_and_other_platforms_stay_as_they_are(devices, tpu_devices):
    assert not isinstance(program({}).train, SeparateChannels)
    assert not isinstance(program(DOUBLE_TREE, devices=tpu_devices).train, SeparateChannels)
