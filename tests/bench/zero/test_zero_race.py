"""The race against torch: both sides train the same thing, and what starts also ends."""

from __future__ import annotations

import io
import json
import math
import os
import re
import runpy
import sys
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from bench_needs import needs_cores, needs_torch

from benchmarks.core import race, team
from benchmarks.core import report as report_module
from benchmarks.core.harness import Sample
from benchmarks.zero import ours as zero_ours
from benchmarks.zero import race as zero_race
from jaxdist.errors import RunError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import ledger
from jaxdist.runtime import children

SAMPLES = {
    "ours alone": Sample((0.4, 0.4)),
    "ours alone, whole": Sample((0.6, 0.6)),
    "ours ddp": Sample((0.5, 0.5)),
    "ours fsdp": Sample((0.8, 0.8)),
    "torch alone": Sample((0.3, 0.3)),
    "torch ddp": Sample((0.5, 0.5)),
    "torch fsdp": Sample((0.6, 0.6)),
}


def test_efficiency_is_one_alone_over_two_together():
    ddp, ddp_speed, fsdp, fsdp_speed = zero_race.figures(SAMPLES)
    assert (ddp.ours, ddp.reference, ddp.goal, ddp.holds) == (0.8, 0.6, ">= 1", True)
    assert ddp.ratio == pytest.approx(4 / 3)
    assert (ddp_speed.ratio, ddp_speed.goal, ddp_speed.holds) == (1.0, ">= 0.8", True)
    assert (fsdp.name, fsdp.ours, fsdp.reference) == (
        "parallel efficiency, stage 3 over torch FSDP2",
        pytest.approx(0.75),
        0.5,
    )
    assert (fsdp_speed.ratio, fsdp_speed.holds) == (pytest.approx(0.75), False)


def test_a_step_is_split_into_compute_and_communication():
    rows = {name: values for name, *values in zero_race.listing(SAMPLES).rows}
    assert rows["ours, stage 0"] == [0.5, 0.4, pytest.approx(0.1)]
    assert rows["ours, stage 3"] == [0.8, 0.6, pytest.approx(0.2)]
    assert rows["torch, DDP"] == [0.5, 0.3, 0.2]


def test_losses_that_do_not_agree_end_the_race():
    losses = dict.fromkeys(SAMPLES, 5.0)
    zero_race.check_losses(losses)
    with pytest.raises(RunError, match=r"3 steps ours fsdp has loss 5.0.* and torch fsdp 5.01"):
        zero_race.check_losses(losses | {"torch fsdp": 5.01})
    with pytest.raises(RunError, match=r"3 steps ours alone, whole has loss 5.1"):
        zero_race.check_losses(losses | {"ours alone, whole": 5.1})


