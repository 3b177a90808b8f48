"""The random settings of experts, and of the mesh axes `expert` and `context`.

Axis expert splits the experts of a layer, and axis context splits sequences.
"""

from __future__ import annotations

import math
from random import Random

from benchmarks.draws.sections import Sections, data_settings, stage_count, with_values
from jaxdist.cost.context import splits_of
from jaxdist.parity.cells import DEVICES
from jaxdist.parity.run import without_values

EXPERTS = 8
"""The number of experts of a layer. All drawn sizes of axis expert divide this number."""


def without_stages(config: Sections, axis: str) -> Sections:
    """Return the sections `mesh` and `parallel` of a config without its pipeline.

    The axis `axis` replaces axis stage of the mesh.
    """
    mesh = {(axis if name == "stage" else name): n for name, n in config["mesh"].items()}
    return {"mesh": mesh, "parallel": without_values(config["parallel"], "pipeline")}


def experts(random: Random, config: Sections) -> Sections | None:
    """Draw experts of a gpt, or return None if the config does not combine with experts.

    The caller must ensure that the config computes in float32, since rounding of scores would
    select other experts. Axis stage becomes axis expert, unless every layer has experts and there
    are devices for both axes.
    """
    model, stages, train = config["model"], stage_count(config), config["train"]
    if EXPERTS % stages:
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
    if stages == 1 or (found["every"] == 1 and 2 * config["mesh"]["fake_devices"] <= DEVICES):
        return changed
    train = {**train, "batch_size": train["batch_size"] * stages}
    return {**changed, **without_stages(config, "expert"), "train": train}


def expert_axis(random: Random, config: Sections) -> Sections | None:
    """Draw axis expert, at a random position of the mesh.

    The devices of axis expert are taken from axis data. In a pipeline, the axis gets additional
    devices instead, with a larger batch. The result is None if the config does not combine with the
    drawn axis.
    """
    mesh, size = config["mesh"], random.choice((2, 4, 8))
    data = mesh.get("data", 1)
    others = {"deterministic", "expert"} & {*config["parallel"], *mesh}
    if "experts" not in config["model"] or others:
        return None
    most, added = DEVICES // mesh["fake_devices"], stage_count(config) > 1
    if added:
        size = min(size, most)
    if size == 1 or (not added and (not isinstance(data, int) or data % size)):
        return None
    exchange = random.choice(("auto", "padded", "ring"))
    taken = "fake_devices" if added else "data"
    resized = {taken: mesh[taken] * size if added else data // size}
    axes = [(name, resized.get(name, n)) for name, n in mesh.items()]
    axes.insert(random.randrange(len(axes)), ("expert", size))
    found = {**with_values(config, "sharding", experts=exchange), "mesh": dict(axes)}
    rows = config["train"]["batch_size"] * size
    return {**found, **with_values(config, "train", batch_size=rows)} if added else found


def context_axis(random: Random, config: Sections) -> Sections | None:
    """Draw axis context and its settings; the axis splits the sequences of a gpt or bert.

    The axis has devices that the mesh does not use yet, or takes devices from axis data. Axis
    context replaces axis stage. The result is None if the config does not combine with axis
    context.
    """
    if "deterministic" in config["parallel"]:
        return None
    if config["sharding"].get("collective_matmul") or _apart(config):
        return None
    placed = _placed(random, config)
    if placed is None:
        return None
    size = placed["mesh"]["context"]
    pieces = (config.get("loss") or {}).get("chunks", 1)
    if data_settings(config)["window"] // size % pieces:
        return None
    way = random.choice(_ways(config, size))
    order = random.choice(_orders(config, way, size))
    # This choice was added later and draws last, so that the other draws of a seed are unchanged.
    if way == "ring_ulysses" and random.random() < 0.5:
        way = "gather_ulysses"
    sharding: Sections = {"context": way, "context_order": order}
    found = {**placed, **with_values(config, "sharding", **sharding)}
    # Only Ulysses calls attention with whole sequences, so plain attention is not drawn for the
    # other algorithms.
    if way != "ulysses" and config["model"].get("attention") == "plain":
        found |= with_values(config, "model", attention="auto")
    return found


def _apart(config: Sections) -> bool:
    """Return whether axis tensor may put the heads of keys and queries on different devices."""
    rules, tensor = config["sharding"]["rules"], config["mesh"].get("tensor", 1)
    return tensor > 1 and bool({"heads", "kv_heads"} & {*rules})


def _placed(random: Random, config: Sections) -> Sections | None:
    """Draw the size of axis context and its position, and return the sections that change.

    The result is None if no possible size divides the sequences.
    """
    mesh, rules = config["mesh"], config["sharding"]["rules"]
    further = mesh.get("tensor", 1) if "residual_seq" in rules else 1

    def fits(size: int) -> bool:
        return size > 1 and data_settings(config)["window"] % (size * further) == 0

    if (stages := stage_count(config)) > 1:
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
    zigzag = math.gcd(data_settings(config)["window"], 2 * size) == 2 * size
    return ["auto", "contiguous", "striped", *["zigzag"] * zigzag]
