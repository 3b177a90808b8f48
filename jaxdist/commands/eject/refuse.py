"""The settings that an ejected file supports, and the errors for all other settings."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from jaxdist.config import Config
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig
from jaxdist.mesh import mesh_axis_size

WRITTEN = (
    "seed", "mesh.data", "mesh.tensor", "mesh.stage", "mesh.fake_devices",
    "model.hidden", "model.channels", "model.layers", "model.embed", "model.heads",
    "model.head_size", "model.kv_heads", "model.mlp", "model.vocab_multiple", "model.tied_head",
    "model.rope_theta", "model.attention_window", "model.scan_unroll",
    "loss.label_smoothing",
    "data.window", "data.heldout_fraction",
    "optim.learning_rate", "optim.schedule.*", "optim.scale_from*", "optim.clip_norm",
    "optim.skip_nonfinite", "optim.skip_spikes", "optim.skip_spikes.*",
    "optim.b1", "optim.b2", "optim.eps", "optim.weight_decay", "optim.momentum", "optim.nesterov",
    "train.steps", "train.epochs", "train.batch_size", "train.log_every", "train.microbatches",
    "parallel.reduce.directions", "parallel.reduce.bucket_bytes",
    "parallel.zero.stage", "parallel.zero.whole_below",
    "eval.batches",
)  # fmt: skip
"""The patterns of supported settings, in which `*` matches any text."""
BESIDE = (
    "eval.every", "checkpoint.*", "run.*", "energy.*", "train.prefetch", "optim.max_skipped",
)  # fmt: skip
"""The patterns of settings that do not change the numbers of training. An ejected file ignores
these settings."""
NOT_BESIDE = ("checkpoint.begin_with*",)
"""The exceptions from `BESIDE`, which change the initial parameters."""
CHOICES: dict[str, tuple[object, ...]] = {
    "model.type": ("mlp", "cnn", "gpt"),
    "model.attention": ("plain",),
    "model.compute_dtype": ("bfloat16",),
    "model.remat": ("full",),
    "loss.type": ("classification", "next_token"),
    "data.type": ("images", "text"),
    "data.source": ("digits",),
    "data.tokenizer.type": ("bytes",),
    "optim.type": ("adamw", "lamb", "sgd"),
    "parallel.reduce.type": ("ring",),
    "parallel.pipeline.schedule.type": ("1f1b", "gpipe"),
}
"""The supported values of settings that select an alternative, in addition to the defaults."""


def check_ejectable(config: ExperimentConfig, *, keeps_data: bool) -> None:
    """Check that an ejected file supports all settings of a config.

    Args:
      config: the config to eject.
      keeps_data: whether jaxdist reads the examples.

    Raises:
      ConfigError: settings are not supported. The message lists all of them, with the remedy.
    """
    given = [
        (path, value)
        for path, value in changed_settings(config)
        if not keeps_data or not _kept(path)
    ]
    problems = [line for path, value in given if (line := _problem(path, value))]
    problems += [f"  {text}" for text in _together(config)]
    if keeps_data and config.data.type == "import":
        problems.append("  data.type: import (supported with --keep data: images, text, synthetic)")
    if config.model.type == "import":
        problems.append(
            "your own model cannot be written: eject a config with a built-in model, and replace "
            "the model in the written file by your own"
        )
    read = config.data.type != "import" and not keeps_data
    if read and any(line.startswith("  data.") for line in problems):
        problems.append("or let the file read the data through jaxdist: --keep data")
    if problems:
        raise ConfigError(
            "eject cannot write these settings in plain JAX; leave them out, or choose "
            "supported settings:\n" + "\n".join(problems)
        )


def _kept(path: str) -> bool:
    """Return whether a setting affects only how data are read.

    A transform, for example, also affects the model's input.
    """
    return path.startswith("data.") and not path.startswith("data.transform")


def _together(config: ExperimentConfig) -> Iterator[str]:
    """Yield a text about each unsupported combination of settings that are supported alone."""
    parallel, mesh, optim = config.parallel, config.mesh.sizes(), config.optim
    reduced, stages = parallel.reduce is not None, mesh.get("stage", 1) != 1
    zero, tensor = parallel.zero.stage > 0, mesh.get("tensor", 1) != 1
    given = {"parallel.reduce": reduced, "mesh.stage": stages, "parallel.zero": zero}
    given |= {"mesh.tensor": tensor}
    names = [name for name, there in given.items() if there]
    if len(names) > 1 and (stages or (reduced and tensor)):
        yield (
            f"{' with '.join(names)}: use only one of these settings, or combine parallel.zero "
            "with either mesh.tensor or parallel.reduce"
        )
    if config.train.microbatches > 1 and not stages:
        yield f"train.microbatches: {config.train.microbatches} without mesh.stage"
    if stages and config.model.type != "gpt":
        yield f"mesh.stage with model.type {config.model.type} (supported: gpt)"
    if stages and getattr(config.model, "compute_dtype", "float32") != "float32":
        yield "mesh.stage with model.compute_dtype: bfloat16"
    if optim.type == "sgd" and not optim.momentum:
        yield "optim.momentum: 0.0"
    if getattr(config.data, "heldout_fraction", 1.0) == 0:
        yield "data.heldout_fraction: 0.0"


def check_built(experiment: Experiment) -> None:
    """Check the settings for which only the built experiment shows whether they are supported.

    Raises:
      ConfigError: a setting is not supported. The message has the remedy.
    """
    config, zero = experiment.config, experiment.program.exchange.zero
    stages = mesh_axis_size(experiment.layout.mesh, "stage")
    if zero.padded:
        raise ConfigError(
            f"eject: {', '.join(zero.padded)} would need padding to be split over the devices by "
            "parallel.zero; use a number of devices that divides a dim of each parameter, or a "
            "larger parallel.zero.whole_below"
        )
    layers = getattr(config.model, "layers", 1)
    if layers % stages:
        raise ConfigError(
            f"eject: model.layers {layers} do not divide by mesh.stage {stages}; use a number of "
            f"layers that is a multiple of {stages}"
        )


def _problem(path: str, value: Any) -> str | None:
    def named(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    choices = CHOICES.get(path)
    if value in choices if choices else named((*WRITTEN, *BESIDE)) and not named(NOT_BESIDE):
        return None
    supported = f" (supported: {', '.join(map(str, choices))})" if choices else ""
    return f"  {path}: {value}{supported}"


def changed_settings(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each setting that differs from its default.

    The `type` that selects an alternative is always included. A section that is null by
    default and has no `type` is included too, with the value "set".

    Args:
      config: the config, or a section of the config.
      path: the dotted path of the section, which is empty for the config.

    >>> from jaxdist.mesh import MeshConfig
    >>> dict(changed_settings(MeshConfig(data=2), "mesh"))
    {'mesh.data': 2}
    """
    for name, field in type(config).model_fields.items():
        value, below = getattr(config, name), f"{path}.{name}" if path else name
        default = field.get_default(call_default_factory=True)
        if name != "type" and value == default:
            continue
        if isinstance(value, Config):
            # A section that is None by default counts as changed if it is present, even if all of
            # its settings have their defaults.
            if default is None and "type" not in type(value).model_fields:
                yield below, "set"
            yield from changed_settings(value, below)
        else:
            yield below, value
