"""Every two settings of a plan meet in a combination that equals one device; and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from mesh_rows import CELLS as WITHOUT
from mesh_rows import FULL_CELLS, MORE_ZERO, REDUCTIONS, SLOW_ZERO, ZERO
from typer.testing import CliRunner

from benchmarks.pages.parity import parity_page
from jaxdist.cli import app
from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError, RunError
from jaxdist.parallel.plan import ParallelConfig
from jaxdist.parity import compare as command
from jaxdist.parity import run as parity_run
from jaxdist.parity import trace as parity_trace
from jaxdist.parity.cells import (
    MESHES,
    REMATS,
    SCHEDULES,
    Combination,
    combination_facts,
    cover,
    pairs,
    placement_kind,
    possible_cells,
    valid_cells,
)
from jaxdist.parity.report import combination_line, from_json, results_to_json
from jaxdist.parity.run import (
    BUILT_IN,
    ParityResult,
    compare_combination,
    open_reference,
    with_combination,
)
from jaxdist.parity.trace import Differences, limit_of, trace_differences
from jaxdist.validity.table import violations

DOCS = Path(__file__).parents[2] / "docs"


def cell_of(name, mesh, reduce, zero, changes) -> Combination:
    """A row of test_meshes as a combination."""
    return Combination(
        mesh=next(shown for shown, sizes in MESHES.items() if sizes == mesh),
        stage=zero.get("stage", 0),
        scope=zero.get("scope", "all"),
        reduce=reduce and reduce["type"],
        microbatches=changes.get("microbatches", 1),
        remat="full" if "remat" in name else "none",
    )


SPLIT = [
    Combination("data 2, tensor 4", 0, "all", None, 1, "none", "split"),
    Combination("data 2, tensor 4", 0, "all", "ring", 1, "dots", "split"),
    Combination("data 4, tensor 2", 3, "all", "xla", 1, "full", "split"),
]
"""Rows of `test_a_split_sequence_equals_one_device` in test_tensor."""
ELSEWHERE_QUICK = [
    *(cell_of(name, mesh, None, {}, {}) for name, mesh in WITHOUT if mesh in MESHES.values()),
    *(cell_of(name, mesh, reduce, {}, changes) for name, mesh, reduce, changes in REDUCTIONS),
    *(cell_of(*row) for row in ZERO),
    *SPLIT,
]
ELSEWHERE = [
    *ELSEWHERE_QUICK,
    *(cell_of(name, mesh, None, {}, {}) for name, mesh in FULL_CELLS),
    *(cell_of(*row) for row in (*MORE_ZERO, *SLOW_ZERO)),
]
POSSIBLE = [*possible_cells()]
VALID = valid_cells()
PIPELINES = [cell for cell in VALID if cell.schedule]
PLAIN = [cell for cell in VALID if not cell.schedule]


def placed(cell: Combination) -> dict[str, object]:
    """What a pipeline is made of, of its schedule whether layers must move to their stages."""
    return {
        "mesh": cell.mesh,
        "zero": cell.stage,
        "activations": cell.activations,
        "moves": cell.schedule and placement_kind(cell.schedule) != "one chunk a stage",
    }


def essentials(cell: Combination) -> frozenset[object]:
    """What these tests cover: two settings; of pipelines two of `placed`, and each schedule.

    How gradients are reduced and what is computed again for them meet in the slow sweep alone: one
    follows the other, and each of both meets all else here.
    """
    if cell.schedule is None:
        return met_here(cell)
    return frozenset({cell.schedule, *itertools.combinations(placed(cell).items(), 2)})


def met_here(cell: Combination) -> frozenset[object]:
    return frozenset(two for two in pairs(cell) if {name for name, _ in two} != {"reduce", "remat"})


def each(cell: Combination) -> frozenset[object]:
    """What the quick tests cover: each setting once, of pipelines what changes their programs most.

    That each schedule gives the gradients of one device has quick tests beside the executor.
    """
    if cell.schedule is None:
        return frozenset(dataclasses.asdict(cell).items())
    settings = {**placed(cell), "mesh": None, "zero": cell.stage == 3}
    return frozenset(settings.items())


def each_of_pipelines(cell: Combination) -> frozenset[object]:
    """What the full tests cover besides: each schedule, and each of `placed`."""
    return frozenset({cell.schedule, *placed(cell).items()}) if cell.schedule else frozenset()


QUICK = cover(POSSIBLE, ELSEWHERE_QUICK, each)
FULL = cover(POSSIBLE, QUICK, each_of_pipelines)
PAIRED = cover(POSSIBLE, [*ELSEWHERE, *QUICK, *FULL], essentials)
"""Beside these rows on demand, `jaxdist parity` compares every two settings; docs/parity.md."""
CELLS = [*QUICK, *FULL, *PAIRED]


@pytest.fixture(scope="module")
def subject(devices):
    return open_reference(BUILT_IN)


@pytest.mark.parametrize(
    "cell",
    [
        *QUICK,
        *(pytest.param(cell, marks=pytest.mark.full) for cell in FULL),
        *(pytest.param(cell, marks=pytest.mark.slow) for cell in PAIRED),
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_a_combination_equals_one_device(cell, subject):
    result = compare_combination(subject, cell)
    assert result.verdict == "equal", combination_line(result)


@pytest.mark.slow
def test_what_runs_beside_a_loop_does_not_meet_its_collectives(subject):
    """With one channel for all, the process nearly always ended here."""
    cell = Combination("data 8", 3, "all", "double_tree", 1, "elementwise")
    test_a_combination_equals_one_device(cell, subject)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in VALID if cell not in CELLS], ids=str)
def test_every_other_combination_equals_one_device(cell, subject):
    test_a_combination_equals_one_device(cell, subject)


@pytest.mark.full
def test_every_two_settings_meet_in_few_combinations():
    wanted = set().union(*map(pairs, POSSIBLE))
    chosen = cover(POSSIBLE)
    for cells in (chosen, VALID):
        assert set().union(*map(pairs, cells)) == wanted
        assert set(cells) <= set(POSSIBLE)
    assert len(set(chosen)) == len(chosen) < len(VALID) / 10
    met = {(cell.mesh, cell.schedule) for cell in chosen if cell.schedule}
    staged = [mesh for mesh in MESHES if "stage" in mesh]
    assert met == set(itertools.product(staged, SCHEDULES))


def test_what_is_tested_has_every_two_settings_outside_of_pipelines():
    met = set().union(*map(pairs, CELLS), *map(pairs, ELSEWHERE))
    assert set().union(*map(met_here, PLAIN)) <= met
    assert set(CELLS) <= set(POSSIBLE)
    assert len(set(CELLS)) == len(CELLS)
    assert len(PAIRED) <= 30


def test_what_is_tested_has_every_schedule_and_two_settings_of_pipelines():
    def two(cells):
        found = (itertools.combinations(placed(cell).items(), 2) for cell in cells if cell.schedule)
        return set().union(*found)

    assert {cell.schedule for cell in (*QUICK, *FULL)} == {None, *SCHEDULES}
    assert two(CELLS) == two(PIPELINES)
    assert len(two(PIPELINES)) > 30


def test_the_quick_tests_have_every_setting():
    met = set().union(*map(each, QUICK), *map(each, ELSEWHERE))
    assert set().union(*map(each, POSSIBLE)) <= met
    assert len(QUICK) < 20


@pytest.mark.full
def test_the_combinations_are_those_that_the_table_allows():
    assert not any(violations(combination_facts(cell)) for cell in POSSIBLE)
    assert set(ELSEWHERE) <= set(POSSIBLE)
    assert len(VALID) == len(set(VALID)) > 900
    for refused in (
        Combination("data 4, tensor 2", 2, "all", "hierarchical", 1, "none"),
        Combination("data 4, stage 2", 3, "all", "ring", 4, "none", "whole", "1f1b", "stash"),
    ):
        assert violations(combination_facts(refused))
        assert refused not in POSSIBLE


def test_schedules_meet_every_mesh_activation_and_zero_stage():
    plain = {
        (cell.mesh, cell.stage, cell.schedule, cell.activations)
        for cell in PIPELINES
        if cell.stage < 3 and (cell.reduce, cell.remat, cell.sequence) == (None, "none", "whole")
    }
    places = {(cell.mesh, cell.stage) for cell in PIPELINES if cell.stage < 3}
    assert len(places) >= 7
    assert plain == {
        (*place, *how)
        for place in places
        for how in itertools.product(SCHEDULES, ("recompute", "stash"))
    }
    gathered = [cell for cell in PIPELINES if cell.stage == 3]  # every two of its settings
    assert {cell.schedule for cell in gathered} == set(SCHEDULES)
    assert {cell.activations for cell in gathered} == {"recompute", "stash"}
    assert len(PIPELINES) < 300


def test_layers_fill_the_chunks_of_every_schedule_with_its_microbatches():
    built = {(cell.mesh, cell.schedule): cell for cell in PIPELINES}
    assert len(built) == 4 * len(SCHEDULES)
    for cell in built.values():
        stages = MESHES[cell.mesh]["stage"]
        section = validate(Document(cell.parallel), ParallelConfig).pipeline
        schedule = section.schedule.build(stages, cell.microbatches)
        assert (schedule.name, schedule.stages) == (cell.schedule, stages)
        assert BUILT_IN["model"]["layers"] % schedule.chunks == 0
        assert (schedule.chunks > stages) == (placement_kind(cell.schedule) != "one chunk a stage")


@pytest.mark.parametrize(
    "cell",
    [
        Combination("data 2, tensor 4", 1, "all", "ring", 2, "full", "split"),
        Combination("data 2, stage 4", 1, "all", None, 8, "some", "whole", "zb_v", "stash"),
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_a_combination_is_what_is_built(cell, devices):
    section = {"sharding": {"rules": {"mlp": None}}}
    built = parity_run.experiment_of(with_combination({**BUILT_IN, **section}, cell)).config
    assert built.sharding.rules["mlp"] is None
    assert built.sharding.rules.get("residual_seq") == ("tensor" if cell.schedule is None else None)
    assert built.model.remat == REMATS[cell.remat]
    assert built.train.microbatches == cell.microbatches
    assert built.parallel.zero.stage == cell.stage
    if cell.schedule is not None:
        assert built.parallel.pipeline.schedule.type == "zb_v"
        assert built.parallel.pipeline.activations == "stash"


def test_what_xla_refuses_is_told_and_differs(subject, monkeypatch):
    def refuse(steps, initial):
        raise jax.errors.JaxRuntimeError("INTERNAL: inconsistent sharding\nmore")

    monkeypatch.setattr(parity_trace.FirstSteps, "run", refuse)
    result = compare_combination(subject, Combination("data 8", 0, "all", None, 1, "none"))
    assert (result.verdict, result.reason) == ("differs", "INTERNAL: inconsistent sharding")
    assert combination_line(result).splitlines()[0].endswith("none  differs")


def test_options_that_this_xla_has_not_are_left_out(monkeypatch, devices):
    options = parity_trace.compile_options()
    assert options["xla_backend_optimization_level"] == 0
    jax.jit(jnp.negative, compiler_options=options)(1.0)
    monkeypatch.setattr(parity_trace, "COMPILE", {"xla_no_such_option": 1, **options})
    assert parity_trace.compile_options.__wrapped__() == options


@pytest.mark.slow
def test_another_computation_is_not_taken_for_the_same(subject, monkeypatch):
    """Narrow sums show in the gradient; what only the optimizer does, in the update alone."""
    cell = Combination("data 8", 1, "all", "ring", 1, "none")
    model = {**BUILT_IN["model"], "compute_dtype": "bfloat16"}
    narrow = dataclasses.replace(subject, sections={**BUILT_IN, "model": model})
    result = compare_combination(narrow, cell)
    assert result.verdict == "differs"
    assert result.differences.gradient > 100 * result.limit.gradient
    assert "DIFFERS: loss" in combination_line(result)
    monkeypatch.setattr(parity_run, "OPTIM", {**parity_run.OPTIM, "weight_decay": 0.11})
    result = compare_combination(subject, cell)
    assert result.verdict == "differs"
    assert result.differences.gradient <= result.limit.gradient
    assert combination_line(result).splitlines()[1].startswith("    DIFFERS: update")


def test_what_is_not_a_number_is_no_equality(subject):
    reference = subject.reference
    *_, name = reference.updates
    lost = dataclasses.replace(
        reference, updates={**reference.updates, name: reference.updates[name] * math.nan}
    )
    limit = limit_of(CELLS[0].cuts, 512)
    assert trace_differences(reference, reference) == Differences(0, 0, 0)
    assert not trace_differences(lost, reference).within(limit)


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
    from jaxdist import Mean
    logits, weight = module(batch["image"] / 255.0), batch["weight"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"loss": Mean((nats * weight).sum(), weight.sum())}
"""


