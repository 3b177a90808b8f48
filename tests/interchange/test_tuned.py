"""Fine-tuning computes what peft and trl compute.

The golden file holds what they computed for a drawn llama, by
`python -m benchmarks.models.tuned PYTHON tests/interchange/tuned.json`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models.drawn import write_drawn
from benchmarks.models.tuned import DRAWN, ours

GOLDEN = json.loads(Path(__file__).with_name("tuned.json").read_text())
ZERO = {"mesh": {"data": 2}, "parallel": {"zero": {"stage": 3, "whole_below": 0}}}


@pytest.mark.parametrize("sections", [{}, pytest.param(ZERO, marks=pytest.mark.slow)])
@pytest.mark.full
def test_losses_and_gradients_are_those_of_peft_and_trl(sections, tmp_path, devices):
    """To 1e-5: ten steps of AdamW, and one batch of pairs with a frozen base as the reference."""
    write_drawn(DRAWN, tmp_path / "model")
    found, state = ours(tmp_path / "model", tmp_path / "adapters", sections)
    assert state == 8  # bytes for each element of an adapter
    for name in ("text losses", "dpo loss"):
        np.testing.assert_allclose(found[name], GOLDEN[name], rtol=1e-5)
    most = max(GOLDEN["grads"].values())
    assert {name for name in found if name.startswith("grad ")} == GOLDEN["grads"].keys()
    for name, norm in GOLDEN["grads"].items():
        assert abs(np.linalg.norm(found[name]) - norm) < 1e-5 * most, name
