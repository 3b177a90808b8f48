"""The comparison of a saved tree with a target, path by path, before any array is loaded."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdist.checkpoint.manifest import LeafRecord
from jaxdist.errors import LINES, CheckpointError, some_of
from jaxdist.trees import flatten_with_names
from jaxdist.types import Leaf, PyTree

_LISTED_PATHS = 8


def is_key(leaf: Leaf) -> bool:
    """Return whether a leaf is an array of typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def named_leaves(tree: PyTree) -> dict[str, Leaf]:
    """Return the leaves of a tree by path, in jax's order.

    Raises:
      CheckpointError: two leaves have the same path, such as {"a/b": x, "a": {"b": y}}.
    """
    pairs = flatten_with_names(tree)
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(
            f"two leaves of the state have the same path {', '.join(map(repr, twice))}: rename the "
            "keys that contain '/', and the keys that differ only in type"
        )
    return named


def describe_arrays(tree: PyTree, shapes: PyTree = None) -> dict[str, LeafRecord]:
    """Return the record of each array in a tree, by path.

    Args:
      shapes: a tree like `tree` with the shapes to record; None records the shapes of the arrays.
    """
    leaves = named_leaves(tree)
    own = leaves if shapes is None else named_leaves(shapes)
    assert own.keys() == leaves.keys()
    return {
        name: LeafRecord(
            shape=tuple(own[name].shape),
            dtype=str(leaf.dtype),
            key_impl=str(jax.random.key_impl(leaf)) if is_key(leaf) else None,
        )
        for name, leaf in leaves.items()
    }


def _text(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def structure_differences(saved: dict[str, LeafRecord], target: PyTree) -> list[str]:
    """Return the differences between saved arrays and a target, as a line for each path.

    An array may be missing, extra, or of another shape or dtype than in the target.

    Args:
      target: a tree of arrays or of `jax.ShapeDtypeStruct`.
    """
    wanted = {n: _text(leaf.shape, str(leaf.dtype)) for n, leaf in named_leaves(target).items()}
    present = {name: _text(leaf.shape, leaf.dtype) for name, leaf in saved.items()}
    lines = []
    for name in dict.fromkeys([*wanted, *present]):
        if name not in present:
            lines.append(f"{name}: not saved, expected {wanted[name]}")
        elif name not in wanted:
            lines.append(f"{name}: saved {present[name]}, not expected")
        elif wanted[name] != present[name]:
            lines.append(f"{name}: saved {present[name]}, expected {wanted[name]}")
    return lines


def check_structure(saved: dict[str, LeafRecord], target: PyTree, *, where: str) -> None:
    """Check that a checkpoint has the arrays of a target, and is not of another model.

    Raises:
      CheckpointError: arrays differ; the message lists the first differences, with the saved and
        the wanted shapes and dtypes.
    """
    lines = structure_differences(saved, target)
    if not lines:
        return
    if all(": not saved, " in line for line in lines):
        raise CheckpointError(
            f"{where} contains only a part of the training state: {len(lines)} arrays were not "
            f"saved, such as {lines[0]}. If the config has another model or optimizer than the "
            "run, set both back to those of the run. If the run saves with checkpoint.parts, it "
            "cannot be resumed, but a new run can begin with its parameters "
            "(checkpoint.begin_with)"
        )
    raise CheckpointError(
        f"{where} contains a different model or optimizer than the config: of {len(saved)} "
        f"saved and {len(named_leaves(target))} expected arrays, {len(lines)} differ:\n"
        f"  {some_of(lines, _LISTED_PATHS, LINES)}\n"
        "resume with the configuration with which the run was started, or start a run in a new "
        "directory"
    )
