"""`jaxdist prove`: a config's plan against one device, its table and its certificate."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console
from runs import DIGITS

from jaxdist.proofs.certificate import Proof
from jaxdist.proofs.numbers import scenes
from jaxdist.proofs.report import prove

RING = {
    **DIGITS,
    "mesh": {"data": 4, "fake_devices": 4},
    "parallel": {"reduce": {"type": "ring", "bucket_bytes": 4096}},
}


class Proved(NamedTuple):
    proof: Proof
    said: str
    certificate: dict[str, Any]


def proved(folder: Path, config: dict[str, Any], **options: Any) -> Proved:
    """Prove a config, with what is printed and written."""
    path, file = folder / "config.yaml", folder / "prove.json"
    path.write_text(json.dumps({**config, "run": {"directory": str(folder / "run")}}))
    console = Console(file=io.StringIO(), width=80)
    proof = prove(path, **{"near": 0, **options}, json_file=file, console=console)
    said = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]  (StringIO)
    return Proved(proof, said, json.loads(file.read_text()))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Proved:
    return proved(tmp_path_factory.mktemp("ring"), RING)


def test_a_right_plan_is_proved_leaf_by_leaf(ring):
    """Also the norm that a step without weight logs, which was NaN under a reduction of ours."""
    assert ring.proof.verdict == "proved"
    assert not ring.proof.undecided
    rows = [line.split() for line in ring.said.splitlines() if line.startswith("layers/")]
    assert [row[:2] for row in rows] == [
        [f"layers/{layer}/{leaf}", "proved"] for layer in (0, 1) for leaf in ("bias", "kernel")
    ]
    assert all(len(line) <= 80 for line in ring.said.splitlines() if "/run" not in line)
    steps = {one.step for compared in ring.proof.numbers for one in compared.quantities}
    assert {"evaluation"} < steps


def test_the_code_asks_for_the_bytes_that_the_program_sends(ring):
    sent = ring.proof.sent
    assert sent is not None
    assert sent.asked["data"] == pytest.approx(sent.placed["data"]) != 0
    assert not sent.unasked
    assert not sent.missing


def test_the_certificate_says_what_was_shown(ring):
    found = ring.certificate
    assert (found["schema"], found["verdict"], found["mesh"]) == (1, "proved", {"data": 4})
    plans = [plan["plan"] for plan in found["numbers"]["plans"]]
    assert plans == ["as configured", "with unequal weights"]
    assert found["numbers"]["reduced"]["model"]["hidden"] == [8]
    assert found["types"]["regions"] > 0


def test_scenes_have_an_empty_shard_and_a_batch_without_weight():
    taken = scenes(8, 4, weighted=True, skips=True, seed=3)
    shards = {s.name: np.asarray(s.weights).reshape(4, 2).sum(1) for s in taken}
    assert (shards["an empty shard"] == 0).sum() == 1
    assert len({*shards["unequal weights"]}) == 4
    assert not shards["no weight"].any()
    assert np.isnan(shards["not a number"]).all()
    assert [scene.reload for scene in scenes(8, 4, weighted=False, skips=False, seed=3)] == [
        False, False, True,
    ]  # fmt: skip
