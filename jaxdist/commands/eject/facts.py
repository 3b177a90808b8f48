"""The contents of the ejected file of an experiment: pieces, flags and constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.bucket import fusion_bytes, plan_buckets
from jaxdist.commands.eject.assemble import Name
from jaxdist.commands.eject.timeline import slots_of, timeline
from jaxdist.data.images.dataset import ImagesConfig
from jaxdist.data.text.dataset import TextConfig
from jaxdist.experiment import Experiment, ExperimentConfig
from jaxdist.mesh import mesh_axis_size
from jaxdist.models.gpt import GptConfig
from jaxdist.models.images.cnn import CnnConfig
from jaxdist.models.images.mlp import MlpConfig
from jaxdist.optim.batch_scaling import scale
from jaxdist.optim.build import AdamWConfig, SgdConfig
from jaxdist.optim.lamb import LambConfig
from jaxdist.types import PyTree


@dataclass
class FileContents:
    """The contents of an ejected file.

    Attributes:
      pieces: the names of the pieces, in order.
      flags: the flags of the lines to keep.
      values: the values of constants by name.
    """

    pieces: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)

    def flag(self, **given: object) -> None:
        """Add, to the flags, the name of each argument that is true."""
        self.flags |= {name for name, value in given.items() if value}


def contents_of(experiment: Experiment, *, held: bool, keeps_data: bool) -> FileContents:
    """Return the contents of the file for an experiment whose settings are all supported.

    Args:
      experiment: the experiment to eject.
      held: whether the file evaluates the held-out examples after the last step.
      keeps_data: whether jaxdist reads the examples.
    """
    facts = FileContents()
    _data(facts, experiment, keeps_data)
    for add in (_model, _optimizer, _rate, _step):
        add(facts, experiment)
    measured = held or "pipeline" not in facts.pieces
    facts.flag(heldout=held, measured=measured, limited=experiment.config.eval.batches)
    # In the file of a pipeline, only the evaluation can unroll the scan over layers. Without
    # evaluation the flag is therefore dropped.
    facts.flags -= set() if measured else {"unroll"}
    facts.pieces += ["evaluation", "loop"] if held else ["loop"]
    return facts


def _data(facts: FileContents, experiment: Experiment, kept: bool) -> None:
    config, data = experiment.config, experiment.config.data
    if kept:
        facts.pieces.append("kept")
        given = data.model_dump(mode="json", exclude_defaults=True)
        facts.values["DATA"] = {"type": data.type, **given}
    elif isinstance(data, TextConfig):
        facts.pieces.append("text")
        facts.values |= {"WINDOW": data.window, "HELDOUT_FRACTION": data.heldout_fraction}
    else:
        assert isinstance(data, ImagesConfig)
        facts.pieces.append("digits")
    facts.pieces.append("order")
    facts.values |= {"SEED": config.seed, "BATCH": config.train.batch_size}


def _model(facts: FileContents, experiment: Experiment) -> None:
    config, params = experiment.config, experiment.program.model.params
    model = config.model
    if isinstance(model, MlpConfig | CnnConfig):
        _images(facts, config, own_tree(params))
        return
    assert isinstance(model, GptConfig)
    facts.pieces.append("gpt")
    facts.values |= {
        "LAYERS": model.layers,
        "EMBED": model.embed,
        "HEADS": model.heads,
        "KV_HEADS": model.kv_heads or model.heads,
        "HEAD_SIZE": model.head_dim,
        "MLP": model.mlp_width,
        "VOCAB": experiment.dataset.vocab_size,
        "PADDED_VOCAB": params["embedding"].shape[0],
        "ROPE_THETA": model.rope_theta,
        "ATTENTION_WINDOW": model.attention_window,
        "SCAN_UNROLL": model.scan_unroll,
    }
    facts.flag(
        window=model.attention_window,
        untied=not model.tied_head,
        remat=model.remat == "full",
        narrow=model.compute_dtype == "bfloat16",
        unroll=model.scan_unroll > 1,
        stacked=True,
        tensor=mesh_axis_size(experiment.layout.mesh, "tensor") > 1,
    )


def _images(facts: FileContents, config: ExperimentConfig, params: PyTree) -> None:
    smoothing = getattr(config.loss, "label_smoothing", 0.0)
    facts.pieces.append(config.model.type)
    facts.values["LABEL_SMOOTHING"] = smoothing
    facts.flag(smoothing=smoothing)

    def sizes(layers: list[Any]) -> tuple[int, ...]:
        shapes = [layer["kernel"].shape for layer in layers]
        return (shapes[0][-2], *(shape[-1] for shape in shapes))

    if isinstance(config.model, CnnConfig):
        facts.values["CHANNELS"] = sizes(params["convolutions"])
        facts.values["WIDTHS"] = sizes([params["hidden"], params["output"]])
    else:
        facts.values["SIZES"] = sizes(params)


def _rate(facts: FileContents, experiment: Experiment) -> None:
    config, total = experiment.config.optim, experiment.total_steps
    schedule, peak, warmup = config.schedule, config.learning_rate, config.schedule.warmup_steps
    if config.scale_from is not None:
        found = scale(
            config.scale_from,
            batch_size=experiment.config.train.batch_size,
            total_steps=total,
            examples_per_epoch=len(experiment.dataset.train),
        )
        peak = found.learning_rate.value
        warmup = int(found.warmup_steps.value) if config.scale_from.warmup else warmup
    decays = schedule.type != "constant" and total > warmup
    facts.values |= {
        "LEARNING_RATE": peak,
        "STEPS": total,
        "WARMUP_STEPS": warmup,
        "END_FRACTION": schedule.end_fraction,
        "POWER": schedule.power or 1.0,
    }
    facts.flag(
        scheduled=decays or warmup,
        decays=decays,
        cosine=decays and schedule.type == "cosine",
        poly=decays and schedule.type != "cosine",
        warm=warmup,
        ramped=decays and warmup,
        unramped=decays and not warmup,
    )
    facts.pieces += ["optim/rate"] if decays or warmup else []


def _optimizer(facts: FileContents, experiment: Experiment) -> None:
    config = experiment.config.optim
    assert isinstance(config, AdamWConfig | LambConfig | SgdConfig)
    facts.pieces.append(f"optim/{config.type}")
    facts.values |= {"CLIP_NORM": config.clip_norm, "WEIGHT_DECAY": config.weight_decay}
    facts.flag(clip=config.clip_norm is not None, decay=config.weight_decay)
    if isinstance(config, SgdConfig):
        facts.values["MOMENTUM"] = config.momentum
        facts.flag(nesterov=config.nesterov)
    else:
        facts.values |= {"B1": config.b1, "B2": config.b2, "EPS": config.eps}
    if config.skips:
        facts.pieces.append("optim/skips")
    if config.skip_spikes is not None:
        facts.values["SPIKE_FACTOR"] = config.skip_spikes.factor
        facts.values["SPIKE_WINDOW"] = config.skip_spikes.window
    facts.flag(skips=config.skips, spikes=config.skip_spikes is not None)


def _step(facts: FileContents, experiment: Experiment) -> None:
    config, layout = experiment.config, experiment.layout
    exchange = experiment.program.exchange
    stage = exchange.zero.stage
    facts.values |= {
        "MESH": dict(layout.mesh.shape),
        "ROWS": shortened(layout.spec(("batch",))),
        "PARAMS": _specs(exchange.placements.params),
        "SHARDS": _specs(exchange.placements.shares),
        "LOG_EVERY": config.train.log_every,
        "EVAL_BATCHES": config.eval.batches,
        "FAKE_DEVICES": config.mesh.fake_devices,
    }
    shards = "SHARDS" if stage in (1, 2) else "PARAMS"
    moments = shards if isinstance(config.optim, SgdConfig) else f"({shards}, {shards})"
    facts.values["MOMENTS"] = Name(f"({moments}, P())" if config.optim.skips else moments)
    facts.flag(fake=config.mesh.fake_devices, zero=stage, apart=stage in (1, 2))
    facts.flag(**{f"zero{stage}": True}, whole=not stage and layout.data_size > 1)
    if mesh_axis_size(layout.mesh, "stage") > 1:
        _pipeline(facts, experiment)
    elif isinstance(config.parallel.reduce, Ring):
        _ring(facts, experiment)
    else:
        facts.pieces.append("automatic")


def _ring(facts: FileContents, experiment: Experiment) -> None:
    ring, size = experiment.config.parallel.reduce, experiment.layout.data_size
    assert isinstance(ring, Ring)
    one_way, both = [(1, size - 1)], [(1, size // 2), (-1, (size - 1) // 2)]
    leaves = jax.tree.leaves(own_tree(experiment.program.model.params))
    zero = experiment.config.parallel.zero.stage
    specs = jax.tree.leaves(own_tree(experiment.program.exchange.placements.shares))
    split = {i: [*x.spec].index("data") for i, x in enumerate(specs) if zero and "data" in x.spec}
    facts.pieces += ["ring", "shares", "ring_zero"] if zero else ["ring", "ring_step"]
    facts.values |= {
        "DEVICES": size,
        "WAYS": tuple(way for way in (one_way if ring.directions == 1 else both) if way[1]),
        "BUCKETS": tuple(map(tuple, plan_buckets(leaves, fusion_bytes(ring)))),
        "SPLIT": split,
    }
    # The file gets a separate spec for each parameter, since it looks up the dim that is split.
    if zero:
        placements = experiment.program.exchange.placements
        facts.values["SHARDS"] = _specs(placements.shares, each=True)
        facts.values["PARAMS"] = _specs(placements.params, each=zero == 3)
        facts.values["GRADS"] = Name("PARAMS" if zero == 3 else "SHARDS")
    facts.flag(ring3=zero == 3)


def _pipeline(facts: FileContents, experiment: Experiment) -> None:
    config, stages = experiment.config, mesh_axis_size(experiment.layout.mesh, "stage")
    schedule = config.parallel.pipeline.schedule.build(stages, config.train.microbatches)
    rows = timeline(schedule)
    names = own_tree(experiment.program.model.params)
    specs = {name: P("stage") if name == "blocks" else P() for name in names}
    facts.pieces.append("pipeline")
    facts.flag(data=experiment.layout.data_size > 1)
    facts.values |= {
        "PARAMS": specs,
        "SCHEDULE": tuple(" ".join(row) for row in rows),
        "STAGES": stages,
        "MICROBATCHES": schedule.microbatches,
        "SLOTS": slots_of(rows),
    }


def own_tree(tree: PyTree) -> PyTree:
    """Return a tree of parameters in the form of the ejected file, with the layers as a list."""

    def listed(layers: PyTree) -> list[PyTree]:
        return [layers[str(i)] for i in range(len(layers))]

    match tree:
        case {"layers": layers}:
            return listed(layers)
        case {"convolutions": convolutions}:
            return {**tree, "convolutions": listed(convolutions)}
    return tree


def _specs(shardings: PyTree, *, each: bool = False) -> PyTree:
    """Return the partition specs of shardings.

    If all specs are equal, the result is a single spec, unless `each` is set.
    """
    specs = jax.tree.map(lambda sharding: shortened(sharding.spec), own_tree(shardings))
    found = {*jax.tree.leaves(specs)}
    return found.pop() if len(found) == 1 and not each else specs


def shortened(spec: P) -> P:
    """Return a partition spec without the unsharded dims at its end."""
    entries = [*spec]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
