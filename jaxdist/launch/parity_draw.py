"""Configs at random: a model, how it is optimized, and two of the plans that it can be trained on.

A draw is a function of its seed alone, and plain data: sections as they stand in a config file.
Every dim is drawn so that the axes that split it divide it, and nothing that the table of validity
refuses is drawn; what is refused all the same has a reason that only the whole config shows.

Numbers are drawn for what rounding does to them as well: learning rates move parameters by far
more than their last digits, and what divides by the size of a gradient adds a large `eps`, as
`parity_run` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, get_args

from pydantic import TypeAdapter

from jaxdist.collectives.build import ReduceConfig
from jaxdist.errors import ConfigError
from jaxdist.launch.parity_cells import (
    ACTIVATIONS,
    REDUCTIONS,
    REMATS,
    SCHEDULES,
    SCOPES,
)
from jaxdist.launch.parity_tower import Tower
from jaxdist.launch.parity_trace import STEPS
from jaxdist.mesh import DCN, ICI
from jaxdist.optim.lamb import LambVariant
from jaxdist.optim.lars import LarsVariant
from jaxdist.parallel.validity import Facts, violations
from jaxdist.parallel.zero import Stage, ZeroConfig

DEVICES = 8
STAGES = 4
"""The most: a program for more takes long to compile, and has nothing new."""
WIDEST = 8
"""Into how many parts the tensor axes of a draw's two meshes split a dim between them."""
AXES_WEIGHTS = (0.5, 2, 4, 9)
"""How often a mesh is drawn, by how many axes it has: there are few with many."""
ALONE: Mapping[str, Any] = {"data": 1, "fake_devices": 1}
_REDUCE: TypeAdapter[Any] = TypeAdapter(ReduceConfig)
Sections = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How a model is trained: what of a config is not the model, its data and its optimizer.

    Attributes:
      mesh: the section; an axis may be split over two networks.
      tensor, stages: sizes of these axes, 1 where there is none.
      chunks: of the pipeline; 1 without.
    """

    mesh: Mapping[str, Any]
    data: int
    tensor: int
    stages: int
    chunks: int
    parallel: Mapping[str, Any]
    microbatches: int


@dataclass(frozen=True)
class Draw:
    """A config, and the same model and optimizer under a second plan.

    Attributes:
      seed: `draw` of it is this.
      sections: the config that is trained and compared with one device.
      reader: the config that loads what the first one saves.
    """

    seed: int
    sections: Sections
    reader: Sections


def draw(seed: int) -> Draw:
    """Two configs at random, equal for equal seeds.

    >>> draw(7) == draw(7), draw(7).sections == draw(8).sections
    (True, False)
    """
    random = Random(seed)
    kind = random.choice(["gpt", *MODELS])
    first = _plan(random, kind)
    second = _plan(random, kind)
    while math.lcm(first.tensor, second.tensor) > WIDEST:
        second = _plan(random, kind)
    tensor, chunks = math.lcm(first.tensor, second.tensor), max(first.chunks, second.chunks)
    model, data, layers = MODELS[kind](random, tensor, chunks)
    common = {
        "model": model,
        "data": {"type": "synthetic", **data, "examples": 4096, "heldout_examples": 0},
        "optim": _optimizer(random),
        "seed": random.randrange(100),
    }
    if kind == "tower":
        common["loss"] = {"type": "classification"}
    return Draw(seed, *(_config(random, common, plan, layers) for plan in (first, second)))


def name_of(model: Mapping[str, Any]) -> str:
    """The key of `MODELS` that a model's section was drawn by."""
    return "tower" if model["type"] == "import" else model["type"]


def alone(sections: Mapping[str, Any]) -> Sections:
    """The same training on one device: the reference of a draw."""
    kept = ("data", "loss", "optim", "seed")
    plain = {name: sections[name] for name in kept if name in sections}
    model = {name: value for name, value in sections["model"].items() if name != "remat"}
    train = {**sections["train"], "microbatches": 1}
    return {**plain, "model": model, "train": train, "mesh": dict(ALONE)}


def _config(random: Random, common: Sections, plan: Plan, layers: int) -> Sections:
    """The whole config of a plan: what it chooses for the model's sizes comes last."""
    model, parallel = dict(common["model"]), dict(plan.parallel)
    if model["type"] == "gpt":
        # What is gathered ahead keeps the inputs of layers alone.
        policies = ["full"] if parallel["zero"].get("prefetch") else [*REMATS]
        model["remat"] = REMATS[random.choice(policies)]
        if isinstance(model["remat"], tuple):
            model["remat"] = [*model["remat"]][:layers]
    if plan.chunks > 1 and random.random() < 0.3:
        counts = _composition(random, layers, plan.chunks)
        parallel["pipeline"] = {**parallel["pipeline"], "layers": counts}
    rows = random.choice((1, 1, 2, 3)) * plan.data * plan.microbatches
    return {
        **common,
        "model": model,
        "train": {"steps": STEPS, "batch_size": rows, "microbatches": plan.microbatches},
        "mesh": plan.mesh,
        "sharding": {"rules": _rules(random, model, common["data"], plan)},
        "parallel": parallel,
    }


