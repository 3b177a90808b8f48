"""`jaxdist prove`: a config's plan against one device, its table and its certificate."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from rich.console import Console
from runs import DIGITS

from jaxdist.config import Document, validate, value_at
from jaxdist.errors import RunError
from jaxdist.experiment import ExperimentConfig, build, load
from jaxdist.parity.cells import possible_cells
from jaxdist.parity.run import with_combination
from jaxdist.proofs.certificate import Kept, Proof, current, identity_of, path_of, write_certificate
from jaxdist.proofs.neighbours import PATHS, neighbours
from jaxdist.proofs.numbers import RESUMED, Compared, scenes
from jaxdist.proofs.reduce import reduced
from jaxdist.proofs.report import prove
from jaxdist.proofs.types.check import Finding, Typed
from jaxdist.run.directory import RunDirectory
from jaxdist.run.report.proof import proof_lines, read_proof

CONFIGS = Path(__file__).parents[2] / "configs"
RING = {
    **DIGITS,
    "mesh": {"data": 4, "fake_devices": 4},
    "parallel": {"reduce": {"type": "ring", "bucket_bytes": 4096}},
}


class Proved(NamedTuple):
    folder: Path
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
    return Proved(folder, proof, said, json.loads(file.read_text()))


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
    table = [line for line in ring.said.splitlines() if str(ring.folder) not in line]  # any length
    assert max(map(len, table)) <= 80
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
    shards = {name: np.asarray(weights).reshape(4, 2).sum(1) for name, weights in taken.items()}
    assert (shards["an empty shard"] == 0).sum() == 1
    assert len({*shards["unequal weights"]}) == 4
    assert not shards["no weight"].any()
    assert np.isnan(shards["not a number"]).all()
    assert [*scenes(8, 4, weighted=False, skips=False, seed=3)][2] == RESUMED in taken


def test_a_run_keeps_the_certificate_with_which_it_began(ring, tmp_path):
    config = ring.folder / "config.yaml"
    kept = current(config, [], devices=4)
    assert isinstance(kept, Kept)
    kept.start(SimpleNamespace(directory=tmp_path))  # pyright: ignore[reportArgumentType]
    found = read_proof(RunDirectory(tmp_path))
    assert found is not None
    told = [*proof_lines(found)]
    assert told[0] == f"proof  proved, config {found['digest'][:12]}, seed 0"
    assert told[-1].startswith("       bytes over data:")
    assert any("values equal one device" in line for line in told)
    assert read_proof(RunDirectory(tmp_path / "none")) is None


def changed(certificate: dict[str, Any], **values: Any) -> str:
    return json.dumps({**certificate, **values})


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "another config": (lambda c: changed(c, digest="0"), "certificate for another config"),
    "another mesh": (lambda c: changed(c, mesh={"data": 2}), "certificate for another mesh"),
    "another version": (
        lambda c: changed(c, versions={**c["versions"], "jax": "0.9.0"}),
        "certificate for other package versions",
    ),
    "a wrong plan": (lambda c: changed(c, verdict="wrong"), "says 'wrong', not 'proved'"),
    "undecided": (lambda c: changed(c, verdict="undecided"), "says 'undecided', not 'proved'"),
    "no JSON": (lambda c: "{", "cannot read"),
    "a list": (lambda c: "[]", "certificate for another config and another mesh and"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_training_is_refused_without_a_current_certificate(name, tmp_path):
    text, message = REFUSED[name]
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({**RING, "run": {"directory": str(tmp_path / "run")}}))
    document, config = load(path)
    with pytest.raises(RunError, match=f"there is no certificate .* run `jaxdist prove {path}`"):
        current(path, [], devices=4)
    whole = {"verdict": "proved", **identity_of(config, 4)}
    write_certificate(path_of(config, document), whole)
    assert current(path, [], devices=4)
    path_of(config, document).write_text(text(whole))
    with pytest.raises(RunError, match=f"--proved: .*{message}.*jaxdist prove {path}"):
        current(path, [], devices=4)


def test_a_certificate_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"the certificate to .*prove\.json.*run\.directory=PATH"):
        write_certificate(tmp_path / "file" / "prove.json", {})


def test_a_bucket_of_automatic_size_and_two_networks_stay_so():
    mesh = {"data": {"dcn": 2, "ici": 2}, "fake_devices": 4}
    given = {**RING, "mesh": mesh, "parallel": {"reduce": {"type": "xla"}}}
    config = validate(Document(given), ExperimentConfig)
    sections, _ = reduced(build(config, devices=jax.devices()[:4]))
    assert sections["mesh"] == mesh
    assert sections["parallel"]["reduce"]["bucket_bytes"] == "auto"


def test_messages_are_whole_when_numbers_are_compared():
    """A single device must then skip the steps that a compressed exchange skips."""
    given = {**RING, "parallel": {"compression": {"type": "topk"}}}
    config = validate(Document(given), ExperimentConfig)
    sections, notes = reduced(build(config, devices=jax.devices()[:4]))
    assert sections["parallel"]["compression"] == {"type": "whole", "axis": "data"}
    assert sections["optim"]["skip_nonfinite"]
    assert any("what a codec loses" in note for note in notes)


def test_the_mesh_of_a_certificate_has_both_networks(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({**DIGITS, "mesh": {"data": {"dcn": 2, "ici": 4}}}))
    assert identity_of(load(path)[1], 8)["mesh"] == {"data": {"dcn": 2, "ici": 4}}


SMALL: dict[str, tuple[list[str], dict[str, Any]]] = {
    "heads, ties and an odd vocabulary": (
        [str(CONFIGS / "gpt/quickstart.yaml")],
        {"embed": 16, "heads": 4, "kv_heads": 2, "vocab_multiple": 8, "layers": 2},
    ),
    "a stack of 80 layers": (
        [str(CONFIGS / "gpt/70b.yaml")],
        {"embed": 64, "heads": 16, "kv_heads": 8, "mlp": 8, "layers": 2, "tied_head": False},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_reduced_size_keeps_what_divides(name):
    (path, *overrides), expected = SMALL[name]
    document, config = load(path, [*overrides, "mesh.fake_devices=8"])
    sections, _ = reduced(build(config, document, devices=jax.devices()))
    model = {"compute_dtype": "float32", **sections["model"]}
    assert {key: model[key] for key in expected} == expected
    vocab = 257 if "quickstart" in path else 32000
    assert sections["data"]["vocab_size"] % 8 == vocab % 8
    validate(Document(sections), ExperimentConfig)


def test_neighbours_change_three_settings():
    path, overrides = CONFIGS / "gpt/quickstart.yaml", ["mesh.fake_devices=8"]
    document, config = load(path, overrides)
    sections, _ = reduced(build(config, document, devices=jax.devices()))
    found = list(itertools.islice(neighbours(sections, seed=1), 5))
    for changed, other in found:
        differ = [path for path in PATHS if value_at(sections, path) != value_at(other, path)]
        assert len(differ) == 3, changed
    plans = [with_combination(sections, cell) for cell in list(possible_cells())[::97]]
    values = {str(path): {str(value_at(plan, path)) for plan in plans} for path in PATHS}
    assert all(len(found) > 1 for found in values.values()), values
    assert found == list(itertools.islice(neighbours(sections, seed=1), 5))
    assert found != list(itertools.islice(neighbours(sections, seed=2), 5))


def test_a_finding_that_no_number_confirms_leaves_the_plan_undecided(ring):
    """Without numbers it stands."""
    leaf = "state/params/layers/1/bias"
    typed = Typed((Finding("data", "sums twice", "a.py:1", (leaf,)),), outputs=(leaf,))
    doubted = replace(ring.proof, types=typed)
    assert doubted.verdict == "undecided"
    assert "doubt    types, which no number confirms: a.py:1: sums twice" in str(doubted)
    alone = replace(doubted, numbers=(*doubted.numbers, Compared("a plan", undecided="no reason")))
    assert alone.verdict == replace(doubted, numbers=(), near=()).verdict == "wrong"
    assert "WRONG    types: a.py:1" in str(alone)
