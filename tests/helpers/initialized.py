"""Parameters and buffers that one program draws."""

from __future__ import annotations

from typing import Any

import jax

from jaxdist.models.functional import Functional


def initialized(model: Functional, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw parameters and buffers by one program, instead of a program for each shape."""
    return jax.jit(lambda key: model.init(key))(jax.random.key(seed))
