"""The rules that derive a reduced config, on which a plan is compared with a single device.

A reduced config has a smaller model and fewer devices. A reduced dim and the full dim have the same
remainder modulo the number of devices: a size that the devices divide evenly is still divided
evenly, and an odd size remains odd. Tied parameters, stacked layers, grouped heads, pipeline
schedules and the optimizer do not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxdist.experiment import Experiment
from jaxdist.mesh import describe_mesh
from jaxdist.parallel.pipeline.model.pipeline import Pipeline
from jaxdist.parity.cells import DEVICES
from jaxdist.parity.run import in_full_precision, in_half_precision
from jaxdist.types import Json, JsonObject

STEPS = 8
"""The number of steps in a reduced config, at least as many as a comparison takes."""
WHOLE_BELOW, BUCKET_BYTES = 64, 1024
"""The largest values of `zero.whole_below` and `reduce.bucket_bytes` in a reduced config. With
larger values, all tensors of a reduced model would be kept whole, or be sent in a single bucket."""
LEAST: Mapping[str, Mapping[str, int]] = {
    "mlp": {"hidden": 8},
    "cnn": {"channels": 4, "hidden": 8},
    "gpt": {"mlp": 8},
}
"""The least sizes of the dims of each type of model whose dims are independent."""
EPS = 1e-3
"""The least `eps` of an optimizer in a reduced config: see `jaxdist.parity.run`."""


def small(size: int, parts: int, least: int) -> int:
    """Return the smallest size that is at least `least` and equals `size` modulo `parts`.

    If `size` is smaller than `least`, the result is `size`.

    >>> small(4096, 8, 16), small(257, 8, 32), small(5, 8, 16)
    (16, 33, 5)
    """
    return size if size <= least else min(size, least + (size - least) % parts)


def shrunk(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a mesh with the axes of `sizes` and at most `DEVICES` devices, if possible.

    The currently largest axis is divided by its smallest prime factor until the mesh is small
    enough. A division that would leave an axis of size 1 is not made: the result then has more than
    `DEVICES` devices.

    >>> shrunk({"data": 64, "tensor": 8})
    {'data': 2, 'tensor': 4}
    """
    found = dict(sizes)
    while math.prod(found.values()) > DEVICES:
        axis = max(found, key=lambda name: found[name])
        factor = next(n for n in range(2, found[axis] + 1) if found[axis] % n == 0)
        if factor == found[axis]:
            break
        found[axis] //= factor
    return found


def reduced(experiment: Experiment) -> tuple[JsonObject, tuple[str, ...]]:
    """Return the sections of a reduced config, and notes on what the reduced config leaves out.

    The reduced config computes in float32. The error of a plan that forgets a term of a sum is then
    larger than the differences by rounding.
    """
    whole: JsonObject = experiment.config.model_dump(mode="json")
    full = dict(experiment.layout.mesh.shape)
    sizes = shrunk(full)
    parts = math.prod(sizes.values())
    compressed = whole["parallel"]["compression"] is not None
    model = _model(experiment, whole["model"], parts)
    sections: JsonObject = {
        **{name: whole[name] for name in ("loss", "sharding", "strategy", "seed")},
        "mesh": {**_mesh(sizes), "fake_devices": parts},
        "train": _train(experiment, sizes),
        "model": model,
        "data": _data(experiment, whole, parts, model),
        "parallel": _parallel(whole["parallel"]),
        "optim": _optim(whole["optim"], compressed),
    }
    notes = {
        f"mesh {describe_mesh(full)} as {describe_mesh(sizes)}": full != sizes,
        "computed in float32": in_half_precision(whole),
        "messages with whole gradients: the proof does not cover what a codec loses": compressed,
        "one batch size, without train.batch_ramp": whole["train"]["batch_ramp"],
        "one batch size, without train.phases": whole["train"]["phases"],
    }
    return in_full_precision(sections), tuple(note for note, holds in notes.items() if holds)


def _mesh(sizes: Mapping[str, int]) -> JsonObject:
    found: JsonObject = {}
    for axis, size in sizes.items():
        # An axis over two networks consists of two axes of the mesh, such as `data_dcn` and
        # `data_ici`.
        name, _, network = axis.partition("_")
        found[name] = {**found.get(name, {}), network: size} if network else size
    return found


