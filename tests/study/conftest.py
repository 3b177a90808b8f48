from __future__ import annotations

import json
from pathlib import Path

import pytest

TINY = {
    "model": {"type": "mlp", "hidden": [16]},
    "data": {"type": "images", "source": "digits"},
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"epochs": 1, "batch_size": 64},
    "mesh": {"data": -1},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of a tiny model on the digits, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    return Path("tiny.yaml")
