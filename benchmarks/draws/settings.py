"""The settings that are drawn in addition to a mesh, a model and an optimizer.

The function of each setting takes all sections of a config. The function returns the sections that
the setting changes, or None if the setting does not combine with the other settings. A setting that
also changes the numbers on a single device is *shared* by both plans of a draw. All other settings
belong to a single plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from benchmarks.draws.axes import context_axis, expert_axis, experts
from benchmarks.draws.model import has_batch_norm, model_key
from benchmarks.draws.sections import (
    Sections,
    data_settings,
    data_size,
    stage_count,
    with_data,
    with_values,
)
from jaxdist.config import value_at
from jaxdist.parity.run import in_half_precision, without_values
from jaxdist.parity.trace import STEPS
from jaxdist.parity.weighted import with_weights
from jaxdist.types import Json

LENGTHS = (16, 24)
"""The lengths among which the setting "longer sequences" chooses, in tokens."""


@dataclass(frozen=True)
class Setting:
    """A setting that some draws have.

    Attributes:
      chance: the fraction of draws to which the setting is added if it combines with the config.
      shared: whether the single device and the second plan have the setting too.
      add: a function from a random stream and a config to the sections that change, or to None if
        the setting does not combine with the config.
      shown: the path of the setting's value in a config, or a function from a config to the text
        of the value on the page docs/parity_draw.md.
      models: the types of models with which the setting combines, or () for all types.
    """

    chance: float
    shared: bool
    add: Callable[[Random, Sections], Sections | None]
    shown: str | Callable[[Sections], str]
    models: tuple[str, ...] = ()

    def text(self, config: Sections) -> str:
        """Return the setting's value on the page, which is "no" for a config without it."""
        if callable(self.shown):
            return self.shown(config)
        value = value_at(config, self.shown.split("."))
        if isinstance(value, bool | dict | list):
            return "yes" if value else "no"
        return "no" if value is None else str(value)


def with_settings(seed: int, first: Sections, second: Sections) -> tuple[Sections, Sections]:
    """Return both configs of a draw with the settings of a seed added.

    Each setting has a separate random stream, so that a new setting does not change other settings.

    Args:
      seed: the seed of the draw.
      first: the config that is trained.
      second: the config that loads the checkpoint.
    """
    for name, setting in SETTINGS.items():
        if Random(f"{name} {seed} chance").random() >= setting.chance:
            continue
        if setting.shared:
            pair = [_added(setting, f"{name} {seed}", plan) for plan in (first, second)]
            if pair[0] is not None and pair[1] is not None:
                first, second = pair[0], pair[1]
            continue
        first = _added(setting, f"{name} {seed} first", first) or first
        second = _added(setting, f"{name} {seed} second", second) or second
    if first["optim"]["type"] == "muon" and (in_half_precision(first) or in_half_precision(second)):
        # Each step of Newton-Schulz multiplies the rounding error of small singular values by 3.4,
        # so only one step is taken.
        first, second = (
            {**plan, "optim": {**plan["optim"], "ns_steps": 1}} for plan in (first, second)
        )
    return first, second


def _added(setting: Setting, stream: str, config: Sections) -> Sections | None:
    if setting.models and config["model"]["type"] not in setting.models:
        return None
    found = setting.add(Random(stream), config)
    return None if found is None else {**config, **found}


def _one_of(section: str, name: str, *values: Json) -> Callable[[Random, Sections], Sections]:
    """Return a function that sets a value of a section to one of the given values."""
    return lambda random, config: with_values(config, section, **{name: random.choice(values)})


def _of_zero(config: Sections, **values: Json) -> Sections:
    return with_values(config, "parallel", zero={**config["parallel"]["zero"], **values})


def _master_weights(random: Random, config: Sections) -> Sections | None:
    if "strategy" in config:
        return None  # Lookahead, which has a section `strategy`, refuses master weights.
    return with_values(config, "optim", master_weights="bfloat16")


