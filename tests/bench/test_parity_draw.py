"""Draws: a function of the seed, of everything there is; and what goes wrong is told with it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import jax
import pytest
from typer.testing import CliRunner

from benchmarks.draws import compare as parity_draws
from benchmarks.draws import run as parity_draw_run
from benchmarks.draws.draw import draw, seeds_of
from benchmarks.draws.model import MODELS, OPTIMIZERS, model_key
from benchmarks.draws.report import features_of, outcomes_from_json, outcomes_to_json
from benchmarks.draws.run import DrawOutcome, judge_draw
from benchmarks.draws.settings import SETTINGS
from benchmarks.pages.parity_draw import draw_page
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.cli import app
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.config import Document, validate
from jaxdist.cost.context import Order, Way
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, load
from jaxdist.parity.cells import ACTIVATIONS, REDUCTIONS, SCHEDULES
from jaxdist.parity.children import Ended
from jaxdist.parity.run import single_device
from jaxdist.parity.trace import Differences

DOCS = Path(__file__).parents[2] / "docs"
SEEDS = seeds_of(500, 0)


@cache
def all_drawn():
    """The draws, once for the tests that look at all, and not whenever tests are collected."""
    return [draw(seed) for seed in SEEDS]


@cache
def configs():
    return [config for drawn in all_drawn() for config in (drawn.sections, drawn.reader)]


def test_a_draw_is_a_function_of_its_seed_among_however_many():
    assert [draw(seed) for seed in SEEDS[:20]] == all_drawn()[:20]
    assert [*seeds_of(3, 7)] == [7, 8, 9]
    shared = seeds_of(3, 7, ["context", "expert"])
    assert seeds_of(2, shared[0] + 1, ["context", "expert"]) == shared[1:]
    for seed in shared:
        assert {"context", "expert"} & {*features_of(draw(seed).sections)["axes"].split(" x ")}
    assert draw(seeds_of(300, 5)[4]) == draw(seeds_of(1, 9)[0]) == all_drawn()[9]
    assert len({json.dumps(drawn.sections) for drawn in all_drawn()}) == len(all_drawn())


@pytest.mark.full
def test_every_draw_is_plain_data_that_the_schema_takes():
    for config in (*configs(), *(single_device(drawn.sections) for drawn in all_drawn())):
        assert json.loads(json.dumps(config)) == config
        validate(Document(config), ExperimentConfig)


def test_everything_is_drawn():
    found = Counter(item for config in configs() for item in features_of(config).items())
    values = {name: {value for other, value in found if other == name} for name, _ in found}
    assert values["model"] == {*MODELS, "resnet", "bert", "vit"}
    assert values["optimizer"] == {*OPTIMIZERS, "onebit_adam", "onebit_lamb"}
    for name in SETTINGS:
        assert len(values[name]) > 1, f"no draw has the setting {name}"
    assert values["devices"] == set("12345678")
    assert values["schedule"] == {"none", *SCHEDULES}
    assert values["activations"] == {"none", *ACTIVATIONS}
    assert values["gathers of stages"] == {"none", "step", "task"}
    assert values["reduce"] == {name or "none" for name in REDUCTIONS}
    assert values["ZeRO"] == {"none", "1", "2", "3", "1, ici", "2, ici", "3, ici"}
    assert {"0", "16", "64", "2048"} <= values["whole_below"]
    assert values["remat"] == {"none", "elementwise", "dots", "full", "some"}
    axes = {"data", "stage", "tensor", "context", "expert"}
    assert {name for several in values["axes"] for name in several.split(" x ")} == {*axes, "none"}
    assert values["attention over context"] == {"none", "auto", *get_args(Way)}
    assert values["order over context"] == {"none", "auto", *get_args(Order)}
    uneven = [
        config
        for config in configs()
        if (features := features_of(config))["axes"] == "data x stage x tensor"
        and features["uneven layers"] == "yes"
    ]
    assert len(uneven) > 10
    assert {"residual_seq: tensor", "embed: data", "mlp: null", "heads: null"} <= values[
        "sharding rules"
    ]
    assert values["BatchNorm"] == {"yes", "no"}


def run(*args: object):
    return CliRunner().invoke(app, ["parity", *map(str, args)])


def outcome_of(seed: int, verdict: str = "equal", **changes) -> DrawOutcome:
    drawn, found = draw(seed), Differences(1e-7, 1e-6, 1e-5)
    given = {"differences": found, "limit": found, "checkpoint": "equal", **changes}
    return DrawOutcome(seed, verdict, **given, sections=drawn.sections, reader=drawn.reader)


@pytest.fixture
def answered(monkeypatch, tmp_path):
    """Answers that nobody computed, for the seeds from 0."""

    def answer(*found):
        monkeypatch.setattr(parity_draws, "answers", lambda function, seeds, jobs: iter(found))

    monkeypatch.chdir(tmp_path)
    return answer


def test_what_goes_wrong_is_told_with_its_config_and_the_rest_goes_on(answered, tmp_path):
    ended = Ended("the process ended (signal SIGABRT): x.cc:497] Check failed: 1 == 2")
    answered(outcome_of(0), ended, outcome_of(2, "differs"), outcome_of(3))
    found = run("--draw", 4, "--json", "d.json")
    assert found.exit_code == 1, found.output
    assert "2 equal, 0 refused, 1 differs, 1 failed" in found.output
    assert "x.cc:497] Check failed" in found.output
    for seed in (1, 2):
        assert f"jaxdist parity --draw 1 --seed {seed}\n" in found.output
        file = f"runs/parity/draw-{seed}.yaml"
        assert f"jaxdist train {file}\n" in found.output
        document, _ = load(file)
        assert document.values == draw(seed).sections
        assert Path(file).read_text() in found.output
    report = json.loads(Path("d.json").read_text())
    assert (report["count"], report["seed"]) == (4, 0)
    outcomes = outcomes_from_json(report)
    assert outcomes[0] == outcome_of(0)
    assert (outcomes[1].verdict, outcomes[1].reason) == ("failed", ended.reason)
    assert outcomes[1].sections == draw(1).sections
    assert {"schema": 1, **outcomes_to_json(outcomes, count=4, seed=0)} == report


def test_a_refusal_is_told_and_no_failure(answered):
    answered(outcome_of(0, "refused", differences=None, reason="3 heads"))
    found = run("--draw", 1)
    assert found.exit_code == 0, found.output
    assert "3 heads" in found.output
    assert "0 equal, 1 refused, 0 differs, 0 failed" in found.output


def test_resumed_it_makes_the_draws_that_are_left(answered):
    answered(outcome_of(0), outcome_of(1))
    assert run("--draw", 2, "--json", "d.json").exit_code == 0
    answered(outcome_of(2))
    found = run("--draw", 3, "--json", "d.json", "--resume")
    assert found.exit_code == 0, found.output
    assert "2 are in d.json" in found.output
    assert "3 equal, 0 refused" in found.output
    assert [row["seed"] for row in json.loads(Path("d.json").read_text())["draws"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda report: report.pop("draws"),
            r"cannot continue d\.json: KeyError\('draws'\); choose",
        ),
        (lambda report: report["draws"][0]["sections"].update(seed=1000), "seed 0 draws another"),
    ],
)
def test_a_report_of_other_draws_is_not_gone_on_with(change, said, answered):
    answered(outcome_of(0))
    run("--draw", 1, "--json", "d.json")
    report = json.loads(Path("d.json").read_text())
    change(report)
    Path("d.json").write_text(json.dumps(report))
    refused = run("--draw", 1, "--json", "d.json", "--resume")
    assert isinstance(refused.exception, ConfigError)
    assert re.search(said, str(refused.exception))
    assert json.loads(Path("d.json").read_text()) == report


def test_resume_without_a_file_is_told():
    refused = run("--draw", 1, "--resume")
    assert "--resume continues the file of --json" in str(refused.exception)


def test_axes_of_draws_are_those_of_a_mesh():
    wrong = run("--draw", 1, "--axis", "contxt").exception
    assert "--axis contxt names no mesh axis: did you mean 'context'" in str(wrong)
    assert "--axis selects among random configs: add --draw N" in str(
        run("--axis", "context").exception
    )


@pytest.mark.parametrize("args", [("c.yaml",), ("--full",)])
def test_what_has_no_effect_on_draws_is_refused(args):
    refused = run(*args, "--draw", 1)
    assert isinstance(refused.exception, ConfigError)
    assert f"{args[0].replace('c.yaml', 'CONFIG')} has no effect with --draw" in str(
        refused.exception
    )


def seed_of(*needed: tuple[str, str]) -> int:
    """Of the first draw that has all this and is quick to compile."""
    return next(
        seed
        for seed, drawn in zip(SEEDS, all_drawn(), strict=True)
        if {("model", "mlp"), *needed} <= {*features_of(drawn.sections).items()}
    )


@pytest.mark.full
def test_a_reduction_that_loses_a_part_is_found(monkeypatch, devices):
    seed = seed_of(("reduce", "ring"), ("ZeRO", "none"), ("axes", "data"))
    whole = Ring.all_reduce

    def losing(self, flat, axis, combine):
        return whole(self, flat, axis, combine) - flat

    monkeypatch.setattr(Ring, "all_reduce", losing)
    wrong = judge_draw(seed)
    assert wrong.verdict == "differs"
    assert wrong.differences is not None
    assert wrong.limit is not None
    assert wrong.differences.gradient > 100 * wrong.limit.gradient


@pytest.mark.slow
def test_shards_that_another_plan_reads_in_another_order_are_found(monkeypatch, devices):
    seed = seed_of(("ZeRO", "3"), ("axes", "data"), ("whole_below", "0"))
    right = judge_draw(seed)
    assert (right.verdict, right.checkpoint) == ("equal", "equal"), right.reason
    restore = CheckpointStore.restore_as

    def other(self, *args, **kwargs):
        found = restore(self, *args, **kwargs)
        return replace(found, state=jax.tree.map(lambda x: x[::-1] if x.ndim else x, found.state))

    monkeypatch.setattr(CheckpointStore, "restore_as", other)
    wrong = judge_draw(seed)
    assert (wrong.verdict, wrong.checkpoint) == ("differs", "differs")
    assert wrong.differences == right.differences
    assert "tensors were not loaded as saved: params/layers" in wrong.reason


@pytest.mark.slow
def test_a_crash_that_is_told_as_the_users_is_no_refusal(monkeypatch, devices):
    def broken(sections, traced):
        if "fake_devices" in sections["mesh"] and sections["mesh"]["fake_devices"] > 1:
            try:
                raise ValueError("odd sharding")
            except ValueError as error:
                raise ConfigError("your model raised ValueError") from error

    monkeypatch.setattr(parity_draw_run, "built", broken)
    seed = seed_of(("axes", "data"))
    assert judge_draw(seed).reason == "ValueError: odd sharding"
    assert judge_draw(seed).verdict == "failed"


@pytest.mark.full
def test_an_error_that_is_not_ours_is_a_failure(monkeypatch):
    def broken(drawn):
        raise ZeroDivisionError("division by zero\nmore")

    monkeypatch.setattr(parity_draw_run, "_compare", broken)
    found = judge_draw(0)
    assert (found.verdict, found.good) == ("failed", False)
    assert found.reason == "ZeroDivisionError: division by zero"
    assert found.sections == draw(0).sections


def test_a_page_counts_what_was_drawn():
    outcomes = [outcome_of(0), outcome_of(1, "differs"), outcome_of(2, "refused", reason="odd")]
    page = draw_page(outcomes_to_json(outcomes, count=3, seed=0))
    assert "- 1 equal, 1 refused, 1 differs, 0 failed" in page
    assert "- seed 2: odd" in page
    assert "jaxdist parity --json docs/parity_draw.json --draw 3 --seed 0`" in page
    models = Counter(model_key(outcome.sections["model"]) for outcome in outcomes)
    for model, count in models.items():
        assert f"| model | {model} | {count} |" in page


def test_the_published_page_is_that_of_its_figures():
    report = json.loads((DOCS / "parity_draw.json").read_text())
    assert (DOCS / "parity_draw.md").read_text() == draw_page(report), "run what its header says"
    outcomes = outcomes_from_json(report)
    assert len(outcomes) == report["count"] == 500
    assert all(outcome.good for outcome in outcomes)
    assert sum(outcome.verdict == outcome.checkpoint == "equal" for outcome in outcomes) > 480


def test_a_report_has_what_the_second_config_does_not_share():
    """Of seed 10, the second config computes the loss in other chunks than the first."""
    drawn = draw(10)
    assert drawn.sections["loss"] != drawn.reader["loss"]
    without = {name: section for name, section in drawn.reader.items() if name != "loss"}
    for reader in (drawn.reader, without):
        given = DrawOutcome(10, "equal", sections=drawn.sections, reader=reader)
        (read,) = outcomes_from_json(outcomes_to_json([given], count=1, seed=10))
        assert read.reader == reader
