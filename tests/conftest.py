"""A strict session: 8 fake devices, rank promotion raises, warnings are errors."""

from __future__ import annotations

from jaxdist import environment

environment.prepare(fake_devices=8)

import jax  # noqa: E402  (the environment comes first)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    return jax.devices()
