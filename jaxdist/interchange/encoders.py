"""Families of encoders of text (bert) and of images (vit, resnet).

Layouts use the letters of `jaxdist.interchange.families` and the following letters: T kinds of
tokens, C classes, I input channels, O output channels, and i rows and j columns of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxdist.errors import ConfigError
from jaxdist.interchange.family import OTHER_MODEL, Family, Inputs, Row, block, positive
from jaxdist.types import JsonObject

CLASSES = 2
"""The number of classes if config.json does not state the number."""


def _dense(own: str, tensor: str, layout: str, *, absent: bool = False) -> dict[str, Row]:
    """Return the entries of the table of names for a kernel and its bias.

    Args:
      own: the start of the names of the kernel and the bias.
      tensor: the start of the names of the tensors that fill the kernel and the bias.
      layout: the layout of the kernel.
      absent: as in `Row`.
    """
    kernel, bias = (own, f"{own}_bias") if own.startswith("blocks/") else (
        f"{own}/kernel", f"{own}/bias"
    )  # fmt: skip
    out = layout.partition("->")[2].split()[-1]
    return {
        kernel: Row(f"{tensor}.weight", layout, absent=absent),
        bias: Row(f"{tensor}.bias", out, absent=absent),
    }


def _heads(own: str, tensor: str) -> dict[str, Row]:
    """Return the entries of the table of names for the kernel and bias of a projection to heads."""
    return {
        f"blocks/attention/{own}": Row(f"{tensor}.weight", "(H d) D -> D H d"),
        f"blocks/attention/{own}_bias": Row(f"{tensor}.bias", "(H d) -> H d"),
    }


def _norm(own: str, tensor: str) -> dict[str, Row]:
    return {f"{own}/scale": Row(f"{tensor}.weight", "D"), f"{own}/bias": Row(f"{tensor}.bias", "D")}


def _encoder(prefix: str, norms: tuple[str, str]) -> dict[str, Row]:
    """Return the entries of the table of names for a block of bert or vit.

    Args:
      prefix: the start of the names of the block's tensors.
      norms: the names of the two norms.
    """
    inner = f"{prefix}attention."
    inner += "self." if norms[0].startswith("attention.") else "attention."
    return {
        **{k: v for own in ("query", "key", "value") for k, v in _heads(own, inner + own).items()},
        **block(
            prefix,
            {
                "attention/out": ("attention.output.dense.weight", "D (H d) -> H d D"),
                "attention/out_bias": ("attention.output.dense.bias", "D"),
            },
        ),
        **_dense("blocks/mlp/up", f"{prefix}intermediate.dense", "F D -> D F"),
        **_dense("blocks/mlp/down", f"{prefix}output.dense", "D F -> F D"),
        **_norm("blocks/attention_norm", prefix + norms[0]),
        **_norm("blocks/mlp_norm", prefix + norms[1]),
    }


BERT_ROWS: Mapping[str, Row] = {
    "embedding": Row("bert.embeddings.word_embeddings.weight", "V D"),
    "positions": Row("bert.embeddings.position_embeddings.weight", "P D"),
    "kinds": Row("bert.embeddings.token_type_embeddings.weight", "T D"),
    **_norm("embed_norm", "bert.embeddings.LayerNorm"),
    **_encoder("bert.encoder.layer.{layer}.", ("attention.output.LayerNorm", "output.LayerNorm")),
    "transform": Row("cls.predictions.transform.dense.weight", "O D -> D O"),
    "transform_bias": Row("cls.predictions.transform.dense.bias", "O"),
    **_norm("norm", "cls.predictions.transform.LayerNorm"),
    "output_bias": Row("cls.predictions.bias", "V"),
    **_dense("pooler", "bert.pooler.dense", "O D -> D O"),
    **_dense("classifier", "classifier", "C D -> D C", absent=True),
}
"""The rows of bert for all kinds of output heads; a model uses the rows of one output head."""

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


VIT_ROWS: Mapping[str, Row] = {
    # The parameter has the pixels of a patch row by row, and the channels of a pixel are adjacent.
    "patches/kernel": Row(
        "vit.embeddings.patch_embeddings.projection.weight",
        "D I i={patch} j={patch} -> (i={patch} j={patch} I) D",
    ),
    "patches/bias": Row("vit.embeddings.patch_embeddings.projection.bias", "D"),
    "class_token": Row("vit.embeddings.cls_token", "1 P D -> P D", 0),
    "positions": Row("vit.embeddings.position_embeddings", "1 P D -> P D", 0),
    **_encoder("vit.encoder.layer.{layer}.", ("layernorm_before", "layernorm_after")),
    **_norm("norm", "vit.layernorm"),
    **_dense("output", "classifier", "C D -> D C", absent=True),
}
"""The rows of vit, in which {patch} is replaced by the side of a patch."""


def _vit_rows(config: Mapping[str, Any]) -> Mapping[str, Row]:
    patch = str(positive(config, "patch_size"))
    return {n: row._replace(layout=row.layout.replace("{patch}", patch)) for n, row in
            VIT_ROWS.items()}  # fmt: skip


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
    """Return the rows of a resnet, whose blocks are not stacked."""
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
    return {**rows, **_dense("output", "classifier.1", "C D -> D C", absent=True)}


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
    # A resnet takes images of any size; the published networks were trained on 224 pixels.
    return _images({**config, "image_size": 224})


def _written_resnet_inputs(given: Inputs) -> JsonObject:
    return {"num_channels": (given.image or (0, 0, 3))[2], **_written_classes(given.classes)}


_HEADS = {"hidden_size": "embed", "num_attention_heads": "heads", "intermediate_size": "mlp"}
_SIZES = {"num_hidden_layers": "layers", **_HEADS, "layer_norm_eps": "norm_epsilon"}
ENCODERS = (
    Family(
        "bert",
        "BertForMaskedLM",
        BERT_ROWS,
        {**_SIZES, "max_position_embeddings": "positions", "type_vocab_size": "token_types"},
        {},
        {
            "hidden_act": ("gelu",),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512},
        ("position_ids", "seq_relationship.weight", "seq_relationship.bias",
         "predictions.decoder.weight", "predictions.decoder.bias",
         "pooler.dense.weight", "pooler.dense.bias"),
        "bert.",
        more=_bert,
        written=_written_bert,
        kind="bert",
        inputs=_bert_inputs,
        written_inputs=_written_bert_inputs,
        older={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ),
    Family(
        "vit",
        "ViTForImageClassification",
        _vit_rows,
        {**_SIZES, "patch_size": "patch"},
        {"class_token": True},
        {"hidden_act": ("gelu",), "qkv_bias": (True,)},
        {"layer_norm_eps": 1e-12, "patch_size": 16},
        ("vit.pooler.dense.weight", "vit.pooler.dense.bias"),
        "vit.",
        kind="vit",
        inputs=_images,
        written_inputs=_written_vit_inputs,
    ),
    Family(
        "resnet",
        "ResNetForImageClassification",
        _resnet_rows,
        {"depths": "blocks", "embedding_size": "width"},
        {"stem": "imagenet", "norm": "batch"},
        {
            "hidden_act": ("relu",),
            "downsample_in_first_stage": (False,),
            "downsample_in_bottleneck": (False,),
        },
        {
            "embedding_size": 64,
            "hidden_sizes": [256, 512, 1024, 2048],
            "depths": [3, 4, 6, 3],
            "layer_type": "bottleneck",
        },
        ("num_batches_tracked",),
        "resnet.",
        more=_resnet,
        written=_written_resnet,
        kind="resnet",
        inputs=_resnet_inputs,
        written_inputs=_written_resnet_inputs,
    ),
)  # fmt: skip
"""The families of encoders."""
