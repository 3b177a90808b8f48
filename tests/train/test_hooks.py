from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxdist.errors import RunError
from jaxdist.train.hooks import Cadence, RunHooks
from jaxdist.train.termination import Termination

NAMES = ("loss", "grad_norm", "learning_rate")


def hooks(saved: tuple[int, ...] = ()) -> RunHooks:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a state that is not finite was used")

    return RunHooks(
        names=NAMES,
        cadence=Cadence(log=1, evaluate=1, save=1, last=9),
        progress=SimpleNamespace(update=never, evaluation=never),  # pyright: ignore[reportArgumentType]
        writer=None,
        store=SimpleNamespace(  # pyright: ignore[reportArgumentType]
            wait=lambda: None, steps=lambda: saved, save=never
        ),
        evaluate=never,  # pyright: ignore[reportArgumentType]
        termination=Termination(),
        best=None,
    )


@pytest.mark.parametrize(
    ("loss", "norm"), [(1.0, float("nan")), (1.0, float("inf")), (float("nan"), 1.5)]
)
def test_a_gradient_that_is_not_finite_stops_the_run_before_anything_is_saved(loss, norm):
    with pytest.raises(
        RunError, match=rf"loss is {loss} at step 4 \(gradient norm {norm}.*nothing"
    ):
        hooks().metrics(4, jnp.array([loss, norm, 0.1]), 0.0)


def test_a_boundary_looks_at_its_own_step_even_where_nothing_is_logged():
    quiet = hooks(saved=(2,))
    quiet.cadence = Cadence(log=3, evaluate=1, save=1, last=9)
    quiet.metrics(4, jnp.array([1.0, float("nan"), 0.1]), 0.0)
    with pytest.raises(RunError, match="the last good checkpoint is step 2"):
        quiet.boundary(4, None)  # pyright: ignore[reportArgumentType]
