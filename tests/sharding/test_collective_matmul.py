"""Collective matmuls: the ring against collectives in one piece, and the step's program."""

import random
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError, ShardingError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import compile_with_text, ledger
from jaxdist.hlo.parse import parse
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.runtime.topology import topology_devices
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.sharding.collective_matmul import AxisRing, distances

ROWS, CROSS, ACROSS = (
    PartitionSpec(None, "ring"), PartitionSpec(None, "ring"), PartitionSpec("ring")
)  # fmt: skip


def on_ring(count, function, out=ROWS):
    mesh = Mesh(jax.devices()[:count], ("ring",))
    return jax.shard_map(
        function, mesh=mesh, in_specs=(ROWS, CROSS, CROSS, ACROSS), out_specs=out, check_vma=False
    )


def mlp_on_ring(x, gate, up, down):
    ring = AxisRing("ring")
    columns = ring.products(ring.gathered(x), gate, up)
    h = tuple(jnp.sin(g) * u for g, u in zip(*columns, strict=True))
    (y,) = ring.products(h, down, leaving=True)
    return ring.reduced(y)


def mlp_in_one_piece(x, gate, up, down):
    x = jax.lax.all_gather(x, "ring", axis=1, tiled=True)
    h = jnp.sin(jnp.tensordot(x, gate, 1)) * jnp.tensordot(x, up, 1)
    return jax.lax.psum_scatter(jnp.tensordot(h, down, 1), "ring", scatter_dimension=1, tiled=True)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.every(3)
def test_a_ring_equals_collectives_in_one_piece(count, devices):
    """Results and all gradients; drawn shapes, odd ones too."""
    draw = random.Random(count)
    batch, length, embed, width = draw.choices(range(1, 5), k=4)
    keys = jax.random.split(jax.random.key(count), 4)
    shapes = [(batch, length * count, embed), *2 * [(embed, width * count)], (width * count, embed)]
    given = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]

    @partial(jax.jit, static_argnums=0)
    def results(function, *given):
        run = on_ring(count, function)
        return run(*given), jax.grad(lambda *a: jnp.sum(jnp.cos(run(*a))), range(4))(*given)

    def close(found: jax.Array, expected: jax.Array) -> None:
        # Rounding goes with the largest terms of a sum: how much is left of them does not matter.
        largest = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * max(1.0, largest))

    jax.tree.map(close, results(mlp_on_ring, *given), results(mlp_in_one_piece, *given))


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.every(3)
def test_pieces_come_from_all_devices_by_the_shorter_way(count, devices):
    assert sorted(d % count for d in distances(count)) == [*range(count)]
    assert max(map(abs, distances(count))) <= count / 2

    def sources(x, *_):
        own = jax.lax.axis_index("ring")
        return jnp.stack([own - piece[0, 0] for piece in AxisRing("ring").gathered(x)])[:, None]

    places = jnp.arange(count, dtype=jnp.float32)[None]
    nothing = jnp.zeros((count, count))
    found = on_ring(count, sources)(places, nothing, nothing, nothing)
    assert (found % count == np.array(distances(count))[:, None] % count).all()


MESH = {"data": 2, "tensor": 4}
SPLIT = {"rules": {"residual_seq": "tensor"}}
RING = {**SPLIT, "collective_matmul": True}


def experiment(sharding, *, mesh=MESH, devices=None, model=None, **sections):
    gpt = {"type": "gpt", "layers": 2, "embed": 64, "heads": 4, "mlp": 256, "remat": "minimal"}
    document = {
        "model": model or {**gpt, "compute_dtype": "bfloat16"},
        "data": {"type": "synthetic", "kind": "tokens", "window": 64, "heldout_examples": 0},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"steps": 2, "batch_size": 16},
        "sharding": sharding,
        "mesh": mesh,
        **sections,
    }
    return build(validate(Document(document), ExperimentConfig), devices=devices)


@cache
def on_tpu(ring):
    found = experiment(RING if ring else SPLIT, devices=topology_devices("v5e:2x4"))
    program = found.program
    lowered = program.train.lower(program.state_shapes, program.batch)
    compiled, text = compile_with_text(lowered, program.options)
    return ledger(compiled, found.layout.mesh, text), parse(text)


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_the_collectives_of_an_mlp_run_beside_its_matmuls():
    """As many bytes, of which those of the MLPs are no longer waited for."""
    (whole, _), (ring, _) = (on_tpu(ring) for ring in (False, True))
    sent = [found.sent_bytes("tensor") for found in (whole, ring)]
    assert sent[1] == pytest.approx(sent[0], rel=0.02)

    def of_mlps(found):
        mine = [c for c in found.collectives if c.axes == ("tensor",) and "mlp" in c.source]
        return {c.kind for c in mine if c.payload_bytes >= 1024}, sum(
            c.times_high for c in mine if c.kind == "collective-permute"
        )

    assert of_mlps(whole)[0] == {"all-gather", "reduce-scatter"}
    # Two layers, three hops: to the MLP and back, forward, backward, and anew for the gradient.
    assert of_mlps(ring) == ({"collective-permute"}, 2 * 3 * 5)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (
            {"collective_matmul": True},
            r"  sharding\.collective_matmul = True .*residual_seq is mapped to none"
            r".*set sharding\.rules: {res",
        ),
        (
            {**RING, "rules": {"residual_seq": "tensor", "mlp": None}},
            r"residual_seq is mapped to tensor, and mlp to none",
        ),
    ],
)
def test_a_ring_without_an_axis_is_refused(sharding, message):
    with pytest.raises(ConfigError, match=message):
        experiment(sharding)


def test_an_axis_over_two_networks_is_refused():
    mesh = build_mesh(MeshConfig.model_validate({"data": 2, "tensor": {"dcn": 2, "ici": 2}}))
    with pytest.raises(
        ShardingError, match=r"tensor spans two networks: set mesh\.tensor to a single"
    ):
        make_layout(ShardingConfig.model_validate(RING), mesh)


def test_a_model_that_would_not_use_it_is_refused():
    sections = {
        "data": {"type": "images", "source": "digits"},
        "model": {"type": "mlp", "hidden": [8]},
    }
    with pytest.raises(ConfigError, match=r"has no effect with model\.type mlp, only with gpt"):
        experiment(RING, **sections)


def test_a_mesh_without_the_axis_needs_no_ring(devices):
    """So that one config serves every mesh."""
    assert experiment(RING, mesh={"data": 8}).layout.ring is None
