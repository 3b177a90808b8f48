"""FLOPs that a model needs for a step, whatever plan takes it."""

from __future__ import annotations

from typing import Any

from jaxdist.cost.flops import jaxpr_flops
from jaxdist.experiment.config import ExperimentConfig
from jaxdist.experiment.experiment import build
from jaxdist.mesh import Device, MeshConfig
from jaxdist.parallel.plan import ParallelConfig


def model_flops(config: ExperimentConfig, device: Device) -> float:
    """FLOPs of the matrix products and convolutions of one train step, over all devices.

    They are counted in the step as jax traces it for one device, without the model's remat and with
    plain attention: nothing is computed twice, nothing on two devices, and nothing in a kernel that
    hides it. What a model of the user's own recomputes
    by itself is counted. A loop whose length is data counts once.
    """
    model: Any = config.model
    plain = {"remat": "none", "attention": "plain"}
    own = type(model).model_fields
    model = model.model_copy(update={name: plain[name] for name in plain if name in own})
    alone = config.model_copy(update={"model": model})
    program = build(on_one_device(alone), devices=[device]).program
    return jaxpr_flops(program.train.trace(program.state_shapes, program.batch).jaxpr)


def on_one_device(config: ExperimentConfig) -> ExperimentConfig:
    """The same step on one device, in one piece."""
    return config.model_copy(
        update={
            "mesh": MeshConfig.model_validate({"data": 1}),
            "parallel": ParallelConfig(),
            "train": config.train.model_copy(update={"microbatches": 1}),
        }
    )
