"""A loss of the user's own that returns a scalar: how it is evaluated, and where it is refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from runs import DIGITS

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.train.evaluate import evaluate

ROWS = 359
"""Of the held-out digits."""


def made(name: str, devices: int = 1, **changes: Any) -> Any:
    loss = {"type": "import", "path": f"losses_of_digits:{name}"}
    sections: Any = {**DIGITS, "loss": loss, "mesh": {"data": devices}, **changes}
    config = validate(Document(sections), ExperimentConfig)
    return build(config, devices=jax.devices()[:devices])


def heldout_loss(experiment: Any, limit: int | None) -> tuple[float, list[int]]:
    """The mean over the held-out split, and the rows of the batches that it was taken of."""
    program = experiment.program
    state = program.init()
    with experiment.heldout.evaluation_batches(limit) as batches:
        given = list(batches)
    means = evaluate(program, state.params, state.buffers, given)
    return means["loss"], [len(batch["label"]) for batch in given]


@pytest.mark.parametrize(("limit", "rows"), [(None, [ROWS]), (2, [128])])
@pytest.mark.every(2)
def test_it_is_evaluated_in_one_batch_without_padding(limit: int | None, rows: list[int]) -> None:
    """The reference is a sum with its weight, of batches of which the last is padded."""
    found, of = heldout_loss(made("scalar", eval={"batches": limit}), limit)
    expected, padded = heldout_loss(made("as_sum"), limit)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert of == rows
    assert len(padded) > 1


@pytest.mark.parametrize(
    ("devices", "changes", "why"),
    [
        (2, {"eval": {}}, "359 examples, which do not divide over 2 devices along data"),
        (1, {"train": {"steps": 1, "batch_size": 32}, "eval": {}}, "more than 8 batches of 32"),
        (1, {"train": {"steps": 1, "batch_size": 64, "microbatches": 2}}, "microbatches 2: each"),
        (
            1,
            {
                "strategy": {"type": "parameter_server", "workers": 2},
                "train": {"steps": 1, "batch_size": 64},
                "optim": {"type": "sgd", "learning_rate": 0.1},
            },
            "strategy.workers 2",
        ),
    ],
)
def test_it_is_refused_where_it_would_be_a_mean_of_means(
    devices: int, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made("scalar", devices, **changes)
    message = str(caught.value)
    assert "a loss that returns a scalar for 'loss' with" in message
    assert why in message
    assert 'return {"loss": Mean(total, weight.sum())}' in message
    assert caught.value.args[0].splitlines()[1].startswith("  loss = ")


class Weighted:
    """Digits of one class, some of which weigh nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, Any]:
        image = np.zeros((8, 8, 1), np.float32)
        return {"image": image, "label": np.int32(3), "weight": np.float32(at % 2)}


def test_it_is_refused_where_rows_may_weigh_nothing() -> None:
    data = {"type": "import", "path": f"{__name__}:Weighted", "classes": 10}
    with pytest.raises(
        ConfigError, match=r"'loss' with a weight in each example: .*whether examples with"
    ):
        made("scalar", data=data, eval={})
    made("as_sum", data=data, eval={})
