"""Stacks of blocks that know nothing of jaxdist: recognised, run, and told where they cannot be."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from initialized import initialized
from plain_models import VOCAB, WIDTH, Block, Helped, Listed, Vmapped

from jaxdist.errors import ConfigError
from jaxdist.models.functional import Functional, functional
from jaxdist.models.layers import scan_blocks, stack

TOKENS = jnp.arange(12).reshape(2, 6) % VOCAB


def recognised(make: Any, *inputs: Any) -> Functional:
    return functional(make).with_stacks(lambda module: module(*inputs or (TOKENS,)))


def of_blocks(model: Functional) -> frozenset[str]:
    return frozenset(name for name in model.dims if name.startswith("blocks/"))


STACKS = [Vmapped, Helped, partial(Helped, by_vmap=True)]


@pytest.mark.parametrize("make", STACKS)
def test_a_stack_is_recognised(make: Any) -> None:
    model = recognised(make)
    assert len(of_blocks(model)) == 14
    assert model.stacked == of_blocks(model)


@pytest.mark.parametrize(("make", "fetched"), [(Vmapped, False), *((m, True) for m in STACKS[1:])])
def test_what_scan_blocks_reads_is_made_whole_there(make: Any, fetched: bool) -> None:
    model = functional(make)
    assert model.scanned == (of_blocks(model) if fetched else frozenset())


def test_blocks_in_a_list_are_no_stack() -> None:
    assert recognised(Listed).stacked == frozenset()


class OverTime(nnx.Module):
    """A scan over a sequence reads one parameter of a module by position, and another whole."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.cell = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jnp.ones((6, WIDTH)))
        self.mixed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, now: Any) -> tuple[jax.Array, None]:
            x, position, row = now
            return self.cell(carry + x + position[None] + row[None]), None

        bias: Any = self.mixed.bias
        rows = self.mixed.kernel[...][:6] + bias[...][None]
        xs = (x.swapaxes(0, 1), self.positions[...], rows)
        return jax.lax.scan(step, x[:, 0], xs)[0]


def test_a_scan_over_time_is_no_stack() -> None:
    assert recognised(OverTime, jnp.ones((2, 6, WIDTH))).stacked == frozenset()


def one_by_one(blocks: nnx.Module, x: jax.Array) -> jax.Array:
    graph, state = nnx.split(blocks)
    for layer in range(4):
        x = nnx.merge(graph, jax.tree.map(lambda leaf, i=layer: leaf[i], state))(x)
    return x


@pytest.mark.parametrize("make", STACKS)
@pytest.mark.every(3)
def test_a_stack_runs_its_blocks_one_after_another(make: Any) -> None:
    model = recognised(make)
    params, buffers = initialized(model)

    @jax.jit
    def both(params: Any) -> Any:
        module: Any = model.bind(params, buffers)
        module.eval()
        return module(TOKENS, None), module.head(one_by_one(module.blocks, module.embed(TOKENS)))

    np.testing.assert_allclose(*both(params), rtol=1e-5, atol=1e-5)
    kernel = params["blocks"]["up"]["kernel"]
    assert kernel.shape == (4, WIDTH, 2 * WIDTH)
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1


@pytest.mark.parametrize("by_vmap", [False, True])
@pytest.mark.every(2)
def test_each_layer_of_a_stack_draws_its_own_numbers(by_vmap: bool) -> None:
    """Layers that are all alike, which add to x what their dropout leaves of the same."""
    model = recognised(partial(Helped, by_vmap=by_vmap, dropout=0.5))
    params, buffers = initialized(model)
    params["blocks"] = jax.tree.map(jnp.zeros_like, params["blocks"])
    params["blocks"]["down"]["bias"] = jnp.ones((4, WIDTH))

    def added(key: int) -> np.ndarray:
        module: Any = model.bind(params, buffers, jax.random.key(key))
        module.train()
        x = jnp.zeros((2, 6, WIDTH))
        return np.asarray(module.trunk(x, TOKENS))

    np.testing.assert_array_equal(added(1), added(1))
    assert (added(1) != added(2)).any()
    # Of masks that all layers share, an element has nothing or all: 0 or 8.
    assert {0.0, 2.0, 4.0, 6.0, 8.0} == {*np.unique(added(1)).tolist()}


def test_dims_that_a_block_names_follow_those_of_the_stack() -> None:
    def make(rngs: nnx.Rngs) -> nnx.Module:
        named = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        return nnx.Linear(4, 8, kernel_init=named, rngs=rngs)

    model = functional(partial(stack, make, 3))
    assert model.dims == {"kernel": ("layers", "embed", "mlp"), "bias": None}


def test_parts_of_a_chunk_are_bound_with_their_own_random_numbers() -> None:
    """A pipeline runs a part of the layers at a time."""
    model = recognised(partial(Helped, dropout=0.5))
    params, buffers = initialized(model)
    params["blocks"] = jax.tree.map(lambda leaf: leaf[:2], params["blocks"])
    module: Any = model.bind(params, buffers, jax.random.key(1))
    module.train()
    assert module.trunk(jnp.zeros((2, 6, WIDTH)), TOKENS).shape == (2, 6, WIDTH)


class Counting(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.counted = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.counted(super().__call__(x))


def test_state_that_a_stack_would_lose_is_refused() -> None:
    blocks = stack(Counting, 2, nnx.Rngs(0))
    x = jnp.ones((2, 6, WIDTH))
    with pytest.raises(ConfigError, match=r"counted/mean, counted/var .* Counting .*nnx\.List"):
        scan_blocks(blocks, x)
    blocks.eval()
    assert scan_blocks(blocks, x).shape == x.shape
