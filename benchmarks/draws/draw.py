"""Random configs: a model, its optimizer, and two plans with which the model can be trained.

A draw depends only on its seed, and consists of sections in the form of a config file. The size of
every dim is a multiple of the axes that split the dim, and settings that the validity table refuses
are not drawn. The complete config may still be refused, for reasons that depend on several
sections.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from benchmarks.draws.model import (
    MODELS,
    WHOLE_MODELS,
    ModelNeeds,
    Sections,
    bert,
    embeds_of,
    has_batch_norm,
    layers_of,
    optimizer,
    resnet,
    vit,
)
from benchmarks.draws.sections import mesh_axis_size
from benchmarks.draws.settings import with_settings
from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.model.pipeline import lowered
from jaxdist.parallel.pipeline.planning.plan import PipelineConfig
from jaxdist.parallel.zero import ZeroConfig
from jaxdist.parity.cells import ACTIVATIONS, DEVICES, REDUCTIONS, REMATS, SCHEDULES, SCOPES, facts
from jaxdist.parity.trace import STEPS
from jaxdist.types import Json
from jaxdist.validity.table import violations

STAGES = 4
"""The largest number of stages. A program with more stages takes longer to compile, and tests
nothing new."""
WIDEST = 8
"""The bound on the least common multiple of the sizes of axis tensor in the two plans of a draw."""
LOSSLESS: tuple[Sections, ...] = (
    {"type": "whole"},
    {"type": "topk", "fraction": 1.0},
    {"type": "topk", "fraction": 1.0, "method": "exact"},
    {"type": "randomk", "fraction": 1.0, "error_feedback": False},
)
"""The codecs of `parallel.compression` that lose nothing, so that results remain exact."""
VECTORS = ("whole", "otherwise")


@dataclass(frozen=True)
class TrainingPlan:
    """The settings of a config that decide how a model is trained on devices.

    Attributes:
      mesh: the section `mesh`, whose axis data may span two networks.
      data, tensor, stages: the sizes of the axes data, tensor and stage, or 1 for an absent axis.
      chunks: the number of chunks of the pipeline, or 1 without a pipeline.
      parallel: the section `parallel`.
      microbatches: the number of microbatches of a batch.
    """

    mesh: Mapping[str, Json]
    data: int
    tensor: int
    stages: int
    chunks: int
    parallel: Mapping[str, Json]
    microbatches: int


@dataclass(frozen=True)
class Draw:
    """Two random configs that train the same model with the same optimizer and different plans.

    Attributes:
      seed: the argument of `draw` that gives this draw.
      sections: the config that is trained and compared with a single device.
      reader: the config that loads the first config's checkpoint.
    """

    seed: int
    sections: Sections
    reader: Sections


def draw(seed: int) -> Draw:
    """Return the draw of a seed, which has two random configs.

    >>> draw(7) == draw(7), draw(7).sections == draw(8).sections
    (True, False)
    """
    random = Random(seed)
    # A gpt has the most settings to test, so it is drawn more often.
    kind = random.choice(["gpt", "gpt", *MODELS])
    first = second = _plan(random, kind)
    while second is first or math.lcm(first.tensor, second.tensor) > WIDEST:
        second = _plan(random, kind)
    # Kinds of settings that were added later have separate random streams, so that a new kind does
    # not change the rest of a seed's draw.
    apart = Random(f"messages {seed}")
    first, second = (_with_messages(apart, plan) for plan in (first, second))
    apart = Random(f"stages of shards {seed}")
    first, second = (_sharded_stages(apart, plan) for plan in (first, second))
    needs = ModelNeeds(
        tensor=math.lcm(first.tensor, second.tensor),
        chunks=max(first.chunks, second.chunks),
        whole=first.stages == second.stages == first.microbatches == 1,
    )
    common = MODELS[kind](random, needs)
    # These models were added after the models above. A separate random stream chooses them, so that
    # all other draws of a seed are unchanged.
    apart = Random(f"other model {seed}")
    if kind == "cnn" and apart.random() < 0.5:
        common |= {"model": resnet(apart, needs)}
    if kind == "gpt" and apart.random() < 0.2:
        common |= bert(apart, common)
    apart = Random(f"images in patches {seed}")
    if common["model"]["type"] == "gpt" and apart.random() < 0.2:
        common |= vit(apart, common)
    common |= {"optim": optimizer(random), "seed": random.randrange(100)}
    if any("compression" in plan.parallel for plan in (first, second)):
        # Compression turns on `skip_nonfinite`. All plans must have the same optimizer, so it is
        # turned on for both.
        common["optim"] |= {"skip_nonfinite": True}
    return Draw(seed, *with_settings(seed, *(_config(random, common, p) for p in (first, second))))


def _config(random: Random, common: Sections, plan: TrainingPlan) -> Sections:
    """Draw the settings of a plan that depend on the model, and return the complete config.

    Args:
      random: the random stream.
      common: the sections that both plans share.
      plan: the plan to complete.
    """
    model, parallel = dict(common["model"]), dict(plan.parallel)
    layers = layers_of(model)
    if model["type"] == "gpt":
        # `zero.prefetch` keeps only the inputs of layers, so it combines only with `remat: full`,
        # which keeps the same values.
        policies = ["full"] if parallel["zero"].get("prefetch") else [*REMATS]
        model["remat"] = REMATS[random.choice(policies)]
        if isinstance(model["remat"], tuple):
            model["remat"] = [*model["remat"]][:layers]
    if model["type"] in ("bert", "vit") and parallel["zero"].get("prefetch"):
        model["remat"] = "full"
    if plan.chunks > 1 and random.random() < 0.3:
        counts = _composition(random, layers, plan.chunks)
        parallel["pipeline"] = {**parallel["pipeline"], "layers": counts}
    rows = random.choice((1, 1, 2, 3)) * plan.data * plan.microbatches
    if has_batch_norm(model):
        # Values that are normalized over only two rows are +-1 except for rounding, so a batch has
        # more rows.
        rows *= 8
    return {
        **common,
        "model": model,
        "train": {"steps": STEPS, "batch_size": rows, "microbatches": plan.microbatches},
        "mesh": plan.mesh,
        "sharding": {**common.get("sharding", {}), "rules": _rules(random, common, plan)},
        "parallel": parallel,
    }


def _composition(random: Random, total: int, parts: int) -> list[int]:
    """Draw `parts` numbers of at least 1 that add up to `total`."""
    cuts = sorted(random.sample(range(1, total), parts - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


@cache
def _meshes() -> tuple[tuple[int, int, int], ...]:
    """Return (data, stage, tensor) of all meshes of up to `DEVICES` devices and `STAGES` stages."""
    sizes = range(1, DEVICES + 1)
    return tuple(
        (data, stage, tensor)
        for data in sizes
        for stage in range(1, STAGES + 1)
        for tensor in sizes
        if data * stage * tensor <= DEVICES
    )


def _fits(kind: str, data: int, stage: int, tensor: int) -> bool:
    """Return whether a kind of model can be trained on axes of the given sizes.

    An mlp has no pipeline. The pipeline of a cnn does not combine with axis tensor. The models in
    `WHOLE_MODELS` support only axis data, since the dims of their parameters have no names.

    Args:
      kind: a key of `MODELS`.
      data, stage, tensor: the sizes of the axes with these names.
    """
    if kind in WHOLE_MODELS:
        return stage == tensor == 1
    return stage == 1 or kind in ("gpt", "tower") or (kind == "cnn" and tensor == 1)


def _plan(random: Random, kind: str) -> TrainingPlan:
    """Draw a plan for a kind of model: a mesh, the section `parallel`, and microbatches.

    Args:
      random: the random stream.
      kind: a key of `MODELS`.
    """
    fitting = [sizes for sizes in _meshes() if _fits(kind, *sizes)]
    weights = [_weight(*sizes) for sizes in fitting]
    ((data, stages, tensor),) = random.choices(fitting, weights)
    mesh = _mesh(random, {"data": data, "stage": stages, "tensor": tensor})
    reduce, zero = _zero_and_reduce(random, mesh)
    parallel: Sections = {"reduce": reduce, "zero": zero}
    if stages == 1:
        microbatches = random.choice((1, 1, 2, 3, 4))
        return TrainingPlan(mesh, data, tensor, stages, 1, parallel, microbatches)
    schedule, microbatches, chunks = _schedule(random, stages)
    parallel["pipeline"] = {
        "schedule": schedule,
        "activations": random.choice(ACTIVATIONS),
        "ahead": random.random() < 0.2,
    }
    if not _can_be_kept(parallel["pipeline"], stages, microbatches):
        parallel["pipeline"]["ahead"] = False
    return TrainingPlan(mesh, data, tensor, stages, chunks, parallel, microbatches)


def _weight(data: int, stage: int, tensor: int) -> float:
    """Return the weight of a mesh in a random choice.

    A mesh with several axes has a large weight, since few meshes have several axes. A mesh with
    axis data has twice the weight of other meshes, since most settings need axis data.

    Args:
      data, stage, tensor: the sizes of the axes with these names.
    """
    axes = sum(size > 1 for size in (data, stage, tensor))
    return (0.5, 1, 3, 9)[axes] * (2 if data > 1 else 1)


def _mesh(random: Random, sizes: Mapping[str, int]) -> Sections:
    """Draw a section `mesh` with axes of the given sizes.

    The order of the axes is random, and axis data may span two networks. An axis of size 1 may be
    present or absent.
    """
    names = [name for name, size in sizes.items() if size > 1 or random.random() < 0.1]
    random.shuffle(names)
    mesh: Sections = {name: sizes[name] for name in names}
    data = sizes["data"]
    if data > 1 and random.random() < 0.4:
        dcn = random.choice([size for size in range(1, data + 1) if data % size == 0])
        mesh["data"] = {"dcn": dcn, "ici": data // dcn}
    return {**(mesh or {"data": 1}), "fake_devices": math.prod(sizes.values())}


def _zero_and_reduce(random: Random, mesh: Mapping[str, Json]) -> tuple[Sections | None, Sections]:
    """Draw the sections `reduce` and `zero`, which the validity table allows on the mesh.

    The section `reduce` is None if XLA sums the gradients.
    """
    while True:
        kind, stage = random.choice(REDUCTIONS), random.choice((0, 1, 2, 2, 3, 3))
        reduce = None if kind is None else {"type": kind, **_options(random, kind)}
        scope = random.choice(SCOPES) if stage else "all"
        zero: Sections = {"stage": stage, "scope": scope}
        found = violations(facts(mesh, {"reduce": reduce, "zero": zero}))
        if found or (stage == 3 and mesh.get("stage", 1) > 1):
            continue  # `_sharded_stages` draws ZeRO 3 in pipelines.
        zero["whole_below"] = random.choice((0, 0, 16, 64, ZeroConfig().whole_below))
        if stage == 3 and reduce is not None:
            zero["prefetch"] = random.random() < 0.3
        return reduce, zero


def _with_messages(random: Random, plan: TrainingPlan) -> TrainingPlan:
    """Return the plan, with random compression by a lossless codec in some draws.

    The plan is unchanged if it does not combine with the drawn compression.
    """
    if random.random() < 0.6:
        return plan
    codec = random.choice(LOSSLESS)
    found: Sections = {**codec, "axis": random.choice(("data", "data.dcn"))}
    if codec["type"] != "randomk":
        found["error_feedback"] = random.choice((False, True, {"type": "ef21"}))
    found |= {"warmup_steps": random.choice((0, 1)), "vectors": random.choice(VECTORS)}
    parallel = {**plan.parallel, "compression": found}
    if parallel["zero"]["stage"] >= 2 and found["axis"] == "data":
        # ZeRO 2 and 3 reduce gradients layer by layer. No lossless codec supports this, so the plan
        # stays without compression.
        return plan
    if violations(facts(plan.mesh, parallel)):
        return plan
    return replace(plan, parallel=parallel)


def _sharded_stages(random: Random, plan: TrainingPlan) -> TrainingPlan:
    """Return the plan, in some draws with ZeRO 3 instead of ZeRO 2.

    A plan without a pipeline is returned unchanged.
    """
    zero, pipeline = plan.parallel["zero"], plan.parallel.get("pipeline")
    if pipeline is None or zero["stage"] != 2 or random.random() < 0.4:
        return plan
    pipeline = {**pipeline, "gather": random.choice(("step", "task"))}
    parallel = {**plan.parallel, "zero": {**zero, "stage": 3}, "pipeline": pipeline}
    return replace(plan, parallel=parallel)


def _options(random: Random, kind: str) -> Sections:
    """Draw the settings of a reduction algorithm, which change only the order of its sums."""
    found: Sections = {}
    if random.random() < 0.4:
        found["bucket_bytes"] = random.choice((64, 1000, 4096))
    if kind == "ring" and random.random() < 0.5:
        found |= {"directions": random.choice((1, 2)), "chunks": random.choice((1, 2, 3))}
    if kind == "hierarchical" and random.random() < 0.5:
        flat = [name for name in REDUCTIONS if name not in (None, "hierarchical", "auto")]
        found |= {level: {"type": random.choice(flat)} for level in ("inside", "across")}
    return found


def _schedule(random: Random, stages: int) -> tuple[Sections, int, int]:
    """Draw a pipeline schedule and a number of microbatches that the schedule accepts.

    The result is the section `schedule`, the number of microbatches, and the number of chunks.
    """
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


def _can_be_kept(pipeline: Sections, stages: int, microbatches: int) -> bool:
    """Return whether the executor can run a pipeline's tasks without a deadlock between stages."""
    config = PipelineConfig.model_validate(pipeline)
    try:
        lowered(config, config.schedule.build(stages, microbatches))
    except ConfigError:
        return False
    return True


