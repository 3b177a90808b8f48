"""Which settings an ejected file has, and a message for all others at once."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

from jaxdist.config import Config
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig

WRITTEN = (
    "seed", "mesh.data", "mesh.fake_devices",
    "model.type", "model.hidden",
    "loss.type", "loss.label_smoothing",
    "data.type", "data.source",
    "optim.type", "optim.learning_rate", "optim.schedule.*", "optim.scale_from.*",
    "optim.clip_norm", "optim.b1", "optim.b2", "optim.eps", "optim.weight_decay",
    "train.steps", "train.epochs", "train.batch_size", "train.log_every",
    "eval.batches",
)  # fmt: skip
"""Settings that it has; `*` is any text."""
BESIDE = ("eval.every", "checkpoint.*", "run.*", "energy.*", "train.prefetch")
"""Settings of what it leaves out, on which no number that it trains to depends."""
NOT_BESIDE = ("checkpoint.begin_with*",)
"""Of these: what they begin with is not what the seed draws."""
TYPES = {
    "model.type": ("mlp",),
    "loss.type": ("classification",),
    "data.type": ("images",),
    "data.source": ("digits",),
    "optim.type": ("adamw",),
}
"""Choices that it has, of settings that have others."""


def check(config: ExperimentConfig) -> None:
    """Refuse a config that has what an ejected file cannot.

    Raises:
      ConfigError: every such setting, and what to do about it.
    """
    problems = [line for path, value in chosen(config) if (line := _problem(path, value))]
    if problems:
        raise ConfigError(
            "eject cannot write these settings in plain JAX; leave them out, or set what it can:\n"
            + "\n".join(problems)
        )


def _problem(path: str, value: Any) -> str | None:
    known = TYPES.get(path)
    if known is not None:
        return None if value in known else f"  {path}: {value} (it can: {', '.join(known)})"
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in NOT_BESIDE):
        return f"  {path}: {value}"
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in (*WRITTEN, *BESIDE)):
        return None
    return f"  {path}: {value}"


def chosen(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting that is not the default, by dotted path; of alternatives the type too.

    >>> from jaxdist.mesh import MeshConfig
    >>> dict(chosen(MeshConfig(data=2), "mesh"))
    {'mesh.data': 2}
    """
    for name, field in type(config).model_fields.items():
        value, below = getattr(config, name), f"{path}.{name}" if path else name
        if name != "type" and value == field.get_default(call_default_factory=True):
            continue
        if isinstance(value, Config):
            yield from chosen(value, below)
        else:
            yield below, value
