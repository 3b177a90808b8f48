"""What an ejected file is made of: pieces, flags and numbers, from a built experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxdist.experiment import Experiment
from jaxdist.models.gpt import GptConfig
from jaxdist.models.mlp import MlpConfig
from jaxdist.optim.batch_scaling import scale
from jaxdist.optim.build import AdamWConfig


@dataclass
class Facts:
    """Pieces by name, flags of marked lines, and values of constants by name."""

    pieces: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)


def facts_of(experiment: Experiment) -> Facts:
    """What a config, whose settings are all supported, is written as."""
    facts = Facts()
    for add in (_data, _model, _optimizer, _step):
        add(facts, experiment)
    facts.pieces += ["steps/evaluation", "steps/loop"]
    return facts


def _data(facts: Facts, experiment: Experiment) -> None:
    config = experiment.config
    facts.pieces += ["data/digits", "data/order"]
    facts.values |= {"SEED": config.seed, "BATCH": config.train.batch_size}


def _model(facts: Facts, experiment: Experiment) -> None:
    config = experiment.config
    model, params = config.model, experiment.program.model.params
    if isinstance(model, MlpConfig):
        kernels = [params["layers"][str(i)]["kernel"].shape for i in range(len(params["layers"]))]
        smoothing = getattr(config.loss, "label_smoothing", 0.0)
        facts.pieces.append("models/mlp")
        facts.values |= {
            "SIZES": (kernels[0][0], *(shape[1] for shape in kernels)),
            "LABEL_SMOOTHING": smoothing,
        }
        facts.flags |= {"smoothing"} if smoothing else set()
    assert isinstance(model, MlpConfig | GptConfig)


def _optimizer(facts: Facts, experiment: Experiment) -> None:
    config, total = experiment.config.optim, experiment.total_steps
    schedule, peak, warmup = config.schedule, config.learning_rate, config.schedule.warmup_steps
    if config.scale_from is not None:
        found = scale(
            config.scale_from,
            batch_size=experiment.config.train.batch_size,
            total_steps=total,
            examples_per_epoch=len(experiment.dataset.train),
        )
        peak = found.learning_rate.value
        warmup = int(found.warmup_steps.value) if config.scale_from.warmup else warmup
    decays = schedule.type != "constant" and total > warmup
    scheduled = decays or bool(warmup)
    facts.values |= {
        "LEARNING_RATE": peak,
        "STEPS": total,
        "WARMUP_STEPS": warmup,
        "END_FRACTION": schedule.end_fraction,
        "POWER": schedule.power or 1.0,
        "CLIP_NORM": config.clip_norm,
    }
    shape = "cosine" if schedule.type == "cosine" else "poly"
    given = {
        "scheduled": scheduled,
        "decays": decays,
        shape: decays,
        "warmup": bool(warmup),
        "ramped": decays and warmup,
        "unramped": decays and not warmup,
        "clip": config.clip_norm is not None,
    }
    if scheduled:
        facts.pieces.append("optimizers/rate")
    if isinstance(config, AdamWConfig):
        facts.pieces.append("optimizers/adamw")
        facts.values |= {"B1": config.b1, "B2": config.b2, "EPS": config.eps}
        facts.values["WEIGHT_DECAY"] = config.weight_decay
        given["decay"] = bool(config.weight_decay)
    facts.flags |= {name for name, value in given.items() if value}


def _step(facts: Facts, experiment: Experiment) -> None:
    config, mesh = experiment.config, experiment.layout.mesh
    facts.pieces.append("steps/automatic")
    facts.values |= {
        "MESH_SHAPE": tuple(mesh.shape.values()),
        "MESH_AXES": tuple(mesh.shape),
        "PARAMS": P(),
        "MOMENTS": (P(), P()),
        "LOG_EVERY": config.train.log_every,
        "EVAL_BATCHES": config.eval.batches,
        "FAKE_DEVICES": config.mesh.fake_devices,
    }
    facts.flags |= {"fake"} if config.mesh.fake_devices else set()
    facts.flags |= {"limited"} if config.eval.batches else set()