def _rules(random: Random, common: Sections, plan: TrainingPlan) -> Sections:
    """Draw the sharding rules that a config adds to the default rules; there may be none."""
    model, found = common["model"], {}
    if plan.tensor > 1 and random.random() < 0.5:
        found = _tensor_rules(random, model, common["data"], plan)
    embeds, zero = embeds_of(model), plan.parallel["zero"]["stage"]
    on_one_stage = plan.stages == 1 and plan.parallel["reduce"] is None and not zero
    fits = bool(embeds) and all(embed % plan.data == 0 for embed in embeds)
    if on_one_stage and fits and plan.data > 1 and random.random() < 0.5:
        found["embed"] = "data"
    return found


def _tensor_rules(
    random: Random, model: Mapping[str, Json], data: Mapping[str, Json], plan: TrainingPlan
) -> Sections:
    """Draw a sharding rule for axis tensor.

    With the rule, axis tensor also splits the sequence, or leaves a dim whole that it splits by
    default.
    """
    if model["type"] not in ("gpt", "bert"):
        return {"channels_out" if model["type"] == "resnet" else "mlp": None}
    if plan.stages == 1 and data["window"] % plan.tensor == 0 and random.random() < 0.5:
        return {"residual_seq": "tensor"}
    return {random.choice(("mlp", "vocab", "heads", "kv_heads")): None}


def seeds_of(count: int, seed: int, axes: Sequence[str] = ()) -> Sequence[int]:
    """Return the seeds of `count` draws, in increasing order from `seed`.

    Args:
      count: the number of draws.
      seed: the least seed.
      axes: names of mesh axes. Only draws in which any of these axes is larger than 1 are counted,
        or all draws if there are no names.
    """
    if not axes:
        return range(seed, seed + count)
    fitting = (own for own in itertools.count(seed) if _has_axis(draw(own), axes))
    return [*itertools.islice(fitting, count)]


def _has_axis(drawn: Draw, axes: Sequence[str]) -> bool:
    mesh = drawn.sections["mesh"]
    return any(mesh_axis_size(mesh, name) > 1 for name in axes)
