from __future__ import annotations

import jax
import pytest

from jaxdist.errors import JaxdistError
from jaxdist.runtime.hardware import DEVICES, device, find_device


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("H200", "h200"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_kind_of_jax_finds_its_figures(kind, name):
    assert device(kind).name == name


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v4 lite", "NVIDIA L4", ""])
def test_an_unknown_kind_is_none_and_refused_by_name(kind):
    assert find_device(kind) is None
    with pytest.raises(JaxdistError, match=rf"device kind '{kind}' is unknown: allowed: v4, v5e"):
        device(kind)


def test_a_short_name_with_a_typo_is_corrected():
    with pytest.raises(JaxdistError, match="did you mean 'v5e'"):
        device("v5ee")


def test_this_machine_is_known():
    assert device(jax.devices()[0].device_kind).name == "cpu"


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_in_the_order_that_physics_allows(name):
    figures = DEVICES[name]
    assert figures.memory_bytes is None or figures.memory_bytes > 2**33
    assert figures.memory_bytes_per_second > figures.fast.bytes_per_second
    assert figures.fast.bytes_per_second > figures.slow.bytes_per_second
    assert figures.fast.latency_seconds < figures.slow.latency_seconds < 1e-3
    assert all(1e10 < flops < 1e16 for flops in figures.flops_per_second.values())


def test_the_published_figures():
    assert device("v5e").flops_per_second["bfloat16"] == 1.97e14
    assert device("v5p").fast.bytes_per_second == 9e10
    assert device("h200").memory_bytes == 141 * 10**9
