"""The options with which plans are compiled: they save time, and change no number."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxdist.hlo import compile_with_text, program_memory
from jaxdist.inspect import program
from jaxdist.planner.confirm import QUICK
from jaxdist.runtime.topology import topology_devices


@pytest.mark.needs_libtpu
@pytest.mark.full
def test_quick_options_change_no_estimate() -> None:
    sharding = SingleDeviceSharding(topology_devices("v5e:2x2")[0])
    given = jax.ShapeDtypeStruct((512, 1024), "bfloat16", sharding=sharding)
    lowered = jax.jit(lambda x: jax.nn.silu(x @ x.T).sum(1)).lower(given)
    found = []
    for options in ({}, QUICK):
        compiled, text = compile_with_text(lowered, options)
        found.append((re.findall(r'"estimated_cycles":"\d+"', text), program_memory(compiled)))
    (cycles, memory), (quick_cycles, quick_memory) = found
    assert cycles == quick_cycles
    assert cycles
    assert memory.temp_bytes == quick_memory.temp_bytes


def test_a_compiler_that_lacks_an_option_gets_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compile_with(lowered: Any, options: Any) -> Any:
        asked.append(options)
        if options:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'a'")
        return "compiled", "text"

    monkeypatch.setattr(program, "compile_with_text", compile_with)
    subject: Any = SimpleNamespace(devices=[SimpleNamespace(platform="tpu")])
    lowered: Any = None
    assert program.compile_program(subject, lowered, {}, {"a": True}) == ("compiled", "text")
    assert asked == [{"a": True}, None]
