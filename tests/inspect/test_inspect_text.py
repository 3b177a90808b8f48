from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.inspect.text import canonical_text, program_digest

SHAPE = jax.ShapeDtypeStruct((256,), "float32")


def compiled_digest(function: object) -> str:
    lowered = jax.jit(function).lower(SHAPE)
    return program_digest(lowered.compile().as_text(), lowered.as_text())


def test_names_and_positions_do_not_count() -> None:
    def first(x: jax.Array) -> jax.Array:
        with jax.named_scope("one"):
            return jnp.sin(x) * 2

    def second(y: jax.Array) -> jax.Array:
        return jnp.sin(y) * 2

    assert compiled_digest(first) == compiled_digest(second)


def test_constants_large_and_small_and_operations_count() -> None:
    table = np.random.default_rng(0).random(256, np.float32)
    functions = (
        lambda x: jnp.sin(x) * 2,
        lambda x: jnp.sin(x) * 3,
        lambda x: jnp.cos(x) * 2,
        lambda x: x * table,
        lambda x: x * (table + 1),
    )
    assert len({compiled_digest(function) for function in functions}) == len(functions)


def test_which_instruction_is_meant_does_count() -> None:
    same = canonical_text("%a = f32[] add(%x, %y)\n%b = f32[] add(%a, %x)")
    assert same == canonical_text("%c = f32[] add(%x.1, %y)\n%d = f32[] add(%c, %x.1)")
    assert same != canonical_text("%a = f32[] add(%x, %y)\n%b = f32[] add(%a, %y)")


def test_tables_headers_and_channels_do_not_count() -> None:
    text = (
        'HloModule jit_f, is_scheduled=true\n\nFileNames\n1 "a.py"\n\nStackFrames\n1 {line=1}\n\n'
        "%body.1 (x.1: f32[], y.1: f32[]) -> f32[] {\n"
        "  ROOT %add.3 = f32[] add(%x.1, %y.1)\n}\n"
        '%r = f32[] all-reduce(%p), channel_id=5, to_apply=%body.1, metadata={op_name="a{\\"}b"}\n'
    )
    assert canonical_text(text) == (
        "HloModule, is_scheduled=true\n\n\n\n"
        "%0 {\n  ROOT %1 = f32[] add(%2, %3)\n}\n"
        "%4 = f32[] all-reduce(%5), to_apply=%0\n"
    )
