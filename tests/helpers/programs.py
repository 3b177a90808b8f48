"""A train step of a few parameters on the fake devices."""

import math

import jax

from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.functional import functional
from jaxdist.optim.build import build_optimizer
from jaxdist.parallel.data import DataParallel
from jaxdist.parallel.zero import ZeroConfig, plan_zero
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.train.step import Program


def build_program(
    module, loss, optim, batch, mesh, *, steps=10, microbatches=1, reduce=None, zero=0, **explicit
):
    """`explicit` are fields of `DataParallel`; `zero` is a stage."""
    devices = jax.devices()[: math.prod(mesh.values())]
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig.model_validate(mesh), devices))
    model = functional(module)
    split = plan_zero(ZeroConfig(stage=zero, whole_below=0), layout, model.params, model.dims)
    return Program(
        model=model,
        loss=loss,
        optimizer=build_optimizer(optim, total_steps=steps, params=model.params, dims=model.dims),
        layout=layout,
        dims=model.dims,
        batch={
            k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=by_rows(layout, v))
            for k, v in batch.items()
        },
        seed=0,
        microbatches=microbatches,
        data_parallel=reduce and DataParallel(layout.mesh, ("data",), reduce, split, **explicit),
        zero=split,
    )


def by_rows(layout, values):
    return layout.sharding(("batch", *(None,) * (values.ndim - 1)))


def place(found, values):
    return {k: jax.device_put(v, by_rows(found.layout, v)) for k, v in values.items()}
