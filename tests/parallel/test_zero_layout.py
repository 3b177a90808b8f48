"""The dim that ZeRO splits, in programs for TPUs: whether gathered weights are copied."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.hlo import compile_with_text
from jaxdist.parallel.compiler import PRESETS
from jaxdist.parallel.zero import split_dim
from jaxdist.runtime.topology import parse_topology, topology_devices

UP, DOWN = ("embed", "mlp"), ("mlp", "embed")
WHOLE_GATHERS = "xla_jf_spmd_threshold_for_windowed_einsum_mib"


def chosen(embed, mlp, parts):
    return split_dim((embed, mlp), UP, P(), parts), split_dim((mlp, embed), DOWN, P(), parts)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [(64, (0, 0)), (256, (0, 0)), (1024, (0, 1)), (4096, (1, 0))],
)
def test_shards_of_70b_are_whole_tiles_where_a_dim_allows_it(parts, expected):
    """1,024 parts leave 8 features of 8192, which are whole sublanes, and 28 of 28672."""
    assert chosen(8192, 28672, parts) == expected


def gathered_and_copied(topology, embed, mlp, up_dim, down_dim):
    """Compile two layers of an MLP whose weights are gathered, with its gradients.

    Returns:
      The names of the all-gathers and of the copies whose results have a weight's shape.
    """
    devices = topology_devices(topology)
    mesh = Mesh(mesh_utils.create_device_mesh((len(devices),), devices), ("data",))

    def shape(sizes, dim, dtype):
        spec = P(*("data" if i == dim else None for i in range(len(sizes))))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    whole = NamedSharding(mesh, P())
    up = shape((2, embed, mlp), 1 + up_dim, jnp.float32)
    down = shape((2, mlp, embed), 1 + down_dim, jnp.float32)
    x = shape((256 * len(devices), embed), 0, jnp.bfloat16)

    @jax.checkpoint
    def layer(x, weights):
        up, down = (
            jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), whole) for w in weights
        )
        return x + jnp.tanh(jnp.tanh(x @ up) @ down), None

    def loss(weights, x):
        return jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum()

    def step(weights, x):
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    lowered = jax.jit(step, out_shardings=(up.sharding, down.sharding)).lower((up, down), x)
    options = {WHOLE_GATHERS: PRESETS["default"][WHOLE_GATHERS]}
    _, text = compile_with_text(lowered, options)
    weight = rf"bf16\[(?:1,)?(?:{embed},{mlp}|{mlp},{embed})\]\S* "
    found = re.findall(rf"%?(\S+) = {weight}(all-gather|copy)\(", text)
    return [name for name, kind in found if kind == "all-gather"], [
        name for name, kind in found if kind == "copy"
    ]


@pytest.mark.needs_libtpu
@pytest.mark.parametrize(
    ("topology", "embed", "mlp"),
    [
        pytest.param("v5p:4x4x4", 512, 1792, marks=pytest.mark.full),
        pytest.param("v5p:4x8x8", 2048, 7168, marks=pytest.mark.slow),
        pytest.param("v5p:8x8x16", 8192, 28672, marks=pytest.mark.slow),
        pytest.param("v5p:16x16x16", 32768, 114688, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_gathered_weights_are_not_copied_into_another_layout(topology, embed, mlp):
    """Each chip has 8 of the embedding's features and 28 of the MLP's, as 70B on 1,024 chips."""
    parts = math.prod(parse_topology(topology).shape)
    gathers, copies = gathered_and_copied(topology, embed, mlp, *chosen(embed, mlp, parts))
    assert gathers
    assert not copies
