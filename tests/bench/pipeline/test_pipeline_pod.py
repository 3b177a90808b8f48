"""The pod's program: what it shows, what it says where it cannot, and that its config is whole."""

from __future__ import annotations

import math
import subprocess

import jax
import pytest

from benchmarks.core import child, report
from benchmarks.pipeline import pod as pipeline_pod
from benchmarks.pipeline.pod import Pod
from jaxdist.experiment import build, load
from jaxdist.pipeline_schedules.one_f_one_b import OneFOneB

POD = Pod(
    params=70_000_000_000,
    mesh={"stage": 8, "data": 8, "tensor": 8},
    peak_bytes=60e9,
    memory_bytes=100e9,
    fits=True,
    sent_bytes={"stage": 1e9, "data": 2e9, "tensor": 3e9},
    compile_seconds=150.0,
)
WHOLE = ("sharding.rules.residual_seq=null", "sharding.collective_matmul=false")
"""Sequences that CPU programs with stages can have."""
SMALL = (
    *("mesh.stage=2", "mesh.data=2", "mesh.tensor=2"),
    *("model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64"),
    *WHOLE,
    *("data.vocab_size=256", "data.window=16", "train.batch_size=8", "train.microbatches=4"),
)


def test_memory_and_compile_time_stand_beside_their_limits():
    memory, seconds = pipeline_pod.figures([POD])
    assert memory.name == "memory, 70.0B as stage 8 x data 8 x tensor 8"
    assert (memory.ours, memory.reference, memory.goal, memory.holds) == (60, 100, "<= 1", True)
    assert (seconds.ours, seconds.reference, seconds.ratio, seconds.holds) == (150, 300, 0.5, True)


def test_a_refusal_and_a_slow_compiler_miss_the_goals():
    refused = Pod(POD.params, POD.mesh, 120e9, 95e9, False, {}, 450.0)
    memory, seconds = pipeline_pod.figures([refused])
    assert (memory.holds, seconds.holds) == (False, False)
    assert memory.note == "refused by the compiler; the reference is what a program may have"


def test_bytes_are_listed_by_axis():
    found = pipeline_pod.listing([POD])
    assert found.rows == [("stage", 8, 1.0), ("data", 8, 2.0), ("tensor", 8, 3.0)]


def test_without_libtpu_it_says_so(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda _: None)
    (figure,) = pipeline_pod.figures(pipeline_pod.measure())
    assert math.isnan(figure.ours)
    assert figure.note == "skipped: libtpu is not installed: pip install 'jaxdist[tpu]'"


def test_the_child_prints_what_the_parent_reads(monkeypatch, capsys):
    compiled = []

    def compile_pod(devices, overrides):
        compiled.append((devices, overrides))
        return POD

    monkeypatch.setattr(pipeline_pod, "topology_devices", lambda topology: [topology])
    monkeypatch.setattr(pipeline_pod, "compile_pod", compile_pod)
    name = f"{pipeline_pod.__name__}:pods"
    child.main(name, '"v5p:2x2x2"', '"model.layers=2"')
    assert compiled == [(["v5p:2x2x2"], ("model.layers=2",))]
    printed = capsys.readouterr().out
    monkeypatch.setattr(report, "find_spec", lambda _: True)
    done = subprocess.CompletedProcess([], 0, printed, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert pipeline_pod.measure() == [POD]


@pytest.mark.slow
def test_the_config_has_70_billion_parameters_in_eight_stages():
    document, config = load(pipeline_pod.CONFIG)
    assert math.prod(config.mesh.sizes().values()) == 512
    assert config.parallel.zero.stage == 1
    on_eight = [*SMALL[:3], *WHOLE]
    document, config = load(pipeline_pod.CONFIG, on_eight)
    program = build(config, document, devices=jax.devices()).program
    params = sum(leaf.size for leaf in jax.tree.leaves(program.model.params))
    assert 68.9e9 < params < 69.1e9
    assert isinstance(config.parallel.pipeline.schedule, OneFOneB)
    assert program.compute is not None


@pytest.mark.slow  # figures of a compiled one: above
def test_a_small_one_compiles():
    pod = pipeline_pod.compile_pod(jax.devices(), SMALL)
    assert pod.mesh == {"stage": 2, "data": 2, "tensor": 2}
    assert pod.fits
    assert pod.peak_bytes > 0
    assert all(pod.sent_bytes[axis] > 0 for axis in pod.mesh)
    # A CPU has no data sheet.
    assert pod.memory_bytes is None
    assert math.isnan(pipeline_pod.figures([pod])[0].reference)


@pytest.mark.slow
def test_what_the_compiler_refuses_is_told(monkeypatch):
    message = "CompileTimeHbmOom: total memory required (2.50G) exceeds available HBM (1G)"

    def refuse(_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(pipeline_pod, "compile_with_text", refuse)
    pod = pipeline_pod.compile_pod(jax.devices(), SMALL)
    assert (pod.fits, pod.peak_bytes, pod.memory_bytes) == (False, 2.5 * 2**30, 2**30)
    message = "another matter"
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"another matter"):
        pipeline_pod.compile_pod(jax.devices(), SMALL)


@pytest.mark.slow
def test_the_pod_compiles_and_fits():
    memory, _ = pipeline_pod.figures(pipeline_pod.measure())
    assert math.isnan(memory.ours) or memory.holds
