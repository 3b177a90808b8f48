"""The small language models that benches train and compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.mesh import Device
from jaxdist.types import Json, JsonObject

STEPS = 10**6


def gpt(
    model: Mapping[str, Json], *, window: int, batch_size: int, **sections: JsonObject
) -> JsonObject:
    """Return the settings of a gpt on random tokens, under AdamW.

    Args:
      model: the settings of the section `model`, apart from its type.
      sections: settings of these or other sections, which are merged key by key.
    """
    settings: JsonObject = {
        "model": {"type": "gpt", **model},
        "data": {"type": "synthetic", "kind": "tokens", "window": window, "heldout_examples": 0},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": STEPS, "batch_size": batch_size},
    }
    return settings | {name: settings.get(name, {}) | own for name, own in sections.items()}


def built(settings: JsonObject, devices: Sequence[Device] | None = None) -> Experiment:
    """Build the experiment of these settings, by default on all devices."""
    return build(ExperimentConfig.model_validate(settings), devices=devices)