def _lookahead(random: Random, config: Sections) -> Sections | None:
    strategy: Sections = {"type": "lookahead", "steps": random.choice((1, 2))}
    strategy |= {"learning_rate": random.choice((0.5, 1.0)), "momentum": random.choice((0.0, 0.5))}
    return {"strategy": strategy}


def _skip_spikes(random: Random, config: Sections) -> Sections | None:
    """Add a setting that skips each step with a larger gradient than the previous step.

    About half of all steps are skipped.

    The result is never None, since the setting combines with every config.
    """
    spikes = {"factor": 1.0001, "window": 1}
    return {"optim": {**without_values(config["optim"], "skip_nonfinite"), "skip_spikes": spikes}}


def _onebit(random: Random, config: Sections) -> Sections | None:
    """Draw 1-bit Adam or 1-bit LAMB.

    The messages are lossless, so that a single device gives the same numbers. There are no messages
    if the plan does not combine with them. The result is never None.
    """
    kind, freeze = random.choice(("onebit_adam", "onebit_lamb")), random.choice((1, 2))
    optim: Sections = {"type": kind, "learning_rate": 1e-2, "eps": 1e-3, "freeze_step": freeze}
    found = {"optim": {**optim, "schedule": config["optim"]["schedule"], "skip_nonfinite": True}}
    parallel = without_values(config["parallel"], "compression")
    zero, reduce = parallel["zero"], parallel["reduce"]
    messages = data_size(config) > 1 and stage_count(config) == 1 and zero["stage"] <= 1
    flat = reduce is None or reduce["type"] != "hierarchical"
    if messages and flat and zero["scope"] == "all" and not config["sharding"]["rules"]:
        feedback = {"type": "compressed_momentum", "b1": 0.9}
        sent = {"type": "whole", "axis": "data", "warmup_steps": freeze}
        parallel["compression"] = {**sent, "error_feedback": feedback}
    return {**found, "parallel": parallel}


def _longer(random: Random, config: Sections) -> Sections | None:
    """Draw a larger length of sequences, which more sizes of axis context divide."""
    window = random.choice(LENGTHS)
    found = with_data(config, window=window)
    if config["model"]["type"] == "bert":
        found |= with_values(config, "model", positions=window)
    return found


def _window_shown(config: Sections) -> str:
    window = data_settings(config).get("window")
    return str(window) if window in LENGTHS else "no"


def _chunks(random: Random, config: Sections) -> Sections | None:
    if "residual_seq" in config["sharding"]["rules"]:
        return None
    window = data_settings(config)["window"]
    chunks = random.choice([n for n in range(2, window + 1) if window % n == 0])
    return {"loss": {"type": "next_token", "chunks": chunks}}


def _collective_matmul(random: Random, config: Sections) -> Sections | None:
    if "residual_seq" not in config["sharding"]["rules"]:
        return None
    return with_values(config, "sharding", collective_matmul=True)


def _weights(random: Random, config: Sections) -> Sections | None:
    """Add unequal weights of examples; many of the weights are zero.

    The result is never None, since the setting combines with every config.
    """
    return {"data": with_weights(config["data"])}


def _dropout(random: Random, config: Sections) -> Sections | None:
    """Add dropout to a `Tower` without a pipeline, or return None for any other model.

    Dropout is the same for all plans only if XLA splits the batch. The result therefore also has a
    section `parallel` that leaves reductions to XLA.
    """
    model = config["model"]
    if stage_count(config) > 1 or model_key(model) != "tower":
        return None
    return {
        **with_values(config, "model", args={**model["args"], "dropout": 0.5}),
        **with_values(config, "train", microbatches=1),
        "parallel": _left_to_xla(config),
    }


def _left_to_xla(config: Sections) -> Sections:
    """Return a config's section `parallel` in which XLA places all communication."""
    zero = {name: config["parallel"]["zero"][name] for name in ("stage", "whole_below")}
    return {"reduce": None, "zero": {**zero, "scope": "all"}}