def test_everybody_goes_first_in_turn():
    calls = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def take_steps(self, steps):
            calls.append(self.name)
            return float(steps), 0.0

    for index in range(3):
        contenders: Any = [Fake("a"), Fake("b"), Fake("c")]
        assert team.one_round(contenders, 3, index) == {"a": 3.0, "b": 3.0, "c": 3.0}
    assert "".join(calls) == "abcbcacab"


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(report_module, "find_spec", lambda _: None)
    (figure,) = zero_race.bench().figures
    assert math.isnan(figure.ours)
    assert figure.note == "skipped: torch is not installed: pip install 'jaxdist[bench]'"
    monkeypatch.setattr(report_module, "find_spec", lambda _: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert race.missing() == "it needs 2 cores and this process has 1"
    monkeypatch.delattr(os, "sched_getaffinity")
    assert "run it on Linux" in str(race.missing())


ANSWER = """
import json, os, sys
print(json.dumps({"params": 1, "cores": sorted(os.sched_getaffinity(0))}), flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": float(sys.argv[1]), "loss": int(line)}), flush=True)
"""
FAIL = "import time; time.sleep(0.2); raise ValueError('no such thing')"


def commands(*programs):
    return [([sys.executable, "-c", *program], {}) for program in programs]


@needs_cores
def test_each_process_has_a_core_of_its_own_and_the_slowest_counts(tmp_path):
    before = os.sched_getaffinity(0)
    with team.start("us", commands((ANSWER, "3"), (ANSWER, "6")), tmp_path) as us:
        assert [answer["cores"] for answer in us.answers()] == [[c] for c in team.cores()[:2]]
        assert us.take_steps(2) == (3.0, 2)
        assert os.sched_getaffinity(0) == before
    assert [child.process.returncode for child in us.children] == [-9, -9]


@needs_cores
def test_a_process_that_ends_is_heard_though_the_others_wait(tmp_path):
    wait = "import sys; sys.stdin.read()"
    message = r"process 1 of torch ddp ended with exit code 1: ValueError: no such thing"
    with (
        pytest.raises(RunError, match=message),
        team.start("torch ddp", commands((wait,), (FAIL,)), tmp_path) as them,
    ):
        them.take_steps(1)
    assert [child.process.returncode for child in them.children] == [-9, 1]


@needs_cores
def test_silence_ends_the_race(tmp_path, monkeypatch):
    monkeypatch.setattr(team, "PATIENCE_SECONDS", 0.1)
    with (
        pytest.raises(RunError, match=r"ours alone says nothing for 0.1 s: run it on a quieter"),
        team.start("ours alone", commands(("input()",)), tmp_path) as us,
    ):
        us.answers()
    assert us.children[0].process.returncode == -9


@needs_cores
def test_what_has_started_ends_when_the_next_cannot(tmp_path):
    started = []
    real = children.subprocess.Popen

    class Recorded(real):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    programs = [*commands(("input()",)), ([str(tmp_path / "none")], {})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children.subprocess, "Popen", Recorded)
        with pytest.raises(FileNotFoundError), team.start("us", programs, tmp_path):
            pass
    assert [process.returncode for process in started] == [-9]


def test_all_processes_have_one_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    found = team._environ()
    assert "optimization_level" not in found["XLA_FLAGS"]
    assert (found["JAX_PLATFORMS"], "NPROC" in found) == ("cpu", False)


@pytest.fixture
def small(monkeypatch, tmp_path):
    sizes = {"layers": 2, "embed": 64, "heads": 2, "mlp": 192, "vocab": 320}
    monkeypatch.setattr(zero_race, "SIZES", sizes)
    monkeypatch.setattr(zero_race, "WINDOW", 16)
    monkeypatch.setattr(zero_race, "BATCH", 2)
    monkeypatch.setattr(zero_race, "MICROBATCHES", 2)
    tokens = np.random.default_rng(0).integers(256, size=(4, 17))
    np.save(tmp_path / "tokens.npy", tokens)
    return tmp_path


def our_program(kind):
    config = ExperimentConfig.model_validate(zero_race.ours_config(kind))
    return build(config, devices=jax.devices()[: 1 if kind == "alone" else 2]).program


def our_answers(directory, monkeypatch, orders, kind="alone"):
    monkeypatch.setattr(sys, "stdin", io.StringIO(orders))
    answers = io.StringIO()
    zero_ours.serve(our_program(kind), directory, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def torch_side():
    return runpy.run_path(str(zero_race.TORCH / "__main__.py"), run_name="side")


@needs_torch
def test_both_sides_are_one_model_and_one_optimizer(small, monkeypatch):
    hello, *mine = our_answers(small, monkeypatch, "1\n2\n4\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n2\n4\n"))
    answers = io.StringIO()
    sizes = {**zero_race.SIZES, "batch": zero_race.BATCH}
    torch_side()["serve"]("alone", 0, small, sizes, answers)
    torch_hello, *theirs = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert hello == torch_hello
    assert hello["params"] == 320 * 64 + 2 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64) + 64
    losses = [[answer["loss"] for answer in side] for side in (mine, theirs)]
    assert losses[0][2] < losses[0][1] < losses[0][0]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_our_forms_train_one_model_and_send_a_whole_one_each(small):
    zero_race.SIZES["layers"] = 1  # of the fixture's own; it is quicker to compile
    losses = []
    for kind in zero_race.FORMS:
        program = our_program(kind)
        state, batch = program.init(), zero_ours.load_batch(program.batch, small)
        compiled = program.train.lower(state, batch).compile()
        size_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
        assert 0.99 < ledger(compiled, program.layout.mesh).sent_bytes() / size_bytes < 1.02
        metrics = np.zeros(0)
        for _ in range(3):
            state, metrics = compiled(state, batch)
        losses.append(float(metrics[program.metrics.index("loss")]))
    assert losses[0] < 5.8
    np.testing.assert_allclose(*losses, rtol=1e-5)


@needs_torch
@pytest.mark.parametrize("kind", zero_race.FORMS)
def test_torch_sends_a_whole_model_too(small, kind):
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    params = our_program("alone").init().params
    np.savez(small / "weights.npz", allow_pickle=False, **zero_ours.torch_weights(params))
    side = torch_side()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model, optimizer = side["build"](kind, dict(zero_race.SIZES), small / "weights.npz")
        size_bytes = 4 * sum(param.numel() for param in model.parameters())
        step = partial(side["step"], model, optimizer, torch.zeros((2, 17), dtype=torch.int64))
        sent_bytes = bytes_of_buckets(model, step) if kind == "ddp" else bytes_of_shards(step)
    finally:
        dist.destroy_process_group()
    assert 0.99 < sent_bytes / size_bytes < 1.02


def bytes_of_buckets(model, step):
    """What DDP all-reduces: of two processes each sends it once."""
    import torch

    found = []

    def reduce(_, bucket):
        found.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, reduce)
    step()
    return sum(found)


def bytes_of_shards(step):
    """What FSDP2 gathers and reduce-scatters: of two processes each sends the half."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                tensors = filter(torch.is_tensor, torch.utils._pytree.tree_leaves(args))
                found.append(max(tensor.nbytes for tensor in tensors) / 2)
            return func(*args, **(kwargs or {}))

    with Count():
        step()
    return sum(found)


def test_torchs_side_imports_nothing_of_ours():
    text = (zero_race.TORCH / "__main__.py").read_text()
    code = text.replace("`jaxdist.models.gpt`", "").replace("`benchmarks.zero.race`", "")
    assert not re.search(r"import jaxdist|jaxdist\.\w", code)


@needs_torch
@needs_cores
@pytest.mark.slow
def test_two_processes_race():
    report = zero_race.bench(repeats=1)
    assert len(report.figures) == 4
    assert all(figure.ours > 0 and figure.reference > 0 for figure in report.figures)
