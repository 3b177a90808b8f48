"""The optimizer of a config, for tests that do not look at the plan of its learning rate."""

from __future__ import annotations

from jaxdist.optim.build import build_optimizer, plan_rate


def built_optimizer(config, steps, params, dims):
    """Return the optimizer of a run of `steps` steps."""
    rate = plan_rate(config, total_steps=steps)
    return build_optimizer(config, params=params, dims=dims, rate=rate)
