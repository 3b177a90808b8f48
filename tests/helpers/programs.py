"""A train step of a few parameters on the fake devices."""

import math

import jax
import numpy as np
from built_optimizer import built_optimizer

from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.functional import functional
from jaxdist.parallel.exchange.xla import XlaExchange
from jaxdist.parallel.plan import explicit_exchange
from jaxdist.parallel.zero import ZeroConfig, plan_zero
from jaxdist.sharding import ShardingConfig, make_layout, param_shardings
from jaxdist.train.assemble import assemble
from jaxdist.trees import flatten_with_names


def build_program(
    module, loss, optim, batch, mesh, *, steps=10, microbatches=1, reduce=None, zero=0, **explicit
):
    """Build the program of a model; `explicit` has fields of `Explicit`, and `zero` is a stage."""
    devices = jax.devices()[: math.prod(mesh.values())]
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig.model_validate(mesh), devices))
    model = functional(module)
    shapes = dict(flatten_with_names(model.params))
    model = model.with_dims({n: dims or (None,) * shapes[n].ndim for n, dims in model.dims.items()})
    split = plan_zero(ZeroConfig(stage=zero, whole_below=0), layout, model.params, model.dims)
    return assemble(
        model,
        loss,
        built_optimizer(optim, steps, model.params, model.dims),
        layout,
        model.dims,
        shapes_of(layout, batch),
        microbatches=microbatches,
        exchange=exchange_of(model, layout, split, reduce, **explicit),
    )


def exchange_of(model, layout, zero, reduce, **explicit):
    """Return the exchange over the axis data: by the algorithm `reduce`, or by XLA for None."""
    whole = param_shardings(layout, model.params, model.dims)
    if reduce is None:
        return XlaExchange(whole, zero)
    return explicit_exchange(whole, zero, axes=("data",), algorithm=reduce, **explicit)


def shapes_of(layout, batch):
    return {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=by_rows(layout, v))
        for k, v in batch.items()
    }


def by_rows(layout, values):
    return layout.sharding(("batch", *(None,) * (values.ndim - 1)))


def put_state(program, state):
    """Return a state of the host, placed in the shardings of a program.

    Tests reuse a state, because it takes longer to draw a state on each mesh than to train.
    """
    shardings = jax.tree.map(lambda shape: shape.sharding, program.state_shapes)
    # The state is copied, because a step reuses the memory of its state.
    return jax.device_put(program.home.stored(jax.tree.map(np.array, state)), shardings)


def place(found, values):
    return {k: jax.device_put(v, by_rows(found.layout, v)) for k, v in values.items()}
