"""Names and sizes of leaves, over every kind of container."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.trees import flatten_with_names, leaf_bytes, tree_bytes, tree_size


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    step: Any


def test_names_of_every_kind_of_container() -> None:
    tree = State(params={"b": [1, (2, None)], "a": Pair({}, 3)}, step=5)
    assert flatten_with_names(tree) == [
        ("params/a/right", 3),
        ("params/b/0", 1),
        ("params/b/1/0", 2),
        ("step", 5),
    ]
    assert flatten_with_names(1) == [("", 1)]
    assert flatten_with_names(None) == []


def test_the_order_is_that_of_jax() -> None:
    state = optax.adamw(1e-3).init({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
    named = flatten_with_names(state)
    assert [name for name, _ in named][:3] == ["0/count", "0/mu/b", "0/mu/w"]
    for (_, leaf), other in zip(named, jax.tree.leaves(state), strict=True):
        assert leaf is other


@pytest.mark.parametrize(
    ("leaf", "size", "bytes_"),
    [
        (jnp.ones((2, 3), jnp.bfloat16), 6, 12),
        (np.ones((4,), np.float64), 4, 32),
        (jax.ShapeDtypeStruct((2, 3), jnp.int8), 6, 6),
        (jnp.zeros((0, 5)), 0, 0),
        (jax.random.split(jax.random.key(0), 3), 3, 24),
        (1.5, 1, 4),
        (True, 1, 1),
    ],
)
def test_sizes(leaf: Any, size: int, bytes_: int) -> None:
    assert leaf_bytes(leaf) == bytes_
    assert tree_size({"x": leaf, "none": None}) == size
    assert tree_bytes([leaf, {"y": leaf}]) == 2 * bytes_
