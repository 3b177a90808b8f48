"""The example of the guide to Python, as it stands there, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import QUICK

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "python.md"
CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.full
def test_the_guide_s_loop_trains_saves_evaluates_and_goes_on(tmp_path):
    """ZeRO and stages, gradients and update apart."""
    (code,) = re.findall(r"```python title=\"loop.py\"\n(.*?)```", GUIDE.read_text(), re.S)
    (tmp_path / "configs").symlink_to(CONFIGS)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "XLA_FLAGS": QUICK},
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *losses, heldout, again = done.stdout.splitlines()
    values = [float(line.split()[-1]) for line in losses]
    assert len(values) == 12
    assert values[-1] < values[0] - 0.1
    assert float(heldout.split()[-1]) < values[0]
    assert again == "restored step 12"
