"""Every two settings of a plan meet in a combination that equals one device; and the command."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from test_meshes import CELLS as WITHOUT
from test_meshes import REDUCTIONS, ZERO
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.launch import parity as command
from jaxdist.launch import parity_run
from jaxdist.launch.parity_cells import MESHES, Cell, cover, facts_of, pairs, valid_cells
from jaxdist.launch.parity_report import from_json, line, markdown, to_json
from jaxdist.launch.parity_run import (
    BUILT_IN,
    Differences,
    Result,
    compare,
    differences,
    limit_of,
    open_subject,
)
from jaxdist.parallel.validity import violations

DOCS = Path(__file__).parents[2] / "docs"


def cell_of(name, mesh, reduce, zero, changes) -> Cell:
    """A row of test_meshes as a combination."""
    return Cell(
        mesh=next(shown for shown, sizes in MESHES.items() if sizes == mesh),
        stage=zero.get("stage", 0),
        scope=zero.get("scope", "all"),
        reduce=reduce and reduce["type"],
        microbatches=changes.get("microbatches", 1),
        remat="full" if "remat" in name else "none",
    )


ELSEWHERE = [
    *(cell_of(name, mesh, None, {}, {}) for name, mesh in WITHOUT if mesh in MESHES.values()),
    *(cell_of(name, mesh, reduce, {}, changes) for name, mesh, reduce, changes in REDUCTIONS),
    *(cell_of(*row) for row in ZERO),
]
VALID = valid_cells()
CELLS = cover(cover(VALID), given=ELSEWHERE)


@pytest.fixture(scope="module")
def subject(devices):
    return open_subject(BUILT_IN)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_combination_equals_one_device(cell, subject):
    result = compare(subject, cell)
    assert result.verdict == "equal", line(result)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in VALID if cell not in CELLS], ids=str)
def test_every_other_combination_equals_one_device(cell, subject):
    test_a_combination_equals_one_device(cell, subject)


def test_every_two_settings_meet_in_few_combinations():
    wanted = set().union(*map(pairs, VALID))
    for cells, given in ((CELLS, ELSEWHERE), (cover(VALID), [])):
        assert set().union(*map(pairs, cells), *map(pairs, given)) == wanted
        assert set(cells) <= set(VALID)
        assert len(set(cells)) == len(cells)
    assert len(CELLS) <= 25
    assert len(cover(VALID)) < len(VALID) / 15


def test_the_combinations_are_those_that_the_table_allows():
    assert len(VALID) == len(set(VALID)) > 600
    assert not any(violations(facts_of(cell)) for cell in VALID)
    assert set(ELSEWHERE) <= set(VALID)
    refused = Cell("data 4, tensor 2", 2, "all", "hierarchical", 1, "none")
    assert violations(facts_of(refused))
    assert refused not in VALID


def test_another_computation_is_not_taken_for_the_same(subject, monkeypatch):
    """Narrow sums show in the gradient; what only the optimizer does, in the update alone."""
    cell = Cell("data 8", 1, "all", "ring", 1, "none")
    model = {**BUILT_IN["model"], "compute_dtype": "bfloat16"}
    narrow = dataclasses.replace(subject, sections={**BUILT_IN, "model": model})
    result = compare(narrow, cell)
    assert result.verdict == "differs"
    assert result.differences.gradient > 100 * result.limit.gradient
    assert "DIFFERS: loss" in line(result)
    monkeypatch.setattr(parity_run, "OPTIM", {**parity_run.OPTIM, "weight_decay": 0.11})
    result = compare(subject, cell)
    assert result.verdict == "differs"
    assert result.differences.gradient <= result.limit.gradient
    assert line(result).splitlines()[1].startswith("    DIFFERS: update")


def test_what_is_not_a_number_is_no_equality(subject):
    reference = subject.reference
    *_, name = reference.updates
    lost = dataclasses.replace(
        reference, updates={**reference.updates, name: reference.updates[name] * math.nan}
    )
    limit = limit_of(CELLS[0], 512)
    assert differences(reference, reference) == Differences(0, 0, 0)
    assert not differences(lost, reference).within(limit)


MINE = """
import jax.numpy as jnp
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs, layer):
        self.linear = nnx.Linear(64, 10, rngs=rngs)
        dropout, norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.other = dropout if layer == "dropout" else norm
    def __call__(self, x):
        return self.linear(self.other(x.reshape(x.shape[0], -1)))

