"""Notices about valid settings of an optimizer that may be surprising."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from jaxdist.optim.build import ImportedOptimizerConfig, Optimizer
from jaxdist.optim.common import OptimizerConfig
from jaxdist.optim.imported.averages import keeps_average
from jaxdist.trees import flatten_with_names
from jaxdist.types import Params


def optimizer_notices(
    config: OptimizerConfig, optimizer: Optimizer, params: Params
) -> tuple[str, ...]:
    """Return notices about an optimizer with these parameters, each with a remedy.

    Args:
      config: the section `optim`.
      optimizer: the optimizer that was built from `config`.
      params: the parameters of the model, or their shapes.
    """
    return (*_of_dtypes(config, params), *_of_average(config, optimizer, params))


def _of_dtypes(config: OptimizerConfig, params: Params) -> Iterator[str]:
    narrow = [
        (name, jnp.dtype(leaf.dtype))
        for name, leaf in flatten_with_names(params)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32
    ]
    if not narrow or config.master_weights is not None:
        return
    (name, dtype), *more = narrow
    also = f" and {len(more)} more" if more else ""
    # A change that is smaller than half of the distance to the next value is rounded to no change.
    least = float(jnp.finfo(dtype).eps) / 2
    yield (
        f"parameter {name}{also} is {dtype} without a float32 copy: updates and weight decay "
        f"smaller than {least:.2g} of a value are rounded away, so that it may never move. Set "
        f"optim.master_weights: {dtype}, or keep the model's parameters in float32"
    )


def _of_average(config: OptimizerConfig, optimizer: Optimizer, params: Params) -> Iterator[str]:
    if not isinstance(config, ImportedOptimizerConfig) or optimizer.eval_params is not None:
        return
    assert optimizer.rule is not None
    if keeps_average(optimizer.rule, params):
        yield (
            f"optim.path {config.path} keeps a second copy of the parameters (an average?), but "
            "evaluation, generation and the choice of the best checkpoint use the trained "
            "parameters. To evaluate the copy, set optim.eval_params to the function of (state, "
            "parameters) that returns it"
        )
