"""The construction of a model's module from its config and the shapes of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from flax import nnx
from pydantic import Field

from jaxdist.config.importing import call_object, load_object
from jaxdist.errors import ConfigError
from jaxdist.models.bert import BertConfig
from jaxdist.models.gpt import GptConfig
from jaxdist.models.hints import Hint
from jaxdist.models.images.cnn import CnnConfig
from jaxdist.models.images.mlp import MlpConfig
from jaxdist.models.images.resnet import ResnetConfig
from jaxdist.models.images.vit import VitConfig
from jaxdist.models.loss import (
    ClassificationConfig,
    LossConfig,
    MaskedTokensConfig,
    NextTokenConfig,
    check_fields,
)
from jaxdist.models.recommend.dlrm import DlrmConfig
from jaxdist.models.recommend.loss import ClickConfig, SquaredErrorConfig
from jaxdist.models.recommend.mf import MfConfig
from jaxdist.models.remat import check_memory, offloads
from jaxdist.models.tuning.part import PartConfig
from jaxdist.runtime.hardware import find_device
from jaxdist.types import Kwargs


class ImportedModelConfig(PartConfig):
    """A user's model: a function of (rngs, **args) that returns a flax NNX module.

    Parameters name their dims with `nnx.Param(value, dims=("embed", "mlp"))`, or the config names
    the dims under sharding.params. A pipeline needs a `jaxdist.models.layers.Stacked`, or a module
    with the same attributes.
    """

    type: Literal["import"]
    """The name that selects this model in a config."""
    path: str
    """The import path of the function, `mypkg.module:name`."""
    args: Kwargs = Field(default_factory=dict)
    """The keyword arguments for the function, by name."""


ModelConfig = Annotated[
    GptConfig
    | BertConfig
    | MlpConfig
    | CnnConfig
    | ResnetConfig
    | VitConfig
    | MfConfig
    | DlrmConfig
    | ImportedModelConfig,
    Field(discriminator="type"),
]


def _imported(config: ImportedModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    module = call_object(config.path, load_object(config.path), {"rngs": rngs, **config.args})
    if not isinstance(module, nnx.Module):
        raise ConfigError(
            f"model.path {config.path} returned {type(module).__name__}, but must return a "
            "flax.nnx.Module"
        )
    return module


def make_model(
    config: ModelConfig,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    vocab_size: int | None,
    classes: int | None,
    hint: Hint,
    device: Any | None = None,
    fields: Mapping[str, int] | None = None,
    served: bool = False,
) -> Callable[[nnx.Rngs], nnx.Module]:
    """Return a function from random streams (`nnx.Rngs`) to the model's module.

    Args:
      shapes: the shape of each field of an example of the data, by the field's name.
      vocab_size: the size of the data's vocabulary, or None if the data has no tokens.
      classes: the number of the data's classes, or None if the data has no labels.
      hint: the layout of activations on the mesh.
      device: one of the devices that the model will run on, or None if the devices are unknown.
      fields: the number of ids of each categorical field, or None if the data has no such field.
      served: whether parameter servers hold the tables of the model.

    Raises:
      ConfigError: the model does not fit the data or the devices.
    """
    if hint.ring is not None and not isinstance(config, GptConfig):
        raise ConfigError(
            f"sharding.collective_matmul has no effect with model.type {config.type}, only with "
            "gpt: set sharding.collective_matmul: false"
        )
    if isinstance(config, ImportedModelConfig):
        return lambda rngs: _imported(config, rngs)
    if isinstance(config, GptConfig | BertConfig):
        if vocab_size is None:
            raise ConfigError(
                f"model.type {config.type} needs tokens, but the data gives {sorted(shapes)}: "
                "choose a data.type with tokens, such as text"
            )
        given = {"hint": hint, "length": shapes.get("segments", (None,))[-1]}
        given |= _for_blocks(config, device)
        if isinstance(config, BertConfig):
            given["classes"] = classes
        return lambda rngs: config.build(rngs, vocab_size=vocab_size, **given)
    if isinstance(config, MfConfig | DlrmConfig):
        if fields is None:
            raise ConfigError(
                f"model.type {config.type} needs ids of categorical fields, but the data gives "
                f"{sorted(shapes)}: set data.type movielens, criteo or clicks"
            )
        dense = shapes.get("dense", (0,))[0]
        more: Kwargs = {"fields": fields, "dense": dense, "hint": hint, "served": served}
        config.form(fields)
        if not served and 0 in fields.values():
            raise ConfigError(
                f"model.type {config.type} on a mesh needs tables of a given size, but the data "
                "keeps ids of 64 bits: set data.hash_size, or strategy.type hybrid with most_rows"
            )
        return lambda rngs: config.build(rngs, **more)
    image = shapes.get("image")
    if image is None or len(image) != 3 or classes is None:
        do = "set data.classes" if image and classes is None else "choose data of images"
        raise ConfigError(
            f"model.type {config.type} needs images [height, width, channels] with classes, "
            f"but the data gives {dict(shapes)} and {classes or 'no number of'} classes: {do}"
        )
    shape = (image[0], image[1], image[2])
    own = _for_blocks(config, device) if isinstance(config, VitConfig) else {}
    return lambda rngs: config.build(rngs, shape=shape, classes=classes, hint=hint, **own)


def _for_blocks(config: GptConfig | BertConfig | VitConfig, device: Any | None) -> Kwargs:
    """Return the keyword arguments of a transformer's `build` that depend on the devices.

    Raises:
      ConfigError: the model's `remat` offloads activations, which the devices do not support.
    """
    if device is None:
        return {"platform": None, "family": ""}
    known = find_device(device.device_kind) if device.platform == "tpu" else None
    check_memory(config.remat, [memory.kind for memory in device.addressable_memories()])
    return {"platform": device.platform, "family": known.name if known else ""}


def offloads_of(config: ModelConfig) -> bool:
    """Return whether the model's `remat` offloads any activations to the host's memory."""
    return isinstance(config, GptConfig | BertConfig | VitConfig) and offloads(config.remat)


def model_notices(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return a sentence for each setting of the model that has no effect with these data.

    Args:
      shapes: the shape of each field of an example of the data, by the field's name.
    """
    window = config.attention_window if isinstance(config, GptConfig) else None
    length = shapes.get("segments", (None,))[-1]
    if window is None or length is None or window < length - 1:
        return ()
    return (
        f"model.attention_window {window} has no effect: a sequence has only {length} tokens, so "
        "each token attends to itself and all tokens before it in any case; set a smaller window, "
        "or null",
    )