def run(*args: object):
    return CliRunner().invoke(app, ["parity", *map(str, args)])


@pytest.fixture
def two_cells(monkeypatch):
    """A split batch that is one computation, and one in parts."""
    chosen = [
        Combination("data 8", 1, "all", None, 1, "none"),
        Combination("data 2 dcn x 4 ici", 2, "ici", "ring", 2, "none"),
    ]
    monkeypatch.setattr(command, "cover", lambda cells: [c for c in cells if c in chosen])
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [pytest.param("dropout", "random layers draw for each part of the batch separately",
                  marks=pytest.mark.slow),  # another reason on the same way
     ("norm", "batch statistics are those of a microbatch")],
)  # fmt: skip
@pytest.mark.full
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
    assert "XLA compiles at optimization level 0\n" in found.output
    assert max(map(len, found.output.splitlines()[1:])) <= 80
    report = json.loads((tmp_path / "c.json").read_text())
    first, second = from_json(report)
    assert (first.verdict, second.verdict, second.reason) == ("equal", "skipped", reason)
    settings = {"planned": 2, "full": False, "losses": report["losses"]}
    expected = results_to_json(report["subject"], [first, second], **settings)
    assert {"schema": 1, **expected} == report


@pytest.mark.full
def test_a_difference_is_exit_code_1_and_a_plan_that_does_not_fit_is_skipped(
    tmp_path, monkeypatch, devices
):
    odd = Combination("data 2, tensor 4", 0, "all", None, 1, "none")
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
    monkeypatch.setattr(parity_run, "limit_of", lambda cuts, terms: Differences(0, 0, 0))
    differs = run(tmp_path / "c.yaml", "model.hidden=[20]")
    assert differs.exit_code == 1, differs.output
    assert "DIFFERS" in differs.output
    assert "0 equal, 1 differ, 0 skipped" in differs.output


