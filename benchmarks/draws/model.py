"""Random models with their data, and random optimizers, as sections of a config.

Learning rates are large, so that parameters change by far more than their last digits. Optimizers
that divide by the size of a gradient have a large `eps`, for the reason in `jaxdist.parity.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

from benchmarks.draws.imported import Tower, equinox_net, linen_net
from jaxdist.optim.lamb import LambVariant
from jaxdist.optim.lars import LarsVariant
from jaxdist.optim.muon import Scale
from jaxdist.types import Json, JsonObject

Sections = JsonObject
WHOLE_MODELS = ("linen", "equinox")
"""The keys of `MODELS` for models of other libraries. No mesh axis splits their parameters."""
IMPORTED: Mapping[str, Callable[..., Any]] = {
    "tower": Tower,
    "linen": linen_net,
    "equinox": equinox_net,
}
"""The class or function of each imported model, by its key in `MODELS`."""
NARROWEST = 6
"""The smallest width of a gpt."""


@dataclass(frozen=True)
class ModelNeeds:
    """The requirements of a draw's two plans on their model.

    Attributes:
      tensor: the least common multiple of the sizes of axis tensor in both plans. The sizes of the
        model's split dims must be multiples of this number.
      chunks: the least number of layers, which is the number of chunks of a pipeline.
      whole: whether both plans compute all rows of a batch together, so that batch statistics are
        exact.
    """

    tensor: int
    chunks: int
    whole: bool


def model_key(model: Mapping[str, Json]) -> str:
    """Return the key of `MODELS` for an imported model, or the type of any other model.

    Args:
      model: the section `model`.
    """
    if model["type"] != "import":
        return model["type"]
    # The import paths in recorded reports name older modules, so only the name after `:` counts.
    name = model["path"].partition(":")[2]
    return next(key for key, made in IMPORTED.items() if made.__name__ == name)


def has_batch_norm(model: Mapping[str, Json]) -> bool:
    """Return whether a section `model` describes a model with batch norm.

    Batch norm computes statistics over the rows of a batch.
    """
    if model["type"] == "resnet":
        return model["norm"] == "batch"
    return bool(model.get("args", {}).get("batch_norm"))


def layers_of(model: Mapping[str, Json]) -> int:
    """Return the number of layers that a pipeline distributes over its stages.

    The first and last layers of a cnn and a resnet count too.

    >>> layers_of({"type": "cnn", "channels": [4, 4]}), layers_of({"type": "gpt", "layers": 3})
    (4, 3)
    """
    if model["type"] == "cnn":
        return len(model["channels"]) + 2
    if model["type"] == "resnet":
        return sum(model["blocks"]) + 2
    if model_key(model) in WHOLE_MODELS:
        return 1
    return len(model["hidden"]) if model["type"] == "mlp" else model.get("args", model)["layers"]


def embeds_of(model: Mapping[str, Json]) -> list[int]:
    """Return the sizes of a model's dims that are named "embed", which no default rule splits.

    >>> embeds_of({"type": "mlp", "hidden": [4, 3, 2, 5]})
    [3, 5]
    """
    if model["type"] == "mlp":
        return model["hidden"][1::2]
    split = model["type"] not in ("cnn", "resnet") and model_key(model) not in WHOLE_MODELS
    return [model.get("args", model)["embed"]] if split else []


def _gpt(random: Random, needs: ModelNeeds) -> Sections:
    """Draw a gpt and its data.

    Widths may be odd, heads may be grouped, and the stages need not divide the number of layers.
    """
    groups, head_dim = random.choice((1, 1, 2)), random.choice((2, 4, 6))
    kv_heads = needs.tensor * random.choice((1, 1, 2) if needs.tensor < 4 else (1,))
    # Values that are normalized over only two features are +-1, and small changes flip their signs.
    # Heads therefore have more features.
    head_dim = max(head_dim, 2 * -(-NARROWEST // (2 * kv_heads * groups)))
    layers = random.randint(needs.chunks, needs.chunks + 3)
    model = {
        "type": "gpt",
        "layers": layers,
        "embed": kv_heads * groups * head_dim,
        "heads": kv_heads * groups,
        "kv_heads": kv_heads,
        "mlp": needs.tensor * random.choice((1, 3, 5, 8)),
        "vocab_multiple": needs.tensor * random.choice((1, 2, 3)),
        "tied_head": random.random() < 0.5,
        "isolate_documents": random.random() < 0.3,
        "attention": "plain",
        "scan_unroll": random.choice((1, 1, 1, min(2, layers))),
    }
    data = {
        "kind": "tokens",
        "window": random.choice((4, 5, 8, 12)),
        "vocab_size": random.randint(3, 40),
    }
    return {"model": model, "data": _synthetic(random, data)}


def _mlp(random: Random, needs: ModelNeeds) -> Sections:
    """Draw an MLP and its data; axis tensor splits every second width of the MLP."""
    widths = [
        (needs.tensor, 1)[i % 2] * random.choice((2, 3, 5, 8)) for i in range(random.randint(1, 4))
    ]
    return {"model": {"type": "mlp", "hidden": widths}, "data": _images(random)}


def _cnn(random: Random, needs: ModelNeeds) -> Sections:
    """Draw a CNN and its data.

    A pipeline distributes the convolutions and two other layers.
    """
    count = max(random.randint(1, 3), needs.chunks - 2)
    model = {
        "type": "cnn",
        "channels": [needs.tensor * random.choice((1, 2, 3)) for _ in range(count)],
        "hidden": needs.tensor * random.choice((2, 3, 5, 8)),
    }
    return {"model": model, "data": _images(random)}


def resnet(random: Random, needs: ModelNeeds) -> Sections:
    """Draw the section `model` of a ResNet, with batch norm if all rows are computed together."""
    # More stages would leave one or two pixels, too few values for the statistics of a norm.
    stages = random.randint(1, 2)
    blocks = [max(1, -(-(needs.chunks - 2) // stages))] * stages
    return {
        "type": "resnet",
        "blocks": blocks,
        "bottleneck": random.random() < 0.3,
        "width": needs.tensor * random.choice((2, 3)),
        "stem": random.choice(("cifar", "cifar", "imagenet")),
        "norm": "batch" if needs.whole else "group",
        "groups": 1,
    }


def bert(random: Random, common: Sections) -> Sections:
    """Draw a bert with the sizes and the data of a drawn gpt; tokens of the data are masked.

    Args:
      random: the random stream.
      common: the sections of the drawn gpt.
    """
    own = common["model"]
    data = common["data"]
    model = {name: own[name] for name in ("layers", "embed", "heads", "vocab_multiple")}
    mlp = own["mlp"] * random.choice((1, 2))
    isolated = {"isolate_documents": own["isolate_documents"], "scan_unroll": own["scan_unroll"]}
    return {
        "model": {"type": "bert", **model, "mlp": mlp, "positions": data["window"], **isolated},
        "data": {**data, "masking": {"rate": random.choice((0.2, 0.5))}},
    }


def vit(random: Random, common: Sections) -> Sections:
    """Draw a vision transformer with the sizes of a drawn gpt, and images for it.

    Args:
      random: the random stream.
      common: the sections of the drawn gpt.
    """
    own, patch = common["model"], random.choice((1, 2, 3))
    model = {name: own[name] for name in ("layers", "embed", "heads", "scan_unroll", "attention")}
    data = _images(random)
    sides = {side: patch * random.choice((1, 2, 3)) for side in ("height", "width")}
    return {
        "model": {"type": "vit", "patch": patch, **model, "mlp": own["mlp"]},
        "data": {**data, **sides},
    }


def _tower(random: Random, needs: ModelNeeds) -> Sections:
    """Draw a `Tower` and its data.

    The tower has batch norm only if all rows of a batch are computed together.
    """
    data = _images(random)
    norm = needs.whole and random.random() < 0.8
    args = {
        "features": data["height"] * data["width"] * data["channels"],
        "classes": data["classes"],
        "layers": random.randint(needs.chunks, needs.chunks + 3),
        "embed": random.choice((3, 6, 7, 10)),
        "mlp": needs.tensor * random.choice((1, 3, 5)),
        "batch_norm": norm,
    }
    return _imported("tower", args, data, {"norm/*": [None]} if norm else {})


def _linen(random: Random, needs: ModelNeeds) -> Sections:
    """Draw a model of flax linen and its data; the dims of its parameters have no names."""
    data = _images(random)
    args = {
        "shape": [data["height"], data["width"], data["channels"]],
        "channels": random.choice((2, 3, 5)),
        "classes": data["classes"],
        "batch_norm": needs.whole and random.random() < 0.6,
    }
    return _imported("linen", args, data, {"*": "whole"})


def _equinox(random: Random, needs: ModelNeeds) -> Sections:
    """Draw a model of equinox and its data; the model maps a single example and not a batch."""
    del needs
    data = _images(random)
    args = {
        "features": data["height"] * data["width"] * data["channels"],
        "width": random.choice((3, 6, 7)),
        "classes": data["classes"],
    }
    return _imported("equinox", args, data, {"*": "whole"})


def _imported(kind: str, args: Sections, data: Sections, params: Sections) -> Sections:
    """Return the sections of an imported model.

    Args:
      kind: a key of `IMPORTED`.
      args: the keyword arguments of the model.
      data: the section `data`.
      params: the setting `sharding.params`, or {} to leave it out.
    """
    made = IMPORTED[kind]
    return {
        "model": {"type": "import", "path": f"{made.__module__}:{made.__name__}", "args": args},
        "data": data,
        "loss": {"type": "classification"},
        **({"sharding": {"params": params}} if params else {}),
    }


def _images(random: Random) -> Sections:
    data = {
        "kind": "images",
        "height": random.randint(3, 7),
        "width": random.randint(3, 7),
        "channels": random.randint(1, 3),
        "classes": random.randint(2, 11),
    }
    return _synthetic(random, data)


def _synthetic(random: Random, data: Sections) -> Sections:
    more = {"examples": 4096, "heldout_examples": 0, "seed": random.randrange(9)}
    return {"type": "synthetic", **data, **more}


MODELS: Mapping[str, Callable[[Random, ModelNeeds], Sections]] = {
    "gpt": _gpt,
    "cnn": _cnn,
    "mlp": _mlp,
    "tower": _tower,
    "linen": _linen,
    "equinox": _equinox,
}
"""The functions that draw the sections `model` and `data`, and any other sections that the model
needs."""


def optimizer(random: Random) -> Sections:
    """Draw a section `optim`.

    In some draws the optimizer clips gradients, skips steps that are not finite, or has a loss
    scale.
    """
    kind = random.choice([*OPTIMIZERS])
    found = {"type": kind, **OPTIMIZERS[kind](random)}
    if random.random() < 0.5:
        found["clip_norm"] = random.choice((0.1, 1.0))
    if random.random() < 0.2:
        found["loss_scale"] = {"type": "dynamic", "init_scale": 64.0, "growth_steps": 2}
    elif random.random() < 0.2:
        found["skip_nonfinite"] = True
    schedule: Sections = {"type": random.choice(("constant", "cosine", "linear"))}
    schedule["warmup_steps"] = random.choice((0, 2))
    return {**found, "schedule": schedule}


def _adamw(random: Random) -> Sections:
    decay = random.choice((0.0, 0.1))
    return {"learning_rate": 1e-2, "weight_decay": decay, "eps": 1e-3}


def _sgd(random: Random) -> Sections:
    return {
        "learning_rate": 0.1,
        "momentum": random.choice((0.0, 0.9)),
        "nesterov": random.random() < 0.5,
        "weight_decay": random.choice((0.0, 0.01)),
    }


def _lamb(random: Random) -> Sections:
    found = {"learning_rate": 1e-2, "variant": random.choice(get_args(LambVariant)), "eps": 1e-3}
    return {**found, **_layerwise(random)}


def _lars(random: Random) -> Sections:
    found = {"learning_rate": 0.3, "variant": random.choice(get_args(LarsVariant))}
    return {**found, "trust_coefficient": 0.1, **_layerwise(random)}


def _muon(random: Random) -> Sections:
    return {
        "learning_rate": 1e-2,
        "ns_steps": random.choice((2, 5)),
        "scale": random.choice(get_args(Scale)),
        "nesterov": random.random() < 0.5,
        "split_heads": random.random() < 0.5,
        "weight_decay": random.choice((0.0, 0.1)),
        "adamw": {"eps": 1e-3},
    }


def _layerwise(random: Random) -> Sections:
    found: Sections = {"weight_decay": random.choice((0.0, 0.01))}
    if random.random() < 0.5:
        found["exclude_vectors"] = random.random() < 0.5
    if random.random() < 0.2:
        found["layer_dims"] = []
    return found


OPTIMIZERS: Mapping[str, Callable[[Random], Sections]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lamb": _lamb,
    "lars": _lars,
    "muon": _muon,
}