def choose_loss(
    config: ModelConfig, given: LossConfig | None, shapes: Mapping[str, tuple[int, ...]]
) -> LossConfig:
    """Return the loss to minimize: `given`, or the default loss of the model if `given` is None.

    Args:
      shapes: the shape of each field of an example of the data, by the field's name.

    Raises:
      ConfigError: the loss does not fit the model or the data; no loss is given, and the model is
        the user's.
    """
    own = default_loss(config)
    found = given or own
    if found is None:
        raise ConfigError("an imported model needs a loss: set loss, such as {type: next_token}")
    check_fields(found, shapes)
    fits = (own.type, "import") if own is not None else ()
    if isinstance(config, GptConfig):
        fits = (*fits, "dpo")
        if config.experts is not None and own is not None and found.type != own.type:
            raise ConfigError(
                f"loss.type {found.type} lacks the term that balances the load of model.experts: "
                f"use loss.type {own.type}"
            )
    if isinstance(config, MfConfig | DlrmConfig):
        fits = (*fits, "squared_error", "click")
    if own is not None and found.type not in fits:
        raise ConfigError(
            f"loss.type {found.type} does not work with model.type {config.type}; use loss.type "
            f"{own.type}, or a loss of your own, {{type: import, path: ...}}"
        )
    return found


_CLASSES = ClassificationConfig(type="classification")
_DEFAULT_LOSSES: Mapping[type, LossConfig] = {
    GptConfig: NextTokenConfig(type="next_token"),
    BertConfig: MaskedTokensConfig(type="masked_tokens"),
    MfConfig: SquaredErrorConfig(type="squared_error"),
    DlrmConfig: ClickConfig(type="click"),
    **dict.fromkeys((MlpConfig, CnnConfig, ResnetConfig, VitConfig), _CLASSES),
}


def default_loss(config: ModelConfig) -> LossConfig | None:
    """Return the default loss of a model, or None for a model that the user imports."""
    if isinstance(config, BertConfig) and config.head == "classes":
        return _CLASSES
    return _DEFAULT_LOSSES.get(type(config))
