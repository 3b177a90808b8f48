"""Runs on a device that flips a bit: from the command line to the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from flips import Flip, flipping
from runs import DIGITS, Jaxdist, checkpoint, metrics, steps

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.metrics.goodput import joined_lives
from jaxdist.metrics.writer import read_metrics

MESH = {"data": 8}
CHECK = {"every": 4, "on_difference": "restore"}
TRAIN = {**DIGITS["train"], "check_replicas": CHECK}


def write(command: Jaxdist, **check: Any) -> None:
    command.config(DIGITS, mesh=MESH, train={"check_replicas": {**CHECK, **check}})


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Path:
    """A run whose devices are right."""
    command = Jaxdist(tmp_path_factory.mktemp("clean"), compiled)
    write(command)
    done = command.here("train", "config.yaml")
    assert (done.code, done.err) == (0, ""), done
    assert "replicas are compared every 4 steps: 100.0% of the 0.0 MB" in done.out
    return command.run


def without_differences(run: Path) -> list[dict[str, Any]]:
    return [record for record in metrics(run) if record["split"] != "replicas"]


def assert_same_bits(run: Path, reference: Path) -> None:
    assert without_differences(run) == metrics(reference)
    assert steps(run) == steps(reference)
    for step in steps(run):
        found, expected = checkpoint(run, step), checkpoint(reference, step)
        assert {k: v.tobytes() for k, v in found.items()} == {
            k: v.tobytes() for k, v in expected.items()
        }


def test_a_flipped_bit_is_found_and_the_run_goes_on_to_the_same_bits(jaxdist, clean):
    write(jaxdist)
    with flipping(Flip([13])) as flip:
        done = jaxdist.here("train", "config.yaml")
    assert (done.code, done.err, flip.flipped) == (0, "", 1), done
    line = next(
        line
        for line in done.out.splitlines()
        if line.startswith("going back: replicas differ at step 16")
    )
    assert "device 5 (process 0 on " in line, done.out
    assert "params/" in line, done.out
    assert "resume from step 8 of 24" in done.out
    assert_same_bits(jaxdist.run, clean)
    (told,) = [record for record in metrics(jaxdist.run) if record["split"] == "replicas"]
    assert (told["step"], told["differing_devices"], told["device"]) == (16, 1, 5)
    found = joined_lives(read_metrics(jaxdist.run))
    assert found is not None
    assert [(life.first_step, life.last_step) for life in found.lives] == [(0, 16), (8, 24)]
    assert found.lost_steps == 8


@pytest.mark.full
def test_it_stops_and_what_is_saved_is_from_before(jaxdist, clean):
    write(jaxdist, on_difference="stop")
    with flipping(Flip([5])):
        done = jaxdist.here("train", "config.yaml")
    assert done.code == 3
    assert "replicas differ at step 8: params/" in done.message
    assert (
        "from step 0, since there is no checkpoint; remove a device that is named more than once"
        in done.message
    )
    assert steps(jaxdist.run) == []
    resumed = jaxdist.here("train", "config.yaml", "--resume")
    assert (resumed.code, resumed.err) == (0, ""), resumed
    assert_same_bits(jaxdist.run, clean)


@pytest.mark.full
def test_a_device_that_flips_again_ends_the_run_and_is_named_each_time(jaxdist):
    write(jaxdist, max_restores=2)
    with flipping(Flip(Again([9]))):
        done = jaxdist.here("train", "config.yaml")
    assert done.code == 3
    assert "replicas differ at step 12: params/" in done.message
    assert "the run was already restored 2 times" in done.message
    told = [record for record in metrics(jaxdist.run) if record["split"] == "replicas"]
    assert [(record["step"], record["device"]) for record in told] == 3 * [(12, 5)]
    assert steps(jaxdist.run) == [8]


class Again(list[int]):
    """Steps that never pass."""

    def remove(self, value: int) -> None:
        pass


def test_what_is_evaluated_has_been_compared(jaxdist):
    """Before its own turn came."""
    write(jaxdist, every=1000, on_difference="stop")
    with flipping(Flip([6])):
        done = jaxdist.here("train", "config.yaml")
    assert "replicas differ at step 8" in done.message
    assert [record["split"] for record in metrics(jaxdist.run)] == [*8 * ["train"], "replicas"]


HIGHEST_EXPONENT_BIT = 2 * 32 + 30
"""Of the third element."""


@pytest.mark.full
def test_a_bit_that_makes_the_loss_infinite_is_recomputed_too(jaxdist, clean):
    write(jaxdist)
    with flipping(Flip([13], HIGHEST_EXPONENT_BIT, leaf=0)):
        done = jaxdist.here("train", "config.yaml")
    assert (done.code, done.err) == (0, ""), done
    assert any(
        line.startswith("going back: loss is ") and "gradient norm inf" in line
        for line in done.out.splitlines()
    )
    assert_same_bits(jaxdist.run, clean)


def test_a_run_that_diverges_by_itself_goes_back_once(jaxdist):
    write(jaxdist)
    done = jaxdist.here("train", "config.yaml", "optim.learning_rate=1e38")
    assert done.code == 3
    assert done.out.count("going back: loss is") == 1
    assert "the run was already restored once; nothing was saved. Lower optim" in done.message


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"mesh": {"data": 1}},
            "train.check_replicas has no effect: no part of the state has copies",
        ),
        (
            {"mesh": MESH, "parallel": {"zero": {"stage": 1}}},
            "train.check_replicas.every 4 misses differences with parallel.zero.stage 1: each step",
        ),
    ],
)
def test_what_cannot_be_found_is_said(sections, said):
    config = validate(Document({**DIGITS, **sections, "train": TRAIN}), ExperimentConfig)
    found = build(config, devices=jax.devices()[: sections["mesh"]["data"]])
    assert [notice for notice in found.notices if said in notice], found.notices


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({"train": {**TRAIN, "check_replicas": {"every": 4, "max_restores": 2}}}, "no effect with"),
        (
            {"strategy": {"type": "parameter_server", "workers": 2}, "train": TRAIN},
            "strategy.type parameter_server: this setting compares replicas that take every step",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(jaxdist, sections, refused):
    jaxdist.config({**DIGITS, **sections})
    done = jaxdist.here("train", "config.yaml")
    assert done.code == 2
    assert refused in done.message
    assert "train.check_replicas" in done.message
