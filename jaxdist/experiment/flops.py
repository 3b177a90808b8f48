"""The FLOPs of a model's step, which do not depend on the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxdist.cost.flops import jaxpr_flops
from jaxdist.experiment.config import ExperimentConfig
from jaxdist.experiment.experiment import build
from jaxdist.mesh import Device, MeshConfig
from jaxdist.parallel.plan import ParallelConfig


class StepFlops(NamedTuple):
    """The FLOPs of the gradients and of the update in a train step."""

    model: float
    update: float


def model_flops(config: ExperimentConfig, device: Device) -> float:
    """Return the FLOPs of a train step without the optimizer's update."""
    return step_flops(config, device).model


def step_flops(config: ExperimentConfig, device: Device) -> StepFlops:
    """Return the FLOPs of matrix products and convolutions in a train step, over all devices.

    FLOPs are counted in jax's trace of the step for a single device, without the model's remat and
    with plain attention. Therefore nothing is computed twice or on two devices, and no kernel hides
    FLOPs. Recomputation inside a user's model is counted. A loop whose length depends on data
    counts as one iteration.
    """
    model: Any = config.model
    plain = {"remat": "none", "attention": "plain"}
    own = type(model).model_fields
    model = model.model_copy(update={name: plain[name] for name in plain if name in own})
    alone = config.model_copy(update={"model": model})
    program = build(on_one_device(alone), devices=[device]).program
    whole = jaxpr_flops(program.train.trace(program.state_shapes, program.batch).jaxpr)
    model = jaxpr_flops(program.gradients.trace(program.state_shapes, program.batch).jaxpr)
    return StepFlops(model, whole - model)


def on_one_device(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config that computes the same step on a single device, without microbatches."""
    return config.model_copy(
        update={
            "mesh": MeshConfig.model_validate({"data": 1}),
            "parallel": ParallelConfig(),
            "train": config.train.model_copy(update={"microbatches": 1}),
        }
    )
