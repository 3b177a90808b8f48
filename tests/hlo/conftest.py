"""Meshes of fake CPU devices, and of TPU devices that are compiled for without a TPU."""

import jax
import pytest
from hlo_programs import Program
from jax.sharding import AxisType


@pytest.fixture(params=["cpu", "tpu"])
def backend(request):
    return request.param


@pytest.fixture
def program(backend, request):
    """Makes `Program`s over a mesh of 8 devices of the backend."""
    name = "devices" if backend == "cpu" else "tpu_devices"
    return _maker(request.getfixturevalue(name))


@pytest.fixture
def cpu_program(devices):
    return _maker(devices)


@pytest.fixture
def tpu_program(tpu_devices):
    return _maker(tpu_devices)


def _maker(devices):
    def make(**axes: int) -> Program:
        types = (AxisType.Auto,) * len(axes)
        sizes, names = tuple(axes.values()), tuple(axes)
        return Program(jax.make_mesh(sizes, names, axis_types=types, devices=devices))

    return make
