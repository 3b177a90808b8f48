"""Sums of squares of layers: exact, in one pass, without moving shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.hlo import ledger
from jaxdist.optim.lamb import lamb
from jaxdist.optim.layers import describe_layers


@pytest.mark.parametrize("shape", [(30, 7), (48, 5), (3, 3, 32, 4), (13,), (17, 3), (), (1, 4)])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.every(3)
def test_sums_in_one_pass_are_the_sums(shape, kept):
    """Whatever the largest divisor of a dim is: the sums of squares in float64."""
    if kept > len(shape):
        return
    rng = np.random.default_rng(0)
    first, second = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    dims = [*("layers",) * kept, *(None,) * (len(shape) - kept)]
    (leaf,) = describe_layers(jnp.asarray(first), dims)
    found = leaf.squares_in_one_pass(jnp.asarray(first), jnp.asarray(second))
    for got, x in zip(found, (first, second), strict=True):
        wanted = np.sum(np.square(x, dtype=np.float64), axis=leaf.summed, keepdims=True)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_shards_of_an_automatic_axis_stay_where_they_are(devices):
    """Rows that eight devices split into twelves are not cut into sixteens: nothing is gathered."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    struct = {"w": jax.ShapeDtypeStruct((96, 32), jnp.float32, sharding=rows)}
    tx = lamb(0.1)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if x.ndim else None),
        jax.eval_shape(tx.init, struct),
    )
    compiled = jax.jit(tx.update).lower(struct, state, struct).compile()
    assert {found.kind for found in ledger(compiled, mesh).collectives} == {"all-reduce"}
