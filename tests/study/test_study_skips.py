"""A step of a study that was skipped is no sign that its run diverged."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxdist.study.trainer import train_trial


@pytest.mark.parametrize(
    ("skipped", "diverged", "steps"), [((1, 0, 0), False, 3), ((0, 0, 0), True, 2)]
)
def test_a_skipped_step_without_a_loss_goes_on(
    skipped: tuple[int, ...], diverged: bool, steps: int
) -> None:
    taken: list[int] = []

    def step(state: int, _: Any) -> tuple[int, np.ndarray]:
        taken.append(state)
        return state + 1, np.array([np.nan if state == 0 else 1.0, skipped[state]])

    program: Any = SimpleNamespace(metrics=("loss", "skipped_in_a_row"), train=step)
    loader = SimpleNamespace(batches=lambda: nullcontext(repeat(None)))
    experiment: Any = SimpleNamespace(program=program, loader=loader, total_steps=3)
    assert train_trial(experiment, 0)[1] == diverged  # pyright: ignore[reportArgumentType]
    assert len(taken) == steps