def test_what_was_found_is_left_where_a_run_is_ended(two_cells, tmp_path, monkeypatch, subject):
    def compared(subject, cell):
        if cell.stage == 2:
            raise KeyboardInterrupt
        return ParityResult(cell, "equal", Differences(0, 0, 0), limit_of(cell.cuts, 512))

    monkeypatch.setattr(command, "open_reference", lambda sections: subject)
    monkeypatch.setattr(command, "compare_combination", compared)
    assert run("--json", tmp_path / "c.json").exit_code != 0
    report = json.loads((tmp_path / "c.json").read_text())
    assert [result.cell.stage for result in from_json(report)] == [1]
    assert "1 of 1 combinations" in parity_page(report)
    assert "; 1 more were not run." in parity_page(report)


def report_of(subject, results, **changes):
    losses = subject.reference.values.values()
    settings = {"planned": 0, "full": False, "losses": losses, **changes}
    return results_to_json(command.BUILT_IN_NAME, results, **settings)


@pytest.mark.slow
def test_resumed_it_compares_what_is_left_in_as_many_processes_as_jobs(
    two_cells, tmp_path, monkeypatch, subject
):
    """What the file has is taken as it stands: the differences of 0.25 are of no run."""
    file = tmp_path / "c.json"
    first = Combination("data 8", 1, "all", None, 1, "none")
    known = ParityResult(first, "equal", Differences(0.25, 0.25, 0.25), limit_of(first.cuts, 512))
    monkeypatch.setattr(command, "open_reference", lambda sections: subject)
    file.write_text(json.dumps(report_of(subject, [known], planned=2)))
    found = run("--json", file, "--resume", "--jobs", 2)
    assert found.exit_code == 0, found.output
    assert f"1 are in {file}" in found.output.replace("\n", "")
    assert "2 equal, 0 differ, 0 skipped" in found.output
    kept, new = from_json(json.loads(file.read_text()))
    assert kept == known
    here = compare_combination(subject, new.cell)
    # The other process compiles with flags of its own: it rounds otherwise.
    assert new == dataclasses.replace(here, differences=new.differences)
    assert 0 < new.differences.gradient <= here.limit.gradient


