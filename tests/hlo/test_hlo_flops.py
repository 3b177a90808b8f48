"""FLOPs against XLA's own count, which is right where there is no loop."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.hlo import ledger, ledger_of_text


def flops_of(mesh, function, *shapes):
    """(ours, XLA's) of a function on one device."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*arguments).compile()
    found = ledger(compiled, mesh)
    assert found.flops_low == found.flops_high
    return found.flops_high, compiled.cost_analysis()["flops"]


@pytest.fixture
def mesh(devices):
    return jax.make_mesh(
        (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:1]
    )


@pytest.mark.parametrize(
    ("formula", "left", "right", "expected"),
    [
        ("mk,kn->mn", (64, 128), (128, 32), 2 * 64 * 128 * 32),
        ("bmk,bkn->bmn", (5, 64, 128), (5, 128, 32), 2 * 5 * 64 * 128 * 32),
        ("bthd,bshd->bhts", (2, 16, 4, 8), (2, 24, 4, 8), 2 * 2 * 4 * 16 * 24 * 8),
        ("btd,btf->df", (4, 16, 32), (4, 16, 64), 2 * 4 * 16 * 32 * 64),
        ("mab,abn->mn", (16, 4, 8), (4, 8, 32), 2 * 16 * 4 * 8 * 32),
    ],
)
def test_dots(mesh, formula, left, right, expected):
    ours, xla = flops_of(mesh, lambda a, b: jnp.einsum(formula, a, b), left, right)
    assert ours == expected
    assert ours == pytest.approx(xla, rel=0.01)


CONVOLUTIONS = {
    "same": {"padding": "SAME"},
    "valid": {"padding": "VALID"},
    "strided": {"padding": ((2, 1), (0, 3)), "window_strides": (2, 3)},
    "dilated": {"padding": "SAME", "rhs_dilation": (2, 1)},
    "transposed": {"padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 2)},
    "grouped": {"padding": "SAME", "feature_group_count": 4},
    "cropped": {"padding": ((-1, 0), (0, -2))},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(mesh, name):
    options = {"window_strides": (1, 1), **CONVOLUTIONS[name]}
    features = 16 // options.get("feature_group_count", 1)

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, **options)

    ours, xla = flops_of(mesh, convolve, (4, 16, 14, 14), (32, features, 3, 3))
    assert ours == pytest.approx(xla, rel=0.002)
    assert ours > 0


def test_gradients_of_a_convolution(mesh):
    """XLA writes the kernel's gradient with the features for a batch."""

    def loss(x, kernel):
        y = lax.conv_general_dilated(x, kernel, (2, 2), "SAME")
        return jnp.sum(y**2)

    shapes = (4, 16, 14, 14), (32, 16, 3, 3)
    ours, xla = flops_of(mesh, jax.grad(loss, argnums=(0, 1)), *shapes)
    assert ours == pytest.approx(xla, rel=0.02)


def test_a_batched_dot_on_tpu(tpu_program):
    """XLA:TPU writes it as a convolution whose batch is a dilated spatial dim."""
    p = tpu_program(data=8)
    arguments = p.array(6, 256, 128), p.array(6, 128, 512)
    compiled = p.compile(lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), *arguments)
    assert " convolution(" in compiled.as_text()
    assert ledger(compiled, p.mesh).flops_high == 2 * 6 * 256 * 128 * 512


def test_a_loop_counts_in_full(cpu_program):
    """XLA counts its body once."""
    p = cpu_program(data=8)

    def power(x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=32)[0]

    compiled = p.compile(power, p.array(64, 64))
    assert ledger(compiled, p.mesh).flops_high == 32 * 2 * 64**3
    assert compiled.cost_analysis()["flops"] < 2 * 2 * 64**3


CUBLAS = """HloModule gemm, is_scheduled=true

ENTRY %main (a: f32[4,64,128], b: f32[4,128,32]) -> f32[4,64,32] {
  %a = f32[4,64,128]{2,1,0} parameter(0)
  %b = f32[4,128,32]{2,1,0} parameter(1)
  %gemm = (f32[4,64,32]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}
  ROOT %out = f32[4,64,32]{2,1,0} get-tuple-element(%gemm), index=0
}
"""  # noqa: E501  (HLO has one instruction a line)
CUDNN = """HloModule conv, is_scheduled=true

ENTRY %main (x: f32[4,14,14,16], k: f32[32,3,3,16], g: f32[4,14,14,32]) -> f32[4,14,14,32] {
  %x = f32[4,14,14,16]{3,2,1,0} parameter(0)
  %k = f32[32,3,3,16]{3,2,1,0} parameter(1)
  %g = f32[4,14,14,32]{3,2,1,0} parameter(2)
  %by_k = (f32[32,3,3,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %g), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %by_x = (f32[4,14,14,16]{3,2,1,0}, u8[0]{0}) custom-call(%g, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %y = (f32[4,14,14,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  ROOT %out = f32[4,14,14,32]{3,2,1,0} get-tuple-element(%y), index=0
}
"""  # noqa: E501  (HLO has one instruction a line)
STATED = """HloModule kernel, is_scheduled=true

ENTRY %main (a: bf16[64,128]) -> bf16[64,128] {
  %a = bf16[64,128]{1,0} parameter(0)
  ROOT %kernel = bf16[64,128]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"","cost_estimate":{"flops":"12345","transcendentals":"0","bytes_accessed":"6"}}}
}
"""  # noqa: E501  (HLO has one instruction a line)
ONEDNN = """HloModule matmul, is_scheduled=true

ENTRY %main (a: f32[4,64,128], b: f32[4,128,32]) -> f32[4,64,32] {
  %a = f32[4,64,128]{2,1,0} parameter(0)
  %b = f32[4,128,32]{2,1,0} parameter(1)
  ROOT %out = f32[4,64,32]{2,1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul", backend_config={"onednn_matmul_config":{}}
}
"""  # noqa: E501  (HLO has one instruction a line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CUBLAS, 2 * 4 * 64 * 128 * 32),
        (CUDNN, 3 * 2 * 4 * (14 * 3 - 2) ** 2 * 16 * 32),
        (STATED, 12345),
        (ONEDNN, 2 * 4 * 64 * 128 * 32),
    ],
    ids=["cublas", "cudnn", "stated", "onednn"],
)
def test_library_calls(text, expected):
    assert ledger_of_text(text, {"data": 1}).flops_high == expected