def loss(module, batch):
    import optax
    logits = module(batch["image"] / 255.0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
"""


def run(*args: object):
    return CliRunner().invoke(app, ["parity", *map(str, args)])


@pytest.fixture
def two_cells(monkeypatch):
    """A split batch that is one computation, and one in parts."""
    chosen = [
        Cell("data 8", 1, "all", None, 1, "none"),
        Cell("data 2 dcn x 4 ici", 2, "ici", "ring", 2, "none"),
    ]
    monkeypatch.setattr(command, "cover", lambda cells: [c for c in cells if c in chosen])
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [("dropout", "random layers draw anew for each part of the batch"),
     ("norm", "batch statistics are those of a part of the batch")],
)  # fmt: skip
def test_an_inexact_combination_of_my_model_is_skipped_with_the_reason(
    layer, reason, two_cells, tmp_path, monkeypatch, devices
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"mine_{layer}.py").write_text(MINE)
    whole = {"linear/kernel": [None, None], "linear/bias": [None]}
    whole |= {"other/*": [None]} if layer == "norm" else {}
    sections = {
        "model": {"type": "import", "path": f"mine_{layer}:Model", "args": {"layer": layer}},
        "loss": {"type": "import", "path": f"mine_{layer}:loss"},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"steps": 9, "batch_size": 16, "microbatches": 4},
        "sharding": {"params": whole},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    found = run(tmp_path / "c.yaml", "--json", tmp_path / "c.json")
    assert found.exit_code == 0, found.output
    assert reason in found.output
    assert "1 equal, 0 differ, 1 skipped" in found.output
    assert max(map(len, found.output.splitlines()[1:])) <= 80
    report = json.loads((tmp_path / "c.json").read_text())
    first, second = from_json(report)
    assert (first.verdict, second.verdict, second.reason) == ("equal", "skipped", reason)
    assert to_json(report["subject"], [first, second], full=False) == report


def test_a_difference_is_exit_code_1_and_a_plan_that_does_not_fit_is_skipped(
    tmp_path, monkeypatch, devices
):
    odd = Cell("data 2, tensor 4", 0, "all", None, 1, "none")
    monkeypatch.setattr(command, "cover", lambda cells: [c for c in cells if c == odd])
    sections = {
        "model": {"type": "mlp", "hidden": [18]},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"epochs": 1, "batch_size": 16},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    skipped = run(tmp_path / "c.yaml")
    assert skipped.exit_code == 0, skipped.output
    assert "dim 'mlp' of length 18 does not divide over mesh axis 'tensor'" in " ".join(
        skipped.output.split()
    )
    monkeypatch.setattr(parity_run, "limit_of", lambda cell, terms: Differences(0, 0, 0))
    differs = run(tmp_path / "c.yaml", "model.hidden=[20]")
    assert differs.exit_code == 1, differs.output
    assert "DIFFERS" in differs.output
    assert "0 equal, 1 differ, 0 skipped" in differs.output


def test_a_file_that_cannot_be_written_is_told(tmp_path, monkeypatch, subject):
    monkeypatch.setattr(command, "open_subject", lambda sections: subject)
    monkeypatch.setattr(command, "cover", lambda cells: [])
    refused = run("--json", tmp_path / "none" / "c.json")
    assert f"cannot write the comparison to {tmp_path}/none/c.json" in str(refused.exception)


def test_the_published_page_is_that_of_its_figures():
    report = json.loads((DOCS / "parity.json").read_text())
    assert (DOCS / "parity.md").read_text() == markdown(report), "run the command in its header"
    results = from_json(report)
    assert all(result.verdict == "equal" for result in results)
    cells = {result.cell for result in results}
    assert cells <= set(VALID)
    assert set().union(*map(pairs, cells)) == set().union(*map(pairs, VALID))


def test_a_page_shows_what_went_wrong():
    cell = Cell("data 8", 0, "all", "ring", 1, "none")
    result = Result(cell, "differs", Differences(0, 1, 1), limit_of(cell, 512))
    page = markdown(to_json("x", [result], full=False))
    assert "0 of 1 combinations equal one device" in page
    assert "**differs**" in page
