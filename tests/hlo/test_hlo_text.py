"""Programs that XLA compiles and cannot print."""

from types import SimpleNamespace

import jax
import pytest

from jaxdist.errors import LedgerError
from jaxdist.hlo import program_text


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
    )
    compiled = SimpleNamespace(as_text=as_text, memory_analysis=lambda: stats)
    with pytest.raises(LedgerError, match=r"takes 3 GB .* \(INTERNAL: RET_CHECK failure: async-up"):
        program_text(compiled)


def test_others_are_printed():
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert program_text(compiled).startswith("HloModule")