def _evaluation(random: Random, config: Sections) -> Sections | None:
    """Add a held-out split; the batch size rarely divides its number of examples.

    The result is never None, since the setting combines with every config.
    """
    return with_data(config, heldout_examples=random.randint(9, 40))


def _ramp(random: Random, config: Sections) -> Sections | None:
    """Add a ramp of the batch size, in which only the first step has a smaller batch.

    The result is None if the setting does not combine with the config.
    """
    train, parts = config["train"], data_size(config)
    size, pieces = 2 * train["batch_size"], train["microbatches"]
    fitting = [
        start
        for start in range(parts, size, parts)
        if start % (parts * _pieces(config, start, pieces, size)) == 0
    ]
    if not fitting or has_batch_norm(config["model"]):
        return None
    start = random.choice(fitting)
    ramp = {"start_batch_size": start, "increment": size - start, "ramp_examples": start}
    return with_values(config, "train", batch_size=size, batch_ramp=ramp)


def _pieces(config: Sections, size: int, microbatches: int, full: int) -> int:
    """Return the number of microbatches for a batch that is smaller than the full batch.

    A pipeline has the same number of microbatches for every batch size.

    Args:
      config: the sections of the config.
      size: the size of the smaller batch.
      microbatches: the number of microbatches of the full batch.
      full: the size of the full batch.
    """
    return math.ceil(size * microbatches / full) if stage_count(config) == 1 else microbatches


def _phases(random: Random, config: Sections) -> Sections | None:
    """Add two phases of training; the learning rate of the second phase is half as large.

    The result is None if the setting does not combine with the config.
    """
    if "batch_ramp" in config["train"]:
        return None
    size = config["train"]["batch_size"]
    optim = without_values(config["optim"], "learning_rate", "schedule")
    rate = config["optim"]["learning_rate"]
    phases = [
        {"examples_fraction": 2 / 3, "batch_size": size, "learning_rate": rate},
        {"examples_fraction": 1 / 3, "batch_size": size, "learning_rate": rate / 2},
    ]
    return {"optim": optim, **with_values(config, "train", phases=phases)}


def _strict(random: Random, config: Sections) -> Sections | None:
    """Add `deterministic: strict`, which replaces the reduction.

    With this setting the results have the same bits on any number of devices.

    The result is None if the setting does not combine with the config.
    """
    size, pieces = config["train"]["batch_size"], config["train"]["microbatches"]
    combines = (
        "data" in config["mesh"]
        and stage_count(config) == 1
        and "batch_ramp" not in config["train"]
        and config["sharding"]["rules"].get("embed") is None
        and not config["optim"]["type"].startswith(("onebit", "muon"))
        and not has_batch_norm(config["model"])
        and not config["model"].get("args", {}).get("dropout")
    )
    if not combines:
        return None
    fitting = [n for n in (1, 2, 3) if size % (n * data_size(config) * pieces) == 0]
    shards = data_size(config) * random.choice(fitting)
    parallel = _left_to_xla(config)
    layerwise = config["optim"]["type"] in ("lamb", "lars") or "skip_spikes" in config["optim"]
    # ZeRO is turned off in two cases, in which the order of a sum would depend on the number of
    # devices: for norms of tensors, and for sums over data and tensor with tensor parallelism.
    if layerwise or config["mesh"].get("tensor", 1) > 1:
        parallel = {**parallel, "zero": {**parallel["zero"], "stage": 0}}
    return {"parallel": {**parallel, "deterministic": {"type": "strict", "shards": shards}}}


def _freeze(random: Random, config: Sections) -> Sections | None:
    if _fetched_ahead(config):
        return None
    frozen = random.choice(FREEZABLE[config["model"]["type"]])
    if frozen == "blocks/*" and config["optim"]["type"] == "muon":
        return None  # Muon would have no matrix to update.
    return with_values(config, "model", freeze=[frozen])


