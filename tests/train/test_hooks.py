from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import jax.numpy as jnp
import pytest

from jaxdist.errors import RunError
from jaxdist.train.hooks import Cadence, RunHooks
from jaxdist.train.step import SKIP_METRICS
from jaxdist.train.termination import Termination

NAMES = ("loss", "grad_norm", "learning_rate")


def hooks(saved: tuple[int, ...] = (), max_skipped: int | None = None) -> RunHooks:
    def never(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a state that is not finite was used")

    progress: Any = SimpleNamespace(update=never, evaluation=never)
    store: Any = SimpleNamespace(wait=lambda: None, steps=lambda: saved, save=never)
    return RunHooks(
        names=NAMES if max_skipped is None else (*NAMES, *SKIP_METRICS),
        cadence=Cadence(log=1, evaluate=1, save=1, last=9),
        progress=progress,
        writer=None,
        store=store,
        evaluate=never,
        termination=Termination(),
        best=None,
        max_skipped=max_skipped,
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
        quiet.boundary(4, None)  # pyright: ignore[reportArgumentType]  (the state is not used)


def test_a_step_that_was_skipped_is_written_down_and_the_run_goes_on():
    found = hooks(max_skipped=2)
    seen = []
    found.progress = SimpleNamespace(update=lambda step, **_: seen.append(step))  # pyright: ignore[reportAttributeAccessIssue]  (a stand-in)
    found.metrics(4, jnp.array([float("nan"), float("inf"), 0.1, 7, 2]), 0.0)
    found.metrics(5, jnp.array([1.0, 1.0, 0.1, 7, 0]), 0.0)
    assert seen == [4, 5]


def test_a_run_that_only_skips_ends():
    with pytest.raises(RunError, match=r"3 steps in a row were skipped .*allowed: 2; 7 since"):
        hooks(max_skipped=2).metrics(4, jnp.array([1.0, 1.0, 0.1, 7, 3]), 0.0)


def test_a_step_that_was_not_skipped_must_still_be_finite():
    with pytest.raises(RunError, match="loss is nan at step 4"):
        hooks(max_skipped=2).metrics(4, jnp.array([float("nan"), 1.0, 0.1, 7, 0]), 0.0)


def evaluated(losses: list[float], best: float | None = None) -> tuple[RunHooks, list[Any]]:
    """Hooks after an evaluation with each of these held-out losses; `best` is what a run that was
    resumed had kept. And what was saved: steps with the best loss kept beside each."""
    found = hooks()
    found.best = best
    left = iter(losses)
    found.evaluate = lambda _: {"loss": next(left)}
    quiet: Any = SimpleNamespace(update=lambda *_, **__: None, evaluation=lambda *_: None)
    found.progress = quiet
    found.cadence = Cadence(log=1, evaluate=1, save=99, last=99)
    saved = []
    store: Any = SimpleNamespace(
        save=lambda step, _, metadata, **__: saved.append((step, metadata["best"]))
    )
    found.store = store
    for step in range(1, len(losses) + 1):
        found.metrics(step, jnp.array([1.0, 1.0, 0.1]), 0.0)
        found.boundary(step, None)  # pyright: ignore[reportArgumentType]  (the state is not used)
    return found, saved


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("before", "losses", "saved"),
    [
        (None, [3.0, 2.0, 2.5], [(1, 3.0), (2, 2.0)]),
        (None, [NAN, 2.0, NAN, 1.0], [(2, 2.0), (4, 1.0)]),
        (NAN, [2.0, 3.0], [(1, 2.0)]),
        (None, [INF, -INF, 2.0], [(3, 2.0)]),
        (2.0, [NAN, 3.0], []),
    ],
)
def test_a_held_out_loss_that_is_not_finite_is_never_the_best(before, losses, saved):
    found, kept = evaluated(losses, before)
    assert kept == saved
    assert found.best == (saved[-1][1] if saved else before)
