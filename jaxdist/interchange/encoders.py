"""The families of published encoders of text (bert) and of images (vit, resnet)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxdist.errors import ConfigError
from jaxdist.interchange.family import OTHER_MODEL, Inputs, Row, positive, read_family, table_rows
from jaxdist.types import JsonObject

CLASSES = 2
"""The number of classes if config.json does not state the number."""


_BERT_HEADS: Mapping[str, str] = {
    "BertForMaskedLM": "tokens",
    "BertForPreTraining": "tokens",
    "BertForSequenceClassification": "classes",
    "BertModel": "classes",
}


def _bert_head(config: Mapping[str, Any]) -> str:
    """Return the option `head` of a bert, given its config.json.

    Raises:
      ConfigError: jaxdist's model does not have the head of the architecture.
    """
    name = (config.get("architectures") or ["BertModel"])[0]
    if name not in _BERT_HEADS:
        raise ConfigError(
            f"config.json: architectures names {name}, but model.type bert computes "
            f"{', '.join(_BERT_HEADS)}: set architectures to [BertModel] to take the encoder alone"
        )
    return _BERT_HEADS[name]


def _bert(config: Mapping[str, Any]) -> JsonObject:
    return {"head": _bert_head(config)}


def _written_bert(options: JsonObject) -> JsonObject:
    named = {"tokens": "BertForMaskedLM", "classes": "BertForSequenceClassification"}
    return {"architectures": [named[str(options["head"])]]}


def _bert_inputs(config: Mapping[str, Any]) -> Inputs:
    classes = _classes(config) if _bert_head(config) == "classes" else 0
    return Inputs(positive(config, "vocab_size"), classes)


def _written_bert_inputs(given: Inputs) -> JsonObject:
    more = _written_classes(given.classes) if given.classes else {}
    return {"vocab_size": given.vocab_size, **more}


def _classes(config: Mapping[str, Any]) -> int:
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    return positive(config, "num_labels", CLASSES)


def _written_classes(classes: int) -> JsonObject:
    named = {str(i): f"LABEL_{i}" for i in range(classes)}
    return {"id2label": named, "label2id": {name: int(i) for i, name in named.items()}}


def _vit_rows(config: Mapping[str, Any]) -> Mapping[str, Row]:
    patch, rows = str(positive(config, "patch_size")), table_rows("vit")
    return {n: row._replace(layout=row.layout.replace("{patch}", patch)) for n, row in rows.items()}


def _images(config: Mapping[str, Any]) -> Inputs:
    side, channels = positive(config, "image_size", 224), positive(config, "num_channels", 3)
    return Inputs(classes=_classes(config), image=(side, side, channels))


def _written_vit_inputs(given: Inputs) -> JsonObject:
    height, width, channels = given.image or (0, 0, 0)
    if height != width:
        raise ConfigError(
            f"the images of this model have {height} x {width} pixels, but config.json of the "
            "family vit can describe only square images: train the model on square images "
            "(data.size)"
        )
    return {"image_size": height, "num_channels": channels, **_written_classes(given.classes)}


def _resnet_rows(config: Mapping[str, Any]) -> Mapping[str, Row]:
    """Return the table of names for a resnet, whose blocks are not stacked."""
    rows = _convolved("stem", "stem_norm", "resnet.embedder.embedder")
    each = 3 if config["layer_type"] == "bottleneck" else 2
    places = [(s, b) for s, count in enumerate(config["depths"]) for b in range(count)]
    for at, (stage, inner) in enumerate(places):
        own = f"blocks/{at}"
        tensor = f"resnet.encoder.stages.{stage}.layers.{inner}"
        for i in range(each):
            parts = f"{own}/convolutions/{i}", f"{own}/norms/{i}", f"{tensor}.layer.{i}"
            rows |= _convolved(*parts)
        if not inner:
            rows |= _convolved(f"{own}/shortcut/0", f"{own}/shortcut/1", f"{tensor}.shortcut")
    return {
        **rows,
        "output/kernel": Row("classifier.1.weight", "C D -> D C", absent=True),
        "output/bias": Row("classifier.1.bias", "C", absent=True),
    }


def _convolved(convolution: str, norm: str, tensor: str) -> dict[str, Row]:
    """Return the entries of the table of names for a convolution and the batch norm after it."""
    norms = {"scale": "weight", "bias": "bias"}
    kept = {"mean": "running_mean", "var": "running_var"}
    return {
        f"{convolution}/kernel": Row(f"{tensor}.convolution.weight", "O I i j -> i j I O"),
        **{f"{norm}/{o}": Row(f"{tensor}.normalization.{n}", "O") for o, n in norms.items()},
        **{f"buffers/{norm}/{o}": Row(f"{tensor}.normalization.{n}", "O") for o, n in kept.items()},
    }


def _resnet(config: Mapping[str, Any]) -> JsonObject:
    kind, sizes, width = config["layer_type"], config["hidden_sizes"], config["embedding_size"]
    if kind not in ("basic", "bottleneck"):
        raise ConfigError(
            f"config.json: layer_type is {kind!r}, but model.type resnet computes 'basic' or "
            f"'bottleneck'. {OTHER_MODEL}"
        )
    wanted = [width * (4 if kind == "bottleneck" else 1) * 2**i for i in range(len(sizes))]
    if sizes != wanted or len(sizes) != len(config["depths"]):
        raise ConfigError(
            f"config.json: hidden_sizes is {sizes} with depths {config['depths']}, but stages of "
            f"model.type resnet double the channels, from embedding_size {width}: {wanted}. "
            f"{OTHER_MODEL}"
        )
    return {"bottleneck": kind == "bottleneck"}


def _written_resnet(options: JsonObject) -> JsonObject:
    blocks: Any = options["blocks"]
    width: Any = options["width"]
    large = bool(options["bottleneck"])
    sizes = [width * (4 if large else 1) * 2**i for i in range(len(blocks))]
    stages = [f"stage{i}" for i in range(1, len(blocks) + 1)]
    return {
        "hidden_sizes": sizes,
        "layer_type": "bottleneck" if large else "basic",
        "stage_names": ["stem", *stages],
        "out_features": stages[-1:],
        "out_indices": [len(stages)],
    }


def _resnet_inputs(config: Mapping[str, Any]) -> Inputs:
    # A resnet takes images of any size, so this is only the size of the images that the published
    # networks were trained on.
    return _images({**config, "image_size": 224})


def _written_resnet_inputs(given: Inputs) -> JsonObject:
    return {"num_channels": (given.image or (0, 0, 3))[2], **_written_classes(given.classes)}


ENCODERS = (
    read_family(
        "bert",
        more=_bert,
        written=_written_bert,
        inputs=_bert_inputs,
        written_inputs=_written_bert_inputs,
    ),
    read_family("vit", rows=_vit_rows, inputs=_images, written_inputs=_written_vit_inputs),
    read_family(
        "resnet",
        rows=_resnet_rows,
        more=_resnet,
        written=_written_resnet,
        inputs=_resnet_inputs,
        written_inputs=_written_resnet_inputs,
    ),
)
"""The families of published encoders of text and images."""