def _lora(random: Random, config: Sections) -> Sections | None:
    model = config["model"]
    if _fetched_ahead(config) or "freeze" in model:
        return None
    adapters = {"rank": random.choice((1, 2, 3)), "alpha": random.choice((4.0, 16.0))}
    adapters["targets"] = [random.choice(ADAPTED[model["type"]])]
    return with_values(config, "model", lora={**adapters, "rslora": random.random() < 0.5})


def _fetched_ahead(config: Sections) -> bool:
    return bool(config["parallel"]["zero"].get("prefetch"))


def _reduce_dtype(random: Random, config: Sections) -> Sections | None:
    parallel = config["parallel"]
    if parallel["reduce"] is None or "compression" in parallel or "experts" in config["model"]:
        return None  # Rounding reorders scores, so that other experts are selected.
    return with_values(config, "parallel", reduce_dtype="bfloat16")


def _gather_dtype(random: Random, config: Sections) -> Sections | None:
    zero = config["parallel"]["zero"]
    if "experts" in config["model"]:
        return None  # Rounding reorders scores, so that other experts are selected.
    # The gradient of a rounded cnn differed from the gradient in float32 by 0.056 in a pipeline and
    # by 0.040 without a pipeline, and the limit is 0.016. The reason is not known: rounding may
    # move the maxima in the pooling layers.
    parts = config["model"]["type"] == "cnn" and stage_count(config) > 1
    return _of_zero(config, gather_dtype="bfloat16") if zero["stage"] == 3 and not parts else None


def _unrounded_experts(random: Random, config: Sections) -> Sections | None:
    """Draw experts of a gpt that computes in float32, so that rounding reorders no scores.

    The result is None for a config in half precision.
    """
    return None if in_half_precision(config) else experts(random, config)


def _secondary(random: Random, config: Sections) -> Sections | None:
    zero, data = config["parallel"]["zero"], config["mesh"].get("data")
    fits = zero["stage"] == 3 and zero["scope"] == "all" and isinstance(data, dict)
    if (
        not fits
        or stage_count(config) > 1
        or {"compression", "deterministic"} & {*config["parallel"]}
    ):
        return None
    if (config["parallel"]["reduce"] or {}).get("type") == "hierarchical":
        # With `secondary`, parameters are gathered over one network at a time. A hierarchical
        # algorithm requires two networks, so the two settings do not combine.
        return None
    return _of_zero(config, secondary=True)


def _offload(random: Random, config: Sections) -> Sections | None:
    parallel = config["parallel"]
    if not (parallel.get("zero") or {}).get("stage") or "deterministic" in parallel:
        return None
    return _of_zero(config, offload=True)


def _offload_parameters(random: Random, config: Sections) -> Sections | None:
    """Set `zero.offload_parameters`, and leave the reductions to XLA.

    The result is None if the setting does not combine with the config.
    """
    model, zero = config["model"], config["parallel"]["zero"]
    # Stage 3 pads a dim that the devices do not divide, and padded parameters are refused.
    split_evenly = model["type"] in ("cnn", "resnet") and data_size(config) <= 2
    combines = (
        zero["stage"]
        and stage_count(config) == 1
        and not {"strategy", "deterministic"} & {*config, *config["parallel"]}
        and (zero["stage"] < 3 or split_evenly)
    )
    if not combines:
        return None
    parallel = _left_to_xla(config)
    chosen = {**parallel["zero"], "offload_parameters": [random.choice(FREEZABLE[model["type"]])]}
    if model["type"] in ("gpt", "bert", "vit"):
        # jaxdist refuses other values of `remat` and `scan_unroll` here.
        model = {**model, "remat": "full", "scan_unroll": 1}
    return {"model": model, "parallel": {**parallel, "zero": chosen}}


def _onebit_shown(config: Sections) -> str:
    kind = config["optim"]["type"]
    return kind if kind.startswith("onebit") else "no"


def _evaluated(config: Sections) -> str:
    return "yes" if data_settings(config)["heldout_examples"] else "no"


