"""Programs that XLA compiles and cannot print."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.errors import LedgerError
from jaxdist.hlo import compile_with_text, ledger, program_text


def test_what_xla_cannot_print_is_told_with_its_memory():
    def as_text():
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update\nand more")

    stats = SimpleNamespace(
        argument_size_in_bytes=2 * 10**9,
        output_size_in_bytes=0,
        alias_size_in_bytes=0,
        temp_size_in_bytes=10**9,
        generated_code_size_in_bytes=0,
        peak_memory_in_bytes=0,
        host_output_size_in_bytes=0,
        host_alias_size_in_bytes=0,
        host_argument_size_in_bytes=0,
        host_temp_size_in_bytes=0,
    )
    compiled = SimpleNamespace(as_text=as_text, memory_analysis=lambda: stats)
    with pytest.raises(LedgerError, match=r"needs 3 GB .* \(INTERNAL: RET_CHECK failure: async-up"):
        program_text(compiled)


def test_what_xla_wrote_down_is_read_without_printing(monkeypatch):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    given = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    lowered = jax.jit(lambda x: x.T @ x).lower(given)
    expected = ledger(lowered.compile(), mesh)

    def as_text(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", as_text)
    compiled, text = compile_with_text(lowered)
    assert text.startswith("HloModule")
    assert ledger(compiled, mesh, text) == expected
    assert expected.sent_bytes("data") > 0
    monkeypatch.setattr(Path, "glob", lambda *_: [])
    with pytest.raises(LedgerError, match="cannot print the program"):
        compile_with_text(lowered)


def test_others_are_printed():
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert program_text(compiled).startswith("HloModule")