def test_a_process_that_ends_is_told(monkeypatch, subject):
    """And no thread of the pool dies of it, which pytest would tell, nor waits for ever."""
    monkeypatch.setattr(command, "partial", lambda *_: signal.raise_signal)
    compared = command._compared(subject, [0, 0, signal.SIGKILL, *[0] * 1000], 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with pytest.raises(RunError, match=r"one of 2 processes .* fewer --jobs, and --resume"):
            list(compared)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"full": True},
            "a different command wrote: cells all there, every two settings here; choose another",
        ),
        ({"planned": 7}, "planned 7 there, 0 here"),
        ({"losses": [1, 2, 3]}, "losses [1.0, 2.0, 3.0] there, [4."),
    ],
)
def test_the_report_of_another_run_is_not_gone_on_with(
    change, said, tmp_path, monkeypatch, subject
):
    refuse_to_resume(
        json.dumps(report_of(subject, [], **change)), said, tmp_path, monkeypatch, subject
    )


@pytest.mark.parametrize(
    ("text", "said"), [("{", "JSONDecodeError"), ("{}", "KeyError('results'); choose another")]
)
def test_what_is_no_report_is_not_gone_on_with(text, said, tmp_path, monkeypatch, subject):
    refuse_to_resume(text, said, tmp_path, monkeypatch, subject)