def axis_sizes(mesh: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the axes of a mesh section, 1 where there is none.

    >>> axis_sizes({"data": {"dcn": 2, "ici": 3}, "tensor": 2})
    {'data': 6, 'stage': 1, 'tensor': 2}
    """
    sizes = ((name, mesh.get(name, 1)) for name in ("data", "stage", "tensor"))
    return {n: size if isinstance(size, int) else math.prod(size.values()) for n, size in sizes}


def _composition(random: Random, total: int, parts: int) -> list[int]:
    """So many counts of 1 or more that add up to a total."""
    cuts = sorted(random.sample(range(1, total), parts - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


@cache
def meshes() -> tuple[tuple[int, int, int], ...]:
    """Sizes of data, stage and tensor on 1 to 8 devices."""
    sizes = range(1, DEVICES + 1)
    return tuple(
        (data, stage, tensor)
        for data in sizes
        for stage in range(1, STAGES + 1)
        for tensor in sizes
        if data * stage * tensor <= DEVICES
    )


def _fits(kind: str, data: int, stage: int, tensor: int) -> bool:
    """Whether a pipeline of this model may have these axes: mlp has none, cnn no tensor axis."""
    return stage == 1 or kind in ("gpt", "tower") or (kind == "cnn" and tensor == 1)


def _plan(random: Random, kind: str) -> Plan:
    """A mesh, what runs on it, and in how many microbatches."""
    fitting = [sizes for sizes in meshes() if _fits(kind, *sizes)]
    weights = [AXES_WEIGHTS[sum(size > 1 for size in sizes)] for sizes in fitting]
    ((data, stages, tensor),) = random.choices(fitting, weights)
    mesh = _mesh(random, {"data": data, "stage": stages, "tensor": tensor})
    reduce, zero = _zero_and_reduce(random, mesh)
    parallel: Sections = {"reduce": reduce, "zero": zero}
    if stages == 1:
        microbatches = random.choice((1, 1, 2, 3, 4))
        return Plan(mesh, data, tensor, stages, 1, parallel, microbatches)
    schedule, microbatches, chunks = _schedule(random, stages)
    parallel["pipeline"] = {
        "schedule": schedule,
        "activations": random.choice(ACTIVATIONS),
        "ahead": random.random() < 0.2,
    }
    return Plan(mesh, data, tensor, stages, chunks, parallel, microbatches)


def _mesh(random: Random, sizes: Mapping[str, int]) -> Sections:
    """Axes in any order; some of size 1 are named, and data may lie over two networks."""
    names = [name for name, size in sizes.items() if size > 1 or random.random() < 0.1]
    random.shuffle(names)
    mesh: Sections = {name: sizes[name] for name in names}
    data = sizes["data"]
    if data > 1 and random.random() < 0.4:
        dcn = random.choice([size for size in range(1, data + 1) if data % size == 0])
        mesh["data"] = {"dcn": dcn, "ici": data // dcn}
    return {**(mesh or {"data": 1}), "fake_devices": math.prod(sizes.values())}


def _zero_and_reduce(random: Random, mesh: Mapping[str, Any]) -> tuple[Sections | None, Sections]:
    """A reduction and a stage of ZeRO that the table of validity allows on a mesh."""
    while True:
        kind, stage = random.choice(REDUCTIONS), random.choice(get_args(Stage))
        reduce = None if kind is None else {"type": kind, **_options(random, kind)}
        scope = random.choice(SCOPES) if stage else "all"
        config = ZeroConfig(stage=stage, scope=scope)
        if violations(_facts(mesh, reduce, config)):
            continue
        zero: Sections = {"stage": stage, "scope": scope}
        zero["whole_below"] = random.choice((0, 0, 16, 64, ZeroConfig().whole_below))
        if stage == 3 and reduce is not None:
            zero["prefetch"] = random.random() < 0.3
        return reduce, zero


def _options(random: Random, kind: str) -> Sections:
    """Settings of an algorithm that change no number but the order of its sums."""
    found: Sections = {}
    if random.random() < 0.4:
        found["bucket_bytes"] = random.choice((64, 1000, 4096))
    if kind == "ring" and random.random() < 0.5:
        found |= {"directions": random.choice((1, 2)), "chunks": random.choice((1, 2, 3))}
    if kind == "hierarchical" and random.random() < 0.5:
        flat = [name for name in REDUCTIONS if name not in (None, "hierarchical", "auto")]
        found |= {level: {"type": random.choice(flat)} for level in ("inside", "across")}
    return found


def _facts(mesh: Mapping[str, Any], reduce: Sections | None, zero: ZeroConfig) -> Facts:
    """What the table of validity asks of a plan."""
    sizes: dict[str, int] = {}
    for axis, size in mesh.items():
        if axis != "fake_devices":
            parts = {axis: size} if isinstance(size, int) else {
                axis + DCN: size["dcn"], axis + ICI: size["ici"],
            }  # fmt: skip
            sizes |= parts
    return Facts(
        mesh=sizes,
        batch_axes=tuple(name for name in sizes if name.startswith("data")),
        reduce=None if reduce is None else _REDUCE.validate_python(reduce),
        zero=zero,
    )


def _schedule(random: Random, stages: int) -> tuple[Sections, int, int]:
    """A schedule, microbatches that it takes, and its chunks."""
    kind = random.choice([*SCHEDULES])
    settings: Sections = {"type": kind}
    if "chunks" in SCHEDULES[kind].model_fields:
        settings["chunks"] = random.choice((2, 3)) if stages == 2 else 2
    while True:
        microbatches = random.randint(1, 3 * stages)
        try:
            found = SCHEDULES[kind](**settings).build(stages, microbatches)
        except ConfigError:
            continue
        return settings, microbatches, found.chunks


def _rules(
    random: Random, model: Mapping[str, Any], data: Mapping[str, Any], plan: Plan
) -> Sections:
    """Sharding rules beside the defaults: a dim that stays whole, or a sequence that is split."""
    if plan.tensor == 1 or random.random() < 0.5:
        return {}
    if model["type"] == "gpt":
        if plan.stages == 1 and data["window"] % plan.tensor == 0 and random.random() < 0.5:
            return {"residual_seq": "tensor"}
        return {random.choice(("mlp", "vocab", "heads", "kv_heads")): None}
    return {"mlp": None}


def _gpt(random: Random, tensor: int, chunks: int) -> tuple[Sections, Sections, int]:
    """Odd widths, grouped heads, uneven layers: whatever the tensor axis does not forbid."""
    groups, head_dim = random.choice((1, 1, 2)), random.choice((2, 4, 6))
    kv_heads = tensor * random.choice((1, 1, 2) if tensor < 4 else (1,))
    layers = random.randint(chunks, chunks + 3) if chunks > 1 else random.randint(1, 4)
    model = {
        "type": "gpt",
        "layers": layers,
        "embed": kv_heads * groups * head_dim,
        "heads": kv_heads * groups,
        "kv_heads": kv_heads,
        "mlp": tensor * random.choice((1, 3, 5, 8)),
        "vocab_multiple": tensor * random.choice((1, 2, 3)),
        "tied_head": random.random() < 0.5,
        "isolate_documents": random.random() < 0.3,
        "attention": "xla",
        "scan_unroll": random.choice((1, 1, 1, min(2, layers))),
    }
    data = {"kind": "tokens", "window": random.choice((4, 5, 8, 12)), "seed": random.randrange(9)}
    return model, {**data, "vocab_size": random.randint(3, 40)}, layers


def _images(random: Random) -> Sections:
    return {
        "kind": "images",
        "height": random.randint(3, 7),
        "width": random.randint(3, 7),
        "channels": random.randint(1, 3),
        "classes": random.randint(2, 11),
        "seed": random.randrange(9),
    }


def _mlp(random: Random, tensor: int, chunks: int) -> tuple[Sections, Sections, int]:
    """Every other width is split."""
    count = random.randint(1, 4)
    widths = [(tensor, 1)[i % 2] * random.choice((1, 3, 5, 8)) * 2 for i in range(count)]
    return {"type": "mlp", "hidden": widths}, _images(random), count


def _cnn(random: Random, tensor: int, chunks: int) -> tuple[Sections, Sections, int]:
    """Each convolution is a part, and two layers more."""
    count = max(random.randint(1, 3), chunks - 2)
    channels = [tensor * random.choice((1, 2, 3)) for _ in range(count)]
    hidden = tensor * random.choice((2, 3, 5, 8))
    return {"type": "cnn", "channels": channels, "hidden": hidden}, _images(random), count + 2


def _tower(random: Random, tensor: int, chunks: int) -> tuple[Sections, Sections, int]:
    """A model of the user's own, with blocks and biases."""
    data = _images(random)
    layers = random.randint(chunks, chunks + 3)
    args = {
        "features": data["height"] * data["width"] * data["channels"],
        "classes": data["classes"],
        "layers": layers,
        "embed": random.choice((3, 6, 7, 10)),
        "mlp": tensor * random.choice((1, 3, 5)),
    }
    return {"type": "import", "path": f"{Tower.__module__}:Tower", "args": args}, data, layers


MODELS: Mapping[str, Callable[[Random, int, int], tuple[Sections, Sections, int]]] = {
    "gpt": _gpt,
    "cnn": _cnn,
    "mlp": _mlp,
    "tower": _tower,
}
"""The model and its data, for a tensor axis and a number of chunks; and its layers, or parts."""


def _optimizer(random: Random) -> Sections:
    """Any optimizer with what is around it: clipping, skips, a loss scale, a schedule."""
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
    found = {"learning_rate": 0.1, "variant": random.choice(get_args(LarsVariant))}
    return {**found, "trust_coefficient": 0.1, **_layerwise(random)}


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
}


def seeds_of(count: int, seed: int) -> Sequence[int]:
    """Of so many draws: each has its own, so that a draw is the same among however many."""
    return range(seed, seed + count)
