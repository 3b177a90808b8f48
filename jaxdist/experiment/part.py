"""The choice of the parameters that a config trains, by patterns of their names."""

from __future__ import annotations

from dataclasses import replace

from jaxdist.errors import ConfigError
from jaxdist.models.functional import Functional
from jaxdist.models.tuning.lora import PREFIX, Adapter, adapter_of
from jaxdist.models.tuning.part import LoraConfig, PartConfig
from jaxdist.sharding.dims import matching_names
from jaxdist.trees import flatten_with_names


def trained_part(config: PartConfig, model: Functional) -> Functional:
    """Return the model with the adapters that the config sets, or with some parameters frozen.

    The config names the frozen parameters by patterns.

    Raises:
      ConfigError: a pattern matches no parameter, or all parameters are frozen.
    """
    names = [name for name, _ in flatten_with_names(model.params)]
    if config.lora is not None:
        return model.adapted(_adapters(config.lora, model))
    frozen = matching_names(config.freeze, names, "freeze")
    if frozen and len(frozen) == len(names):
        raise ConfigError(
            f"all {len(names)} parameters match {', '.join(config.freeze)}, so no parameter is "
            "left to train: use patterns that match fewer parameters",
            setting=("freeze",),
        )
    return replace(model, frozen=frozen)


def _adapters(config: LoraConfig, model: Functional) -> list[Adapter]:
    """Return the adapters of the kernels that the config targets.

    Raises:
      ConfigError: a pattern matches no parameter or no kernel, or a parameter of the model has the
        prefix of adapters in its name.
    """
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(model.params)}
    if PREFIX in model.params:
        raise ConfigError(
            f"the model has parameters whose names begin with {PREFIX}/, a prefix that is reserved "
            "for adapters: rename these parameters",
            setting=("lora",),
        )
    adapters = []
    for pattern in config.targets:
        names = sorted(matching_names([pattern], shapes, "lora", "targets"))
        given = [(name, shapes[name], model.dims[name] or ()) for name in names]
        made = [adapter_of(config, *one, stacked=one[0] in model.stacked) for one in given]
        if not any(made):
            raise ConfigError(
                f"{pattern!r} matches no kernel: {names[0]} {list(shapes[names[0]])} has no input "
                "and output dims. Use a pattern of parameters with two dims or more",
                setting=("lora", "targets"),
            )
        adapters += filter(None, made)
    # A kernel that several patterns match gets a single adapter.
    return [*{adapter.name: adapter for adapter in adapters}.values()]
