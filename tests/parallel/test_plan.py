from __future__ import annotations

import pytest

from jaxdist.collectives.ring import Ring
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.parallel.plan import ParallelConfig, plan_data_parallel
from jaxdist.sharding import ShardingConfig, make_layout

DIMS = {"mlp/kernel": ("embed", "mlp"), "scale": ("embed",)}
RING = {"type": "ring"}


def plan(mesh, reduce=RING, dims=DIMS, **rules):
    layout = make_layout(ShardingConfig(rules=rules), build_mesh(MeshConfig.model_validate(mesh)))
    return plan_data_parallel(ParallelConfig.model_validate({"reduce": reduce}), layout, dims)


def test_nothing_is_explicit_unless_asked_for():
    assert ParallelConfig().reduce is None
    assert plan({"data": 8}, None) is None


def test_the_axes_are_those_that_split_the_batch():
    found = plan({"data": 4, "tensor": 2}, {"type": "ring", "directions": 2})
    assert found is not None
    assert (found.axes, found.algorithm) == (("data",), Ring(directions=2))
    split = plan({"tensor": 2, "data": {"dcn": 2, "ici": 2}})
    assert split is not None
    assert split.axes == ("data_dcn", "data_ici")


def test_a_mesh_without_an_axis_for_the_batch_is_refused():
    with pytest.raises(ConfigError, match=r"'ring' needs a mesh axis.*\{'tensor': 8\}.*mesh\.data"):
        plan({"tensor": 8})
    with pytest.raises(ConfigError, match="needs a mesh axis that splits the batch"):
        plan({"data": 8}, batch=None)


def test_parameters_split_over_the_data_axis_are_refused():
    with pytest.raises(
        ConfigError, match=r"rule embed: data splits mlp/kernel over it.*embed: null"
    ):
        plan({"data": 8}, embed="data")
