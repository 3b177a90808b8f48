"""The marks around code whose result over all devices `jaxdist.proofs` cannot derive.

A program does not show that the messages of a codec, or sums in a fixed order, add up to the sum
over all devices. The program also does not show that attention over blocks of keys, an MLP on a
ring, or an exchange of tokens between experts is right. Tests show all of this. The marks are names
of values, and compile to nothing.

A *contract* is a statement about the code between marks of its operands (`takes`) and marks of its
results (`gives`): for each mesh axis, how the axis splits every operand and every result. The
proofs check that the surrounding code keeps the contract, and assume that the code inside does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

BEGINS, ENDS = "jaxdist_sum_begins", "jaxdist_sum_ends"
ENTERS, LEAVES = "jaxdist_shard_enters", "jaxdist_shard_leaves"
TAKES, GIVES = "jaxdist_contract_takes", "jaxdist_contract_gives"
Sides = Mapping[str, int | None]
"""The form of an operand or a result: for each mesh axis, the dim along which the axis splits the
array, or None if the array is whole on every device of the axis."""


def begins(x: jax.Array, axis: str | Sequence[str], number: int) -> jax.Array:
    """Return a device's term of a sum, and mark in the program that the sum begins.

    Args:
      x: this device's term.
      axis: the mesh axes over which the devices sum.
      number: a number that identifies the sum in the program.
    """
    return _named(x, BEGINS, axis, number)


def ends(x: jax.Array, axis: str | Sequence[str], number: int, dim: int | None = None) -> jax.Array:
    """Return the result of a sum, and mark in the program that the sum ends.

    Args:
      x: the sum, or a shard of the sum.
      axis: the mesh axes over which the devices sum.
      number: the number of the sum, as in `begins`.
      dim: the dim along which `x` is a shard of the sum, or None if `x` is the sum.
    """
    return _named(x, ENDS, axis, number, "" if dim is None else str(dim))


def enters(x: jax.Array, axis: str | Sequence[str], number: int) -> jax.Array:
    """Return a device's shard of an operand, marked in the program as it enters a function.

    Args:
      x: the shard.
      axis: the mesh axes that split the operand.
      number: a number that identifies the operand in the function.
    """
    return _named(x, ENTERS, axis, number)


def leaves(x: jax.Array, axis: str | Sequence[str], number: int) -> jax.Array:
    """Return a device's shard of a result, marked in the program as it leaves a function.

    Args:
      x: the shard.
      axis: the mesh axes that split the result.
      number: the number of an operand that is split like the result.
    """
    return _named(x, LEAVES, axis, number)


def _named(
    x: jax.Array, mark: str, axis: str | Sequence[str], number: int, dim: str = ""
) -> jax.Array:
    axes = axis if isinstance(axis, str) else ",".join(axis)
    return checkpoint_name(x, f"{mark}:{axes}:{number}:{dim}")


def takes(x: jax.Array, sides: Sides) -> jax.Array:
    """Return `x`, an operand of the code inside a contract, with marks on `x` and its gradient.

    A contract states how mesh axes split the operands and the results of a piece of code.

    If an operand is whole on every device of an axis, each device computes only its term of the
    operand's gradient, and the gradient is the sum of these terms. A contract states nothing about
    the mesh axes that `sides` lacks.

    Args:
      x: the operand.
      sides: the dim of the operand that each axis of the contract splits, or None if the axis
        splits no dim.
    """
    return _crossing(x, _contract(TAKES, sides), _contract(GIVES, sides, whole="sum"))


def gives(x: jax.Array, sides: Sides) -> jax.Array:
    """Return `x`, a result of the code inside a contract, with marks on `x` and its gradient.

    A contract states how mesh axes split the operands and the results of a piece of code.

    Args:
      x: the result.
      sides: the dim of the result that each axis of the contract splits, or None if the axis splits
        no dim.
    """
    return _crossing(x, _contract(GIVES, sides), _contract(TAKES, sides))


def _contract(mark: str, sides: Sides, whole: str = "whole") -> str:
    said = (f"{axis}={whole if dim is None else dim}" for axis, dim in sides.items())
    return f"{mark}:{','.join(said)}"


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _crossing(x: jax.Array, forward: str, backward: str) -> jax.Array:
    return checkpoint_name(x, forward)


def _crossing_forward(x: jax.Array, forward: str, backward: str) -> tuple[jax.Array, None]:
    return checkpoint_name(x, forward), None


def _crossing_backward(
    forward: str, backward: str, kept: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (checkpoint_name(grad, backward),)


_crossing.defvjp(_crossing_forward, _crossing_backward)
