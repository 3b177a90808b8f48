from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.parallel.plan import ParallelConfig, plan_exchange
from jaxdist.sharding import ShardingConfig, make_layout

DIMS = {"mlp/kernel": ("embed", "mlp"), "scale": ("embed",)}
RING = {"type": "ring"}


def plan(mesh, reduce=RING, dims=DIMS, **rules):
    layout = make_layout(ShardingConfig(rules=rules), build_mesh(MeshConfig.model_validate(mesh)))
    params = {name: jax.ShapeDtypeStruct((8,) * len(found), jnp.float32)
              for name, found in dims.items()}  # fmt: skip
    config = ParallelConfig.model_validate({"reduce": reduce})
    return plan_exchange(config, layout, params, dims, whole=None)[0]


def test_nothing_is_explicit_unless_asked_for():
    assert ParallelConfig().reduce is None
    assert not plan({"data": 8}, None).explicit


def test_the_axes_are_those_that_split_the_batch():
    found = plan({"data": 4, "tensor": 2}, {"type": "ring", "directions": 2})
    assert (found.axes, found.algorithm) == (("data",), Ring(directions=2))
    split = plan({"tensor": 2, "data": {"dcn": 2, "ici": 2}})
    assert split.axes == ("data_dcn", "data_ici")


def test_a_mesh_without_an_axis_for_the_batch_is_refused():
    with pytest.raises(ConfigError, match=r"type ring with mesh \{tensor: 8\}: .*; set mesh\.data"):
        plan({"tensor": 8})
    with pytest.raises(
        ConfigError, match=r"mesh \{data: 8\}: .* but no axis splits the batch; .*rules\.batch"
    ):
        plan({"data": 8}, batch=None)


def test_parameters_split_over_the_data_axis_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"rules\.embed, which splits mlp/kernel and 1 more over data: .*rule to null",
    ):
        plan({"data": 8}, embed="data")
