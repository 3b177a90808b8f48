"""Checks that refuse settings whose bits depend on the number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxdist.cost.context import near_lengths
from jaxdist.errors import ConfigError
from jaxdist.jaxprs import inner_jaxprs
from jaxdist.mesh import describe_mesh
from jaxdist.types import Params

OTHER_AXES = ("tensor",)
"""The mesh axes other than data that strict mode allows. In tests, XLA's sums over these axes
within a process always had the same order."""
CROSSING = frozenset(
    [
        "sort",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "rev",
        "dot_general",
        "iota",
        "random_bits",
        "random_wrap",
        "threefry2x32",
        "fft",
        "transpose",
        "gather",
        "dynamic_slice",
        "dynamic_update_slice",
        "top_k",
        "triangular_solve",
        "cholesky",
        "householder_product",
    ]
)
"""The primitives that may keep a shape, but mix elements or depend on the index of elements."""


def check_devices(mesh: Mesh, batch_axes: tuple[str, ...], shards: int) -> None:
    """Check that strict mode is possible on a mesh.

    Args:
      mesh: the mesh to check.
      batch_axes: the mesh axes that split the batch.
      shards: the number of logical shards.

    Raises:
      ConfigError: the number of devices along `batch_axes` does not divide the number of shards, or
        another axis of the mesh is not in `OTHER_AXES` or spans several processes.
    """
    sizes = dict(mesh.shape)
    count = math.prod(sizes[axis] for axis in batch_axes)
    if shards % count:
        raise ConfigError(
            f"{shards} logical shards do not divide over {count} devices along data, but each "
            f"device must compute the same number of shards; use {near_lengths(shards, count)}, "
            f"or a size of mesh.data that divides {shards}",
            setting=("deterministic", "shards"),
        )
    others = [axis for axis, size in sizes.items() if axis not in batch_axes and size > 1]
    for axis in others:
        if not axis.startswith(OTHER_AXES):
            raise ConfigError(
                f"strict with mesh {describe_mesh(sizes)}: devices along {axis} share a logical "
                "shard, so the bits of its gradients may depend on the number of these devices; "
                "use only the axes data and tensor",
                setting=("deterministic",),
            )
    places = [mesh.axis_names.index(axis) for axis in batch_axes]
    by_shard = mesh.devices.transpose(
        *places, *(i for i in range(mesh.devices.ndim) if i not in places)
    ).reshape(count, -1)
    if any(len({device.process_index for device in row}) > 1 for row in by_shard):
        raise ConfigError(
            f"strict with mesh {describe_mesh(sizes)}: devices along {', '.join(others)} are in "
            "several processes, and several processes add partial sums in a different order than "
            "a single process. Put data first in mesh, and start processes so that each of them "
            f"has all devices along {', '.join(others)}",
            setting=("deterministic",),
        )


def check_update(transform: optax.GradientTransformationExtraArgs, params: Params) -> None:
    """Check that an optimizer's update is elementwise, as strict mode with ZeRO requires.

    Strict mode with ZeRO updates parts of the parameters separately. The update is traced and not
    computed. A test whether all elements are finite is allowed.

    Args:
      transform: the optimizer.
      params: the parameters, or their shapes.

    Raises:
      ConfigError: the update sums or mixes elements, or draws random numbers.
    """
    number = jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(transform.init, params)

    def update(grads: Params, state: Any, params: Params, norm: jax.Array, loss: jax.Array) -> Any:
        return transform.update(grads, state, params, grad_norm=norm, value=loss)

    traced = jax.make_jaxpr(update)(params, state, params, number, number)
    found = next(_crossing(traced.jaxpr), None)
    if found is not None:
        raise ConfigError(
            f"strict with parallel.zero: the update has {found}, which combines elements of "
            "several devices in an order that depends on the device count. Use an element-wise "
            "optimizer (adamw, sgd; clip_norm and skip_nonfinite are fine), or "
            "parallel.zero.stage: 0"
        )


def _crossing(jaxpr: Any) -> Iterator[str]:
    """Yield the names of a trace's primitives that are not elementwise."""
    for equation in jaxpr.eqns:
        inner = [*inner_jaxprs(equation)]
        if inner:
            for sub in inner:
                yield from _crossing(sub)
            continue
        name = equation.primitive.name
        shapes = [
            {v.aval.shape for v in variables if getattr(v.aval, "shape", ())}
            for variables in (equation.invars, equation.outvars)
        ]
        # A reduction to fewer elements is refused, except `reduce_and`, which does not depend on
        # the order of elements.
        fewer = shapes[0] and shapes[0] != shapes[1] and name != "reduce_and"
        if len(shapes[0] | shapes[1]) > 1 or fewer or (name in CROSSING and any(shapes)):
            yield name