def refuse_to_resume(text, said, tmp_path, monkeypatch, subject):
    """What is there stays as it is."""
    (tmp_path / "c.json").write_text(text)
    monkeypatch.setattr(command, "open_reference", lambda sections: subject)
    monkeypatch.setattr(command, "cover", lambda cells: [])
    refused = run("--json", tmp_path / "c.json", "--resume")
    assert isinstance(refused.exception, ConfigError)
    assert said in str(refused.exception)
    assert (tmp_path / "c.json").read_text() == text


def test_resume_without_a_file_is_told():
    refused = run("--resume")
    assert "--resume continues the file of --json" in str(refused.exception)


def test_a_file_that_cannot_be_written_is_told(tmp_path, monkeypatch, subject):
    monkeypatch.setattr(command, "open_reference", lambda sections: subject)
    monkeypatch.setattr(command, "cover", lambda cells: [])
    refused = run("--json", tmp_path / "none" / "c.json")
    assert f"cannot write the comparison to {tmp_path}/none/c.json" in str(refused.exception)


@pytest.mark.full
def test_the_published_page_is_that_of_its_figures():
    report = json.loads((DOCS / "parity.json").read_text())
    assert (DOCS / "parity.md").read_text() == parity_page(report), "run the command in its header"
    results = from_json(report)
    assert all(result.verdict == "equal" for result in results)
    assert len(results) == report["planned"]
    cells = {result.cell for result in results}
    assert cells <= set(POSSIBLE)
    assert set().union(*map(pairs, cells)) == set().union(*map(pairs, POSSIBLE))


def row_of(page: str, start: str) -> list[str]:
    """Cells of the first row of a page's tables that begins so."""
    found = next(text for text in page.splitlines() if text.startswith(f"| {start} |"))
    return [text.strip() for text in found.split("|")[1:-1]]


def test_a_page_shows_what_went_wrong():
    cell = Combination("data 8", 0, "all", "ring", 1, "none")
    result = ParityResult(cell, "differs", Differences(0, 1, 1), limit_of(cell.cuts, 512))
    page = parity_page(results_to_json("x", [result], planned=1, full=False))
    assert "0 of 1 combinations equal one device" in page
    assert "more were not run" not in page
    assert row_of(page, "data 8 | 0")[2:5] == ["", "", "**differs**"]


def test_a_page_has_schedules_and_sequences_by_mesh():
    cells = [
        Combination("data 2, stage 4", 0, "all", None, 8, "none", "whole", "zb_v", "stash"),
        Combination("data 2, stage 4", 0, "all", "ring", 8, "full", "whole", "zb_v", "stash"),
        Combination("data 2, tensor 4", 0, "all", None, 1, "none", "split"),
    ]
    results = [
        ParityResult(cell, "equal", Differences(0, gradient, 0), limit_of(cell.cuts, 512))
        for cell, gradient in zip(cells, (1e-7, 3e-7, 2e-7), strict=True)
    ]
    page = parity_page(results_to_json("x", results, planned=3, full=False))
    assert row_of(page, "zb_v | stash") == ["zb_v", "stash", "", "3.0e-07 (2)", "", ""]
    assert row_of(page, "zb_v | recompute")[2:] == [""] * 4
    assert row_of(page, "data 2, tensor 4 | ")[1:] == ["", "2.0e-07 (1)"]
    assert row_of(page, "over devices, in matmuls, over the sequence")[1] == "8e-06"


def test_a_reason_is_told_once_and_then_by_its_number():
    first, second = (Combination(mesh, 0, "all", None, 1, "none") for mesh in ("data 8", "stage 4"))
    told: dict[str, int] = {}
    lines = [
        combination_line(ParityResult(cell, "skipped", reason=reason), told)
        for cell, reason in ((first, "3 heads"), (second, "odd"), (second, "3 heads"))
    ]
    assert [text.count("\n") for text in lines] == [1, 1, 0]
    assert lines[0].endswith("skipped (1)\n    (1) 3 heads")
    assert lines[1].endswith("skipped (2)\n    (2) odd")
    assert lines[2].endswith("skipped (1)")
    refused = [
        combination_line(ParityResult(first, "differs", reason="INTERNAL"), told) for _ in range(2)
    ]
    assert all("INTERNAL" in text for text in refused)


def test_every_line_of_a_run_fits_80_columns():
    for cell in POSSIBLE:
        text = combination_line(ParityResult(cell, "equal", Differences(1e-7, 1e-6, 1e-5)))
        assert max(map(len, text.splitlines())) <= 80
        assert (f"{cell.schedule}, {cell.activations}" in text) == (cell.schedule is not None)
        assert ("sequence split" in text) == (cell.sequence == "split")