def _weighted(config: Sections) -> str:
    return "yes" if config["data"]["type"] == "import" else "no"


FREEZABLE: Mapping[str, tuple[str, ...]] = {
    "gpt": ("embedding", "blocks/*", "*norm*", "blocks/attention/*"),
    "bert": ("embedding", "blocks/*", "*norm*", "positions"),
    "vit": ("patches/*", "blocks/*", "*norm*", "positions"),
    "mlp": ("*bias",),
    "cnn": ("*bias",),
    "resnet": ("*bias", "stem/*", "blocks/*"),
    "import": ("*bias",),
}
"""The patterns of parameters to freeze, for each type of model. Each pattern matches some but not
all parameters."""
ADAPTED: Mapping[str, tuple[str, ...]] = {
    "gpt": ("blocks/*", "*", "blocks/attention/*"),
    "vit": ("blocks/*", "*", "blocks/attention/*"),
    "mlp": ("*kernel",),
    "cnn": ("*kernel",),
    "import": ("*",),
}
"""The patterns of kernels to adapt by LoRA, for each type of model."""
SETTINGS: Mapping[str, Setting] = {
    "compute dtype": Setting(
        0.25, True, _one_of("model", "compute_dtype", "bfloat16"), "model.compute_dtype", ("gpt",)
    ),
    "Lookahead": Setting(0.1, True, _lookahead, "strategy.type"),
    "master weights": Setting(0.1, True, _master_weights, "optim.master_weights"),
    "spikes skipped": Setting(0.1, True, _skip_spikes, "optim.skip_spikes"),
    "1-bit optimizer": Setting(0.1, True, _onebit, _onebit_shown),
    "unequal weights": Setting(0.3, True, _weights, _weighted),
    "evaluation": Setting(0.4, True, _evaluation, _evaluated),
    "dropout": Setting(0.9, True, _dropout, "model.args.dropout", ("import",)),
    "attention window": Setting(
        0.4, True, _one_of("model", "attention_window", 1, 2, 3), "model.attention_window", ("gpt",)
    ),
    "batch ramp": Setting(0.1, False, _ramp, "train.batch_ramp"),
    "phases": Setting(0.1, True, _phases, "train.phases"),
    "attention in blocks": Setting(
        0.3, False, _one_of("model", "attention", "blockwise"), "model.attention", ("gpt",)
    ),
    "longer sequences": Setting(0.4, True, _longer, _window_shown, ("gpt", "bert")),
    "chunks of the loss": Setting(0.3, False, _chunks, "loss.chunks", ("gpt",)),
    "collective matmul": Setting(0.8, False, _collective_matmul, "sharding.collective_matmul"),
    "frozen parameters": Setting(0.2, True, _freeze, "model.freeze", (*FREEZABLE,)),
    "adapters": Setting(0.2, True, _lora, "model.lora", (*ADAPTED,)),
    "strict bits": Setting(0.12, False, _strict, "parallel.deterministic"),
    "experts": Setting(0.4, True, _unrounded_experts, "model.experts", ("gpt",)),
    "axis of experts": Setting(0.8, False, expert_axis, "mesh.expert"),
    "axis context": Setting(0.8, False, context_axis, "mesh.context", ("gpt", "bert")),
    "reduce dtype": Setting(0.15, False, _reduce_dtype, "parallel.reduce_dtype"),
    "gather dtype": Setting(0.3, False, _gather_dtype, "parallel.zero.gather_dtype"),
    "second copy of shards": Setting(0.5, False, _secondary, "parallel.zero.secondary"),
    "state on the host": Setting(0.15, False, _offload, "parallel.zero.offload"),
    "parameters on the host": Setting(
        0.15, False, _offload_parameters, "parallel.zero.offload_parameters", (*FREEZABLE,)
    ),
}
"""The settings by their names on the page, in the order in which `with_settings` adds them."""
assert STEPS == 3, "phases divide the steps of a draw in thirds"
