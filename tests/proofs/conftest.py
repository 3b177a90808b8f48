"""Programs of proofs name the lines of code that their operations come from."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def lines_of_code() -> Iterator[None]:
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 100)
    yield
    jax.config.update("jax_traceback_in_locations_limit", limit)
