"""The collectives for users, inside `jax.shard_map`, for any shape, dtype and algorithm.

`reference.py` defines the results. The docstring and the method `traffic` of an algorithm describe
the cost. Each operation takes the name of an axis or a tuple of names. In a tuple, the axis across
the slowest network comes first, and the devices are counted over all axes of the tuple. The lengths
of dims need not be multiples of the number of devices, except for all_to_all. Invalid arguments
raise a CollectiveError at trace time. All devices have the same shapes and dtypes, because
`jax.shard_map` traces one program for all devices.

Reverse-mode differentiation runs the transposed operation by the same algorithm: all_reduce <->
all_reduce, reduce_scatter <-> all_gather, broadcast <-> reduce, all_to_all <-> all_to_all. JAX
itself differentiates `Xla`, in forward mode too. The operations with max and min have no
derivative.

With `check_vma=True`, JAX cannot prove that an all_reduce by another algorithm than `Xla` has the
same result on all devices, and types the result as varying. The user must then declare a sharded
out_spec, set `check_vma=False`, or use `Xla`. A gradient that is computed inside a `shard_map`
through a varying result is the gradient of the sum of all devices' losses. The same is true for
`lax.psum` with `check_vma=False`.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.collectives import check, differentiate
from jaxdist.collectives.algorithms.single_device import unless_single_device
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.axis import Axis, axis_size, checked, varying
from jaxdist.collectives.contract import Algorithm, Operation
from jaxdist.collectives.differentiate import Function

Op = Literal["sum", "mean", "max", "min"]
XLA = Xla()


def all_reduce(
    x: jax.Array, axis: Axis, *, op: Op = "sum", algorithm: Algorithm = XLA
) -> jax.Array:
    """Combine the arrays of all devices element by element, and return the result on every device.

    Args:
      x: this device's array, of any shape.
      axis: the name of a mesh axis, or a tuple of names.
      op: the operation: "sum" for all numbers, "mean" for floating-point and complex numbers, "max"
        and "min" for bools and for all numbers except complex numbers.
      algorithm: the algorithm, which determines the order of summation.

    Returns:
      An array like `x`, with the same bits on all devices.

    >>> jax.vmap(lambda x: all_reduce(x, "data"), axis_name="data")(jnp.arange(4.0)).tolist()
    [6.0, 6.0, 6.0, 6.0]
    """
    x, axis, size, algorithm = _arguments("all_reduce", x, axis, algorithm)
    run = _reduction("all_reduce", op, x, axis, algorithm)
    return _reduced(op, algorithm, size, partial(_elementwise, algorithm, run), x)


def reduce_scatter(
    x: jax.Array, axis: Axis, *, op: Op = "sum", dim: int = 0, algorithm: Algorithm = XLA
) -> jax.Array:
    """Combine the arrays of all N devices, and return this device's block of the result.

    Args:
      x, axis, op, algorithm: the arguments of `all_reduce`.
      dim: the dim along which the result is divided into blocks. If this dim has n elements, a
        block has c = ceil(n / N) elements, and device i gets the c elements from index i * c.

    Returns:
      This device's block, with c elements in `dim`. The last blocks are padded with zeros.
    """
    x, axis, size, algorithm = _arguments("reduce_scatter", x, axis, algorithm)
    run = _reduction("reduce_scatter", op, x, axis, algorithm)
    dim = check.dim_of(dim, x, "dim", "reduce_scatter")

    def scatter(x: jax.Array) -> jax.Array:
        blocks = into_blocks(x, dim, size)
        block = _blockwise(algorithm, run, blocks, blocks.shape[1:])
        return jnp.moveaxis(block, 0, dim)

    return _reduced(op, algorithm, size, scatter, x)


def all_gather(
    x: jax.Array, axis: Axis, *, dim: int = 0, size: int | None = None, algorithm: Algorithm = XLA
) -> jax.Array:
    """Concatenate the blocks of all N devices, and return the result on every device.

    Args:
      x: this device's block, of any shape and dtype.
      axis, algorithm: the arguments of `all_reduce`.
      dim: the dim along which to concatenate, in the order of the axis.
      size: the number of elements of this dim to keep, or None to keep all. With a size, the
        padding of `reduce_scatter` can be removed.
    """
    x, axis, count, algorithm = _arguments("all_gather", x, axis, algorithm)
    dim = check.dim_of(dim, x, "dim", "all_gather")
    rows = jnp.moveaxis(x, dim, 0)
    total = count * rows.shape[0]
    size = check.gathered_size(size, total, axis, "all_gather")
    run = partial(differentiate.linear, "all_gather", algorithm, axis)
    flat = rows if algorithm.native else _settled(rows.reshape(-1))
    # The algorithms except `Xla` assume at least one element (`contract.py`).
    gathered = run(flat) if flat.size or algorithm.native else flat
    return jnp.moveaxis(gathered.reshape(total, *rows.shape[1:])[:size], 0, dim)


def broadcast(x: jax.Array, axis: Axis, *, root: int = 0, algorithm: Algorithm = XLA) -> jax.Array:
    """Return the array of the device with index `root` on every device.

    The array may have any shape and dtype, and `root` must be known at trace time.
    """
    x, axis, size, algorithm = _arguments("broadcast", x, axis, algorithm)
    root = check.root_of(root, axis, size, "broadcast")
    run = partial(differentiate.linear, "broadcast", algorithm, axis, root=root)
    return _elementwise(algorithm, run, x if algorithm.native else _settled(x))


def reduce(
    x: jax.Array, axis: Axis, *, root: int = 0, op: Op = "sum", algorithm: Algorithm = XLA
) -> jax.Array:
    """Combine the arrays of all devices, and return the result on a single device.

    Args:
      x, axis, op, algorithm: the arguments of `all_reduce`.
      root: the index, along the axis, of the device that gets the result. The index must be known
        at trace time.

    Returns:
      The result on the device `root`, and zeros on the other devices.
    """
    x, axis, size, algorithm = _arguments("reduce", x, axis, algorithm)
    root = check.root_of(root, axis, size, "reduce")
    run = _reduction("reduce", op, x, axis, algorithm, root)
    return _reduced(op, algorithm, size, partial(_elementwise, algorithm, run), x)


def all_to_all(
    x: jax.Array,
    axis: Axis,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    algorithm: Algorithm = XLA,
) -> jax.Array:
    """Split `x` into N parts, send part i to device i, and concatenate the received parts.

    Args:
      x: this device's array, of any shape and dtype.
      axis, algorithm: the arguments of `all_reduce`.
      split_dim: the dim to split, whose length must be a multiple of the number N of devices.
      concat_dim: the dim along which to concatenate, in the order of the axis. In the result, this
        dim is N times longer.
    """
    x, axis, size, algorithm = _arguments("all_to_all", x, axis, algorithm)
    split_dim = check.dim_of(split_dim, x, "split_dim", "all_to_all")
    concat_dim = check.dim_of(concat_dim, x, "concat_dim", "all_to_all")
    check.check_divides(x, split_dim, axis, size, "all_to_all")
    shape = list(x.shape)
    shape[split_dim] //= size
    parts = x.reshape(*shape[:split_dim], size, *shape[split_dim:])
    blocks = jnp.moveaxis(parts, split_dim, 0)
    run = partial(differentiate.linear, "all_to_all", algorithm, axis)
    received = _blockwise(algorithm, run, blocks, blocks.shape)
    shape[concat_dim] *= size
    return jnp.moveaxis(received, 0, concat_dim).reshape(shape)


def into_blocks(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Divide `x` along `dim` into `size` blocks, and return `[size, width, ...]`.

    The second dim of the result is the dim that is divided. This dim is padded with zeros at the
    end.
    """
    rows = jnp.moveaxis(x, dim, 0)
    width = -(-rows.shape[0] // size)
    padding = [(0, width * size - rows.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(rows, padding).reshape(size, width, *rows.shape[1:])


def _arguments(
    operation: str, x: jax.Array, axis: Axis, algorithm: Algorithm
) -> tuple[jax.Array, Axis, int, Algorithm]:
    """Check the arguments that all operations have in common.

    Returns:
      The array with the type "varying", the checked axis, the axis size, and the algorithm to run.
    """
    axis = checked(axis, operation)
    check.check_algorithm(algorithm, operation)
    x = varying(check.array(x, operation), axis)
    return x, axis, axis_size(axis), unless_single_device(algorithm, axis)


def _reduction(
    kind: Operation, op: Op, x: jax.Array, axis: Axis, algorithm: Algorithm, root: int = 0
) -> Function:
    """Return the function that combines flat arrays by `op`; for "mean" it returns the sum."""
    combine = check.combine_of(op, x, kind)
    if op in ("sum", "mean"):
        return partial(differentiate.linear, kind, algorithm, axis, root=root)
    forward = partial(differentiate.called, kind, algorithm, axis, combine=combine, root=root)
    return differentiate.extremum(f"{kind} with op={op!r}", forward)


def _settled(x: jax.Array) -> jax.Array:
    """Return `x` behind a barrier, so that XLA computes `x` only once.

    A device keeps `x` and sends `x`. Without the barrier XLA may compute the kept and the sent
    value separately, with different rounding.
    """
    return jax.lax.optimization_barrier(x)


def _reduced(op: Op, algorithm: Algorithm, size: int, run: Function, x: jax.Array) -> jax.Array:
    """Call `run` in the dtype of the sum, and return the sum or the mean in the dtype of `x`.

    The dtype of the sum is the dtype of `x`. For floats of two bytes, the dtype is
    `algorithm.accumulate` instead, unless this setting is None.
    """
    half = x.dtype in (jnp.bfloat16, jnp.float16) and op in ("sum", "mean")
    carried = x.astype(algorithm.accumulate) if half and algorithm.accumulate else x
    result = run(carried)
    # The division comes before the cast, because the sum may exceed the range of a half-width
    # dtype.
    mean = result / jnp.asarray(size, result.dtype) if op == "mean" else result
    return mean.astype(x.dtype)


def _elementwise(algorithm: Algorithm, run: Function, x: jax.Array) -> jax.Array:
    """Call `run` on the flattened array, and return the result in the shape of `x`.

    For `Xla` the array is not flattened, because auto axes may split its dims. With any other
    algorithm, an empty array is returned unchanged.
    """
    if algorithm.native:
        return run(x)
    return run(x.reshape(-1)).reshape(x.shape) if x.size else x


def _blockwise(
    algorithm: Algorithm, run: Function, blocks: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Call `run` on blocks that are flattened to [N, c], and return the result in `shape`.

    For `Xla` the blocks are not flattened.
    """
    if algorithm.native:
        return run(blocks).reshape(shape)
    flat = blocks.reshape(blocks.shape[0], -1)
    return run(flat).reshape(shape) if blocks.size else blocks.reshape(shape)
