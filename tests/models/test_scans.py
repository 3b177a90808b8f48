"""Which arguments a scan cuts into slices, wherever in a program it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist.models.scans import sliced

Run = Callable[..., jax.Array]


def run(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (x * w + b.sum(), None), x, w)[0]


FORMS: dict[str, Run] = {
    "as it is": run,
    "in a jitted function": jax.jit(run),
    "rematerialised": jax.checkpoint(run),
    "differentiated": jax.grad(run),
    "in a branch": lambda x, w, b: jax.lax.cond(x > 0, run, lambda x, w, b: x, x, w, b),
    "in a loop": lambda x, w, b: jax.lax.while_loop(
        lambda x: x < b.sum(), lambda x: run(x, w, b), x
    ),
    "in a scan": lambda x, w, b: jax.lax.scan(lambda x, _: (run(x, w, b), None), x, length=2)[0],
    "in another dtype": lambda x, w, b: run(x, w.astype(jnp.bfloat16).astype(jnp.float32), b),
}


def found(function: Run) -> set[int]:
    args: tuple[Any, ...] = (jnp.float32(1), jnp.ones(3), jnp.ones(2))
    return sliced(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.mark.parametrize("form", FORMS)
def test_a_scan_is_found(form: str) -> None:
    assert found(FORMS[form]) == {1}


def test_what_is_worked_out_of_an_argument_is_not_the_argument() -> None:
    assert found(lambda x, w, b: run(x, 2 * w, b)) == set()
    assert found(lambda x, w, b: run(x, w[:2], b)) == set()
