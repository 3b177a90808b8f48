"""The predicted step of a pipeline that is compiled for TPUs, against its ticks by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jaxdist.cost.step_time import StepTime, step_time
from jaxdist.hlo.lockstep import ConditionalDecision, Lockstep, mismatch
from jaxdist.inspect import program
from jaxdist.inspect.diff import difference
from jaxdist.inspect.program import Inspection
from jaxdist.inspect.report import inspect
from jaxdist.inspect.times import parts_of

pytestmark = [pytest.mark.needs_libtpu, pytest.mark.full]

CONFIG = {
    "model": {
        "type": "gpt", "layers": 4, "embed": 256, "heads": 2, "mlp": 256, "tied_head": False,
        "compute_dtype": "bfloat16", "attention": "plain",
    },
    "data": {
        "type": "synthetic", "kind": "tokens", "window": 128, "vocab_size": 256,
        "heldout_examples": 0,
    },
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 3, "batch_size": 16, "microbatches": 4},
    "mesh": {"stage": 4, "tensor": 2},
    "parallel": {"pipeline": {"schedule": {"type": "zb_h1"}, "activations": "stash"}},
}  # fmt: skip


@dataclasses.dataclass
class Inspected:
    """One call of `inspect`: what it gave, printed, wrote, and what it timed."""

    result: Inspection
    out: str
    json: Any
    picture: str
    timed: tuple[Any, ...]

    @property
    def time(self) -> StepTime:
        assert self.result.step_time is not None
        return self.result.step_time

    @property
    def lockstep(self) -> Lockstep:
        return self.timed[3]

    def seconds(self, lockstep: Lockstep | None) -> float:
        return step_time(*self.timed[:3], lockstep).seconds


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    folder, out, timed = tmp_path_factory.mktemp("inspected"), io.StringIO(), []

    def spy(*given: Any) -> StepTime:
        timed.append(given)
        return step_time(*given)

    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "step_time", spy)
        result = inspect(
            folder / "config.yaml",
            topology="v5e:2x4",
            json_file=folder / "report.json",
            plot=folder,
            console=Console(file=out, width=80, highlight=False),
        )
    assert isinstance(result, Inspection)
    (picture,) = folder.glob("*.svg")
    written = json.loads((folder / "report.json").read_text())
    return Inspected(
        result, " ".join(out.getvalue().split()), written, picture.read_text(), timed[0]
    )


def test_the_program_runs_the_ticks(inspected: Inspected) -> None:
    assert mismatch(inspected.timed[0], inspected.lockstep) is None
    assert inspected.time.schedule == f"zb_h1, {inspected.lockstep.ticks} ticks"
    assert inspected.time.unmatched == ""
    # All that branches there is decided.
    assert inspected.time.seconds_low == inspected.time.seconds


@pytest.mark.slow
def test_the_step_is_the_sum_of_its_ticks(inspected: Inspected) -> None:
    """By hand: a step in which all stages take one choice in every tick gives its seconds."""
    whole, total = inspected.lockstep, 0.0
    of: dict[Any, float] = {}
    for tick in whole.turns(inspected.timed[0]):
        for choices in tick:
            if choices not in of:
                shape = (whole.ticks, whole.groups)
                decisions = {
                    name: ConditionalDecision(
                        whole.decisions[name].branches, np.full(shape, number)
                    )
                    for name, number in choices
                }
                of[choices] = inspected.seconds(Lockstep("one choice", decisions)) / whole.ticks
        # Each has a share of what stands outside of the loop, which so counts once.
        total += max(of[choices] for choices in tick)
    assert len({round(seconds, 12) for seconds in of.values()}) > 3
    assert {name for choices in of for name, _ in choices} < {*whole.decisions}
    assert inspected.time.seconds == pytest.approx(total, rel=1e-9)


def test_the_step_is_between_the_bounds(inspected: Inspected) -> None:
    bounds = step_time(*inspected.timed[:3])
    assert bounds.seconds_low < inspected.time.seconds < bounds.seconds


def test_the_parts_add_up_to_the_step(inspected: Inspected) -> None:
    parts = parts_of(inspected.time)
    assert parts["bubble of the pipeline"] == inspected.time.bubble_seconds > 0
    assert math.fsum(parts.values()) == pytest.approx(inspected.time.seconds)


def test_the_bubble_is_printed_written_and_drawn(inspected: Inspected) -> None:
    share = inspected.time.bubble_seconds / inspected.time.seconds
    assert f"{share:.1%}" in inspected.out.split("bubble of the pipeline")[1][:40]
    assert (
        f"Each tick takes the branches of the schedule ({inspected.time.schedule})" in inspected.out
    )
    written = inspected.json["time"]
    assert written["bubble_seconds"] == inspected.time.bubble_seconds
    assert written["parts"]["bubble of the pipeline"] == inspected.time.bubble_seconds
    assert (written["schedule"], written["unmatched"]) == (inspected.time.schedule, "")
    assert "bubble of the pipeline" in inspected.picture


def test_the_bubble_is_compared(inspected: Inspected) -> None:
    time = dataclasses.replace(inspected.time, bubble_seconds=1.0)
    other = dataclasses.replace(inspected.result, step_time=time)
    (change,) = difference(inspected.result, other).changes
    assert (change.of, change.what, change.after) == ("predicted", "bubble_seconds", 1.0)


def test_another_schedule_is_not_taken_for_this_one(inspected: Inspected) -> None:
    """Then the dearest branches stand in every tick, and it says so."""
    whole = inspected.lockstep
    fewer = {n: ConditionalDecision(d.branches, d.taken[1:]) for n, d in whole.decisions.items()}
    found = step_time(*inspected.timed[:3], Lockstep("fewer", fewer))
    assert (
        found.unmatched
        == f"the program's loop has {whole.ticks} iterations instead of {whole.ticks - 1}"
    )
    assert (found.schedule, found.bubble_seconds) == ("", 0)
    bounds = step_time(*inspected.timed[:3])
    assert (found.seconds, found.seconds_low) == (bounds.seconds, bounds.seconds_low)