def _train(experiment: Experiment, sizes: Mapping[str, int]) -> JsonObject:
    """Return the reduced section `train`, with a few rows per microbatch on each device.

    The number of rows per microbatch and device remains odd if it was odd.

    Args:
      experiment: the experiment at its full size.
      sizes: the sizes of the reduced mesh axes.
    """
    layout, train, stages = experiment.layout, experiment.config.train, sizes.get("stage", 1)
    pieces = small(train.microbatches, stages, max(2 * stages, 4))
    axes = layout.names_of("batch")
    split, now = (math.prod(mesh[axis] for axis in axes) for mesh in (layout.mesh.shape, sizes))
    rows = max(1, train.batch_size // (split * train.microbatches))
    unit = math.lcm(now, experiment.config.parallel.shards or 1) * pieces
    return {"steps": STEPS, "batch_size": unit * small(rows, 2, 2), "microbatches": pieces}


def _model(experiment: Experiment, model: Json, parts: int) -> JsonObject:
    """Return the section `model` with reduced dims.

    Only the dims of gpt, cnn and mlp are known. The section of any other model is unchanged.

    Args:
      experiment: the experiment at its full size.
      model: the section `model`.
      parts: the number of devices. A reduced dim has the same remainder modulo this number as the
        full dim.
    """
    found = {**model}
    for name, least in LEAST.get(model["type"], {}).items():
        if size := model[name]:
            sizes = [small(n, parts, least) for n in (size if isinstance(size, list) else [size])]
            found[name] = sizes if isinstance(size, list) else sizes[0]
    if model["type"] != "gpt":
        return found
    heads, kv_heads = model["heads"], model["kv_heads"] or model["heads"]
    found["kv_heads"] = small(kv_heads, parts, 2)
    found["heads"] = found["kv_heads"] * small(heads // kv_heads, 2, 2)
    head = small(model["head_size"] or model["embed"] // heads, 2, 4)
    found["head_size"] = model["head_size"] and head
    wide, narrow = small(model["embed"], parts, 16), found["heads"] * head
    found["embed"] = wide if model["head_size"] else narrow
    if (experts := model.get("experts")) and experts.get("mlp"):
        found["experts"] = {**experts, "mlp": small(experts["mlp"], parts, 8)}
    layers, window = _layers(experiment, model), model["attention_window"]
    return found | {
        # Attention is computed block by block if devices share a sequence.
        "attention": "plain" if experiment.layout.split is None else "blockwise",
        "vocab_multiple": small(model["vocab_multiple"], parts, parts),
        "layers": layers,
        "scan_unroll": min(model["scan_unroll"], layers),
        "attention_window": window and small(window, 2, 3),
    }


def _layers(experiment: Experiment, model: Json) -> int:
    compute = experiment.program.compute
    chunks = len(compute.ticks.placement) if isinstance(compute, Pipeline) else 1
    listed = getattr(experiment.config.parallel.pipeline, "layers", None) is not None
    # The number of layers is kept if a list in the config has an entry for each layer or chunk.
    kept = listed or isinstance(model["remat"], list)
    return model["layers"] if kept else small(model["layers"], chunks, max(2, chunks))


def _data(experiment: Experiment, whole: JsonObject, parts: int, model: Any) -> JsonObject:
    """Return a section `data` for synthetic data with the fields of the config's data.

    A section with `type: import` is unchanged.

    Args:
      experiment: the experiment at its full size.
      whole: the complete config of the experiment.
      parts: the number of devices. A reduced dim has the same remainder modulo this number as the
        full dim.
      model: the reduced section `model`.
    """
    data, loader = whole["data"], experiment.loader.batch_shapes
    if data["type"] == "import":
        return data
    # 13 is not a multiple of the batch size, so evaluation pads the last held-out batch.
    heldout = 0 if experiment.heldout is None else 13
    found = {"type": "synthetic", "examples": 4096, "heldout_examples": heldout}
    dataset = experiment.dataset
    if "tokens" in loader:
        multiple = model.get("vocab_multiple", 1)
        chunks = (whole["loss"] or {}).get("chunks", 1)
        length = loader["tokens"].shape[1] - 1
        assert dataset.vocab_size is not None, "tokens have a vocabulary"
        vocab = small(dataset.vocab_size, math.lcm(parts, multiple), 32)
        window = small(length, math.lcm(parts, chunks), math.lcm(8, chunks))
        return {**found, "kind": "tokens", "vocab_size": vocab, "window": window}
    _, height, width, channels = loader["image"].shape
    shape = {"height": small(height, 4, 8), "width": small(width, 4, 8), "channels": channels}
    transform = data.get("transform")
    return found | shape | {"kind": "images", "classes": dataset.classes, "transform": transform}


def _parallel(parallel: Json) -> JsonObject:
    found, zero, reduce = {**parallel}, parallel["zero"], parallel["reduce"]
    if parallel["compression"] is not None:
        found["compression"] = {"type": "whole", "axis": parallel["compression"]["axis"]}
    found["reduce_dtype"], below = None, min(zero["whole_below"], WHOLE_BELOW)
    found["zero"] = {**zero, "gather_dtype": None, "whole_below": below}
    # If `bucket_bytes` is null or "auto", it is not changed.
    if reduce and isinstance(reduce.get("bucket_bytes"), int):
        found["reduce"] = {**reduce, "bucket_bytes": min(reduce["bucket_bytes"], BUCKET_BYTES)}
    return found


def _optim(optim: Json, compressed: bool) -> JsonObject:
    """Return the section `optim` with a constant learning rate and with `eps` of at least `EPS`.

    A comparison takes too few steps for a schedule of the learning rate.

    Args:
      optim: the section of the config.
      compressed: whether gradients are compressed. Compression skips steps that are not finite, so
        the single device must skip these steps too.
    """
    changed: JsonObject = {"bf16_moments": False, "schedule": {"type": "constant"}}
    if compressed:
        changed["skip_nonfinite"] = True
    if isinstance(optim.get("eps"), float):
        changed["eps"] = max(optim["eps"], EPS)
    return {name: changed.get(name, value) for name, value in optim.items()}
