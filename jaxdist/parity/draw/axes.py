"""The drawn settings of two mesh axes: `expert`, and `context`, which splits sequences."""

from __future__ import annotations

import math
from random import Random

from jaxdist.cost.context import splits_of
from jaxdist.types import Json, JsonObject

Sections = JsonObject
EXPERTS = 8
"""The number of experts of a layer, which all drawn sizes of an axis divide."""
DEVICES = 8


def stages_of(config: Sections) -> int:
    """Return the number of stages of a pipeline, or 1 without one."""
    return config["mesh"].get("stage", 1)


def with_values(config: Sections, section: str, **values: Json) -> Sections:
    """Return a section of a config with other values, by the section's name."""
    return {section: {**config.get(section, {}), **values}}


def without_stages(config: Sections, axis: str) -> Sections:
    """Return the sections in which an axis of stages becomes another axis, without a pipeline."""
    mesh = {(axis if name == "stage" else name): n for name, n in config["mesh"].items()}
    parallel = {name: value for name, value in config["parallel"].items() if name != "pipeline"}
    return {"mesh": mesh, "parallel": parallel}


def experts(random: Random, config: Sections) -> Sections | None:
    """Draw experts of a gpt, on whose scores the caller must see to it that no rounding acts.

    An axis of stages, which does not combine with experts, becomes an axis of experts.
    """
    model, stages, train = config["model"], stages_of(config), config["train"]
    if model["type"] != "gpt" or EXPERTS % stages:
        return None
    if config["sharding"].get("collective_matmul") or {"phases", "batch_ramp"} & {*train}:
        return None
    top_k = random.choice((1, 2, 2, 3))
    listed = isinstance(model.get("remat"), list)
    divisors = [n for n in (1, 1, 2, 3) if model["layers"] % n == 0]
    found = {
        "count": EXPERTS,
        "top_k": top_k,
        "normalize": top_k > 1 and random.random() < 0.7,
        "router": random.choice(("softmax", "sigmoid")),
        "shared": random.choice((0, 0, 1)),
        "every": random.choice(divisors),
        "balance_loss": random.choice((0.0, 0.1)),
        "z_loss": random.choice((0.0, 0.01)),
        "bias_rate": random.choice((0.0, 0.01)),
        "capacity_factor": random.choice((None, None, 1.0, 1.5)),
    }
    if listed and found["every"] > 1:
        return None
    changed = with_values(config, "model", experts=found)
    if stages == 1:
        return changed
    train = {**train, "batch_size": train["batch_size"] * stages}
    return {**changed, **without_stages(config, "expert"), "train": train}


def expert_axis(random: Random, config: Sections) -> Sections | None:
    """Turn a part of the axis data to the axis of experts, at a place that is drawn."""
    mesh, size = config["mesh"], random.choice((2, 4, 8))
    data = mesh.get("data", 1)
    taken = {"deterministic", "expert"} & {*config["parallel"], *mesh}
    if "experts" not in config["model"] or taken:
        return None
    if not isinstance(data, int) or data % size:
        return None
    exchange = random.choice(("auto", "padded", "ring"))
    axes = [(name, data // size if name == "data" else n) for name, n in mesh.items()]
    axes.insert(random.randrange(len(axes)), ("expert", size))
    return {**with_values(config, "sharding", experts=exchange), "mesh": dict(axes)}


def context_axis(random: Random, config: Sections) -> Sections | None:
    """Split the sequences of a gpt or bert over devices: further devices, or those of an axis.

    An axis of stages, which does not combine with it, becomes the axis of the sequences.
    """
    if config["model"]["type"] not in ("gpt", "bert") or "deterministic" in config["parallel"]:
        return None
    if config["sharding"].get("collective_matmul") or _apart(config):
        return None
    placed = _placed(random, config)
    if placed is None:
        return None
    size = placed["mesh"]["context"]
    pieces = (config.get("loss") or {}).get("chunks", 1)
    if _length(config) // size % pieces:
        return None
    way = random.choice(_ways(config, size))
    sharding: Sections = {
        "context": way,
        "context_order": random.choice(_orders(config, way, size)),
    }
    found = {**placed, **with_values(config, "sharding", **sharding)}
    # A kernel for whole sequences is a way of Ulysses alone.
    if way != "ulysses" and config["model"].get("attention") == "plain":
        found |= with_values(config, "model", attention="auto")
    return found


def _apart(config: Sections) -> bool:
    """Return whether keys and their queries are split over the mesh in different ways."""
    rules, tensor = config["sharding"]["rules"], config["mesh"].get("tensor", 1)
    return tensor > 1 and bool({"heads", "kv_heads"} & {*rules})


def _length(config: Sections) -> int:
    data = config["data"]
    return data.get("args", data)["window"]


def _placed(random: Random, config: Sections) -> Sections | None:
    """Draw the size of the axis and its place in the mesh, or None if no size divides sequences."""
    mesh, rules = config["mesh"], config["sharding"]["rules"]
    further = mesh.get("tensor", 1) if "residual_seq" in rules else 1

    def fits(size: int) -> bool:
        return size > 1 and _length(config) % (size * further) == 0

    if (stages := stages_of(config)) > 1:
        return without_stages(config, "context") if fits(stages) else None
    most, data = DEVICES // mesh["fake_devices"], mesh.get("data", 1)
    found = [("", n) for n in range(2, most + 1) if fits(n)]
    if isinstance(data, int):
        found += [("data", n) for n in range(2, data + 1) if data % n == 0 and fits(n)]
    if not found:
        return None
    taken, size = random.choice(found)
    axes = [(name, n // size if name == taken else n) for name, n in mesh.items()]
    axes.insert(random.randrange(len(axes)), ("context", size))
    changed = dict(axes)
    if not taken:
        changed["fake_devices"] = mesh["fake_devices"] * size
    return {"mesh": changed}


def _kv_heads(config: Sections) -> int:
    model = config["model"]
    return model.get("kv_heads", model["heads"]) // config["mesh"].get("tensor", 1)


def _ways(config: Sections, size: int) -> list[str]:
    found = ["auto", "gather", "ring"]
    if _kv_heads(config) % size == 0:
        found += ["ulysses"]
    mixed = splits_of("ring_ulysses", ("context",), size)
    return found + ["ring_ulysses"] * any(_kv_heads(config) % one.swapped == 0 for one in mixed)


def _orders(config: Sections, way: str, size: int) -> list[str]:
    model = config["model"]
    own_loss = (config.get("loss") or {}).get("type", "next_token") == "next_token"
    plain = model["type"] != "gpt" or not own_loss or model.get("attention_window")
    if way in ("auto", "ulysses"):
        return ["auto"]
    if plain:
        return ["auto", "contiguous"]
    zigzag = math.gcd(_length(config), 2 * size) == 2 * size
    return ["auto", "contiguous", "striped", *["zigzag"] * zigzag]
