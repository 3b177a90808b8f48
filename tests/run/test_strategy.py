"""A strategy runs a job: its own outer exchange, more than one beginning, other devices."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from runs import DIGITS, Jaxdist, assert_same_run, metrics, steps

from jaxdist.checkpoint.identity import Identity, new_id
from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig
from jaxdist.run.agent_link import AgentLink
from jaxdist.run.directory import RunDirectory
from jaxdist.run.files import RunFiles
from jaxdist.run.hooks.calls import HookCalls
from jaxdist.run.hooks.loop import LoopHook, Moment, RunHooks
from jaxdist.run.job import RunJob
from jaxdist.run.strategies import run_strategy, through_stages
from jaxdist.run.termination import Termination
from jaxdist.train.strategy.config import Synchronous

LOOKAHEAD = {"type": "lookahead", "steps": 3, "momentum": 0.9}


@pytest.mark.full
def test_a_lookahead_run_resumes_to_the_bit_from_between_two_exchanges(jaxdist: Jaxdist) -> None:
    jaxdist.config(strategy=LOOKAHEAD, train={"steps": 12}, checkpoint={"every": 4, "keep": 3})
    done = jaxdist.here("train", "config.yaml")
    assert (done.code, done.err) == (0, ""), done
    whole = jaxdist.folder / "whole"
    shutil.copytree(jaxdist.run, whole)
    for step in (8, 12):
        shutil.rmtree(jaxdist.run / "checkpoints" / f"step_{step:08d}")
    done = jaxdist.here("train", "config.yaml", "--resume")
    assert (done.code, done.err) == (0, ""), done
    assert "resume from step 4 of 12" in done.out
    assert_same_run(jaxdist.run, whole)
    jaxdist.config(train={"steps": 12}, checkpoint={"every": 4, "keep": 3})
    done = jaxdist.here("train", "config.yaml", "run.directory=plain")
    assert done.code == 0, done
    ours, theirs = (
        [line["loss"] for line in metrics(path) if "grad_norm" in line]
        for path in (whole, jaxdist.folder / "plain")
    )
    assert ours[:3] == theirs[:3]  # the first exchange comes after the third step
    assert ours[3] != theirs[3]


class Until(LoopHook):
    """Ends a part of a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def due(self, step: int) -> bool:
        return step == self.step

    def at(self, moment: Moment) -> None:
        moment.stop = moment.step == self.step


class Moves:
    """Half of the run on all devices, the rest on half of them, as if the others were gone."""

    def __init__(self) -> None:
        self.meshes: list[Any] = []

    def run(self, job: RunJob) -> Any:
        with job.prepared() as prepared:
            self.meshes.append(prepared.stages[0].program.layout.mesh.size)
            hooks = RunHooks([Until(3), *prepared.hooks.hooks])
            state = through_stages(replace(prepared, hooks=hooks))
            assert int(state.step) == 3
        with job.prepared(jax.devices()[:4]) as prepared:
            self.meshes.append(prepared.stages[0].program.layout.mesh.size)
            assert int(prepared.state.step) == 3
            return through_stages(prepared)


def done(run: Callable[[RunJob], Any], folder: Path) -> tuple[Any, str]:
    """The last state of a job that `run` does, and what was said."""
    config = validate(
        Document({**DIGITS, "train": {"steps": 6, "batch_size": 64}}), ExperimentConfig
    )
    out = io.StringIO()
    console = Console(file=out, width=200)
    folder.mkdir()
    with Termination() as termination:
        files = RunFiles(
            RunDirectory(folder, Identity(new_id())), config, AgentLink(), console.print
        )
        document = Document(config.model_dump(mode="json"))
        calls = HookCalls((), termination.ask, console.print)
        job = RunJob(document, config, files, termination, calls, console, resume=False)
        state = run(job)
        job.finish(int(state.step))
    assert steps(folder)[-1] == 6
    return state, out.getvalue()


@pytest.mark.full
def test_a_strategy_may_go_on_with_other_devices(tmp_path: Path) -> None:
    """From the checkpoint of the part before, with the same batches and one file of metrics."""
    moves = Moves()
    state, said = done(moves.run, tmp_path / "moves")
    assert moves.meshes == [8, 4]
    assert "resume from step 3 of 6" in said
    assert "done   step 6" in said
    expected, _ = done(partial(run_strategy, Synchronous()), tmp_path / "whole")
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    seen = [line["step"] for line in metrics(tmp_path / "moves")]
    assert seen == [line["step"] for line in metrics(tmp_path / "whole")]
