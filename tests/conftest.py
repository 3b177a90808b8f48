"""A strict session: 8 fake devices, rank promotion raises, warnings are errors."""

from __future__ import annotations

import os

from jaxdist import environment

# Tests compile much and compute little; this halves their time. Processes they start do without.
FLAG = "--xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
environment.prepare(fake_devices=8)

import jax  # noqa: E402  (the environment comes first)
import pytest  # noqa: E402

# Two folders have a conftest; as doctest modules they would have one name.
collect_ignore_glob = ["*/conftest.py"]

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    return jax.devices()
