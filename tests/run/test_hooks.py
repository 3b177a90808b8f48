from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import jax.numpy as jnp
import pytest

from jaxdist.errors import RunError
from jaxdist.metrics.writer import Records
from jaxdist.run.hooks.loop import (
    Between,
    Cadence,
    Evaluate,
    Guard,
    HeldOut,
    Log,
    RunHooks,
    Save,
    StopHook,
)
from jaxdist.run.termination import Termination
from jaxdist.train.step import SKIP_METRICS

NAMES = ("loss", "grad_norm", "learning_rate")


def never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a state that is not finite was used")


def hooks(
    saved: tuple[int, ...] = (),
    max_skipped: int | None = None,
    log_every: int = 1,
    update: Callable[..., None] = never,
) -> RunHooks:
    progress: Any = SimpleNamespace(update=update, evaluation=never, measured=lambda seconds: [])
    store: Any = SimpleNamespace(wait=lambda: None, steps=lambda: saved, save=never)
    names = NAMES if max_skipped is None else (*NAMES, *SKIP_METRICS)
    guard = Guard(names, store, max_skipped)
    always = Cadence(1, 9)
    log = Log(Cadence(log_every, 9), guard, progress, Records())
    measured = Evaluate(always, never, progress, Records(), HeldOut())
    return RunHooks([guard, log, StopHook(Termination()), measured, Save(always, never)])


@pytest.mark.parametrize(
    ("loss", "norm"), [(1.0, float("nan")), (1.0, float("inf")), (float("nan"), 1.5)]
)
def test_a_gradient_that_is_not_finite_stops_the_run_before_anything_is_saved(loss, norm):
    with pytest.raises(
        RunError, match=rf"loss is {loss} at step 4 \(gradient norm {norm}.*nothing"
    ):
        hooks().metrics(4, jnp.array([loss, norm, 0.1]), 0.0)


def test_a_boundary_looks_at_its_own_step_even_where_nothing_is_logged():
    quiet = hooks(saved=(2,), log_every=3)
    quiet.metrics(4, jnp.array([1.0, float("nan"), 0.1]), 0.0)
    with pytest.raises(RunError, match="the last good checkpoint is step 2"):
        quiet.boundary(4, None)  # pyright: ignore[reportArgumentType]  (the state is not used)


def test_a_step_that_was_skipped_is_written_down_and_the_run_goes_on():
    seen = []
    found = hooks(max_skipped=2, update=lambda step, **_: seen.append(step))
    found.metrics(4, jnp.array([float("nan"), float("inf"), 0.1, 7, 2]), 0.0)
    found.metrics(5, jnp.array([1.0, 1.0, 0.1, 7, 0]), 0.0)
    assert seen == [4, 5]


def test_a_run_that_only_skips_ends():
    with pytest.raises(
        RunError, match=r"3 consecutive steps were skipped .*at most 2 are allowed; 7 were"
    ):
        hooks(max_skipped=2).metrics(4, jnp.array([1.0, 1.0, 0.1, 7, 3]), 0.0)


def test_a_step_that_was_not_skipped_must_still_be_finite():
    with pytest.raises(RunError, match="loss is nan at step 4"):
        hooks(max_skipped=2).metrics(4, jnp.array([float("nan"), 1.0, 0.1, 7, 0]), 0.0)


def evaluated(losses: list[float], best: float | None = None) -> tuple[HeldOut, list[Any]]:
    """Evaluations with each of these held-out losses; `best` is what a run that was resumed had
    kept. And what was saved: steps with the best loss kept beside each."""
    left, saved = iter(losses), []
    quiet: Any = SimpleNamespace(evaluation=lambda *_: None)
    heldout = HeldOut(best)
    measured = Evaluate(Cadence(1, 99), lambda _: {"loss": next(left)}, quiet, Records(), heldout)
    kept = Save(Cadence(99, 99), lambda state, _: saved.append((state, heldout.best)))
    found = RunHooks([measured, kept])
    for step in range(1, len(losses) + 1):
        found.boundary(step, step)  # pyright: ignore[reportArgumentType]  (a stand-in)
    return heldout, saved


class Second:
    """An outer exchange every second step."""

    def due(self, step):
        return step % 2 == 0


def test_what_happens_between_steps_is_what_is_evaluated_saved_and_gone_on_with():
    seen, saved = [], []
    quiet: Any = SimpleNamespace(evaluation=lambda *_: None)

    def run(state):
        seen.append(state)
        return {"loss": float(state)}

    measured = Evaluate(Cadence(1, 9), run, quiet, Records(), HeldOut())
    kept = Save(Cadence(2, 9), lambda state, _: saved.append(state))
    outer: Any = Second()
    found = RunHooks([Between(outer, lambda state: state / 2), measured, kept])
    assert [found.due(step) for step in (1, 2)] == [True, True]
    state: Any = 8.0
    for step in range(1, 5):
        state, stop = found.boundary(step, state)
        assert not stop
    assert (state, seen) == (2.0, [8.0, 4.0, 4.0, 2.0])
    assert saved == [8.0, 4.0, 2.0]


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
