"""Options for the compiler: that they reach it, what the presets are, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.hlo import program_text
from jaxdist.mesh import Device
from jaxdist.parallel.compiler import ONLY_ON, PRESETS, XlaConfig, compiler_options
from jaxdist.runtime.topology import topology_devices

NO_FUSIONS = {"options": {"xla_disable_hlo_passes": "fusion"}}


def experiment(
    xla: dict[str, Any], devices: list[Device] | None = None, **parallel: Any
) -> Experiment:
    sections = {
        "model": {"type": "mlp", "hidden": [16]},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 4, "batch_size": 64},
        "mesh": {"data": -1},
        "parallel": {"xla": xla, **parallel},
    }
    return build(validate(Document(sections), ExperimentConfig), devices=devices)


def text_of(found: Experiment, name: str = "train") -> str:
    program = found.program
    state = program.state_shapes
    given = (state,) if name == "train" else (state.params, state.buffers)
    return program_text(getattr(program, name).lower(*given, program.batch).compile())


def loops(text: str) -> int:
    """How many loops fusion made of several operations; others wrap one."""
    return len(re.findall(r"kind=kLoop, calls=%fused_", text))


@pytest.mark.parametrize("name", ["train", "evaluate"])
@pytest.mark.every(2)
def test_an_option_reaches_the_compiler(name: str, devices: list[Device]) -> None:
    plain, found = (text_of(experiment(xla), name) for xla in ({}, NO_FUSIONS))
    assert loops(found) < loops(plain)


@pytest.mark.full
def test_what_a_step_needs_itself_stands_beside_the_configs_options(devices: list[Device]) -> None:
    """An option that holds a list is joined: barriers are kept, and fewer loops are fused."""
    manual = {"reduce": {"type": "ring"}, "zero": {"stage": 1, "whole_below": 1}}
    plain, found = (text_of(experiment(xla, **manual)) for xla in ({}, NO_FUSIONS))
    assert " opt-barrier(" in plain
    assert " opt-barrier(" in found
    assert loops(found) < loops(plain)


@pytest.mark.parametrize(
    ("xla", "message"),
    [
        (
            {"options": {"xla_tpu_overlap_compute_collective_tk": True}},
            r"refuses xla_tpu_overlap_compute_collective_tk: true \(.*No such compile option.*\); "
            r"did you mean 'xla_tpu_overlap_compute_collective_tc'",
        ),
        (
            {"options": {"xla_dump_hlo_as_text": True, "xla_backend_optimization_level": "high"}},
            r"refuses xla_backend_optimization_level: high \(",
        ),
        ({"preset": "overlap"}, r"preset overlap is for TPUs, but the mesh has cpu devices: use"),
        ({"preset": "overlp"}, r"did you mean 'overlap'\?"),
        ({"options": {"xla_x": [1]}}, r"xla_x .*expected"),
    ],
    ids=str,
)
def test_what_the_compiler_does_not_take_is_refused(
    xla: dict[str, Any], message: str, devices: list[Device]
) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(xla)


def test_options_of_one_device_only_are_in_a_preset() -> None:
    assert {*ONLY_ON} <= {name for options in PRESETS.values() for name in options}
    assert all(options for preset, options in PRESETS.items() if preset != "none")


@pytest.mark.needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.every(3)
def test_libtpu_takes_every_preset(preset: Any, topology: str) -> None:
    devices = topology_devices(topology)
    given: dict[str, Any] = {"xla_latency_hiding_scheduler_rerun": 2}
    found = compiler_options(XlaConfig(preset=preset, options=given), devices)
    left_out = {name for name, kinds in ONLY_ON.items() if topology.split(":")[0] not in kinds}
    assert found.keys() == {*PRESETS[preset], *given} - left_out


@pytest.mark.needs_libtpu
def test_libtpu_refuses_what_it_does_not_know() -> None:
    """With the option that it may be, or with what is wrong about the value."""
    devices = topology_devices("v5e:2x2")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"xla_tpu_overlap_compute_collective_tk": True}, r"did you mean 'xla_tpu_overlap_compute"),
        ({"xla_tpu_overlap_compute_collective_tc": "maybe"}, r"refuses .*_tc: maybe \(.*parse"),
    )
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            compiler_options(XlaConfig(preset="overlap", options=options), devices)
