"""How results are shown to a person."""

from __future__ import annotations

import io
from typing import Any

import jax
import pytest
from rich.console import Console
from runs import DIGITS

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.run.report.results import print_results


def printed(**given: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    print_results(console=console, **given)
    return console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_loss_has_its_unit_and_baselines() -> None:
    assert printed(means={"loss": 1.5}, baselines={"bigram": 2.0}, loss_unit="nats per token") == [
        "held-out loss 1.5000 nats per token",
        "         bigram 2.0000, counted on the same training data: beaten",
    ]


def test_a_loss_without_a_unit_is_called_loss_alone() -> None:
    assert printed(means={"loss": 1.5, "error": 2.0}, baselines={}, loss_unit=None) == [
        "held-out loss 1.5000",
        "held-out error 2.0000",
    ]


@pytest.mark.parametrize(
    ("loss", "unit"),
    [
        (None, "nats per example"),
        ({"type": "import", "path": "losses_of_digits:as_sum"}, None),
    ],
)
def test_only_a_built_in_loss_is_counted_in_nats(loss: Any, unit: str | None) -> None:
    config = validate(Document({**DIGITS, "loss": loss}), ExperimentConfig)
    assert build(config, devices=jax.devices()[:1]).loss_unit == unit
