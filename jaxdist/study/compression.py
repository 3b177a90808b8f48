"""The variants of `--of compression`, and the bytes that a step sends."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxdist.compression.choice import Choice, PerParameter, Stages
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment
from jaxdist.hlo import ledger
from jaxdist.optim.build import AdamWConfig, SgdConfig
from jaxdist.optim.common import OptimizerConfig
from jaxdist.parallel.exchange.compressed import Compressed
from jaxdist.study.definition import Case, variant_set
from jaxdist.study.variants import Variant, overrides_of
from jaxdist.train.step import Program
from jaxdist.types import Json, JsonObject

WARM_UP = 0.2
"""The fraction of a run that is warm-up. During the warm-up, gradients are sent uncompressed, or
top-k gradually lowers the fraction of entries that it sends."""


@dataclass(frozen=True)
class VariantSet:
    """A set of variants that `--of` names, adapted to a config.

    Attributes:
      variants: the variants. The first variant is the baseline.
      notes: a sentence about each adaptation of the set to the config.
    """

    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()


def compression_variants(experiment: Experiment) -> VariantSet:
    """Return the variants of `studies/compression.yaml` that apply to an experiment.

    Args:
      experiment: the experiment of the config without compression.

    Raises:
      ConfigError: no gradient is sent, because a single device has the complete batch.
    """
    check_sent(experiment)
    optim, found = experiment.config.optim, variant_set("compression")
    case, values = optimizer_case(optim, max(4, round(WARM_UP * experiment.total_steps)))
    variants = tuple(
        Variant(one.name, overrides_of(_filled(one.set, values)))
        for one in found.variants
        if case in one.when
    )
    return VariantSet(variants, (found.notes[case].format(**values),))


SETS = {"compression": compression_variants}
"""The functions from a config's experiment to a set of variants, by the value of `--of`."""


def optimizer_case(optim: OptimizerConfig, warm_up: int) -> tuple[Case, JsonObject]:
    """Return the kind of an optimizer, and the values that variants take from the config.

    Args:
      optim: the section `optim` of the config.
      warm_up: the number of warm-up steps, which becomes one of the values.
    """
    values: JsonObject = {"warm_up": warm_up, "kind": optim.type}
    if isinstance(optim, AdamWConfig) and optim.b1:
        return "adamw", {**values, "momentum": optim.b1, "clip_norm": optim.clip_norm}
    if not isinstance(optim, SgdConfig):
        return "other", values
    if not optim.momentum:
        return "other", {**values, "kind": "sgd without momentum"}
    own = {name: getattr(optim, name) for name in ("momentum", "nesterov", "clip_norm")}
    # The optimizer's velocity accumulates weight decay up to 1 / (1 - momentum) times its value. A
    # variant without a velocity applies this total in every step.
    decay = float(f"{optim.weight_decay / (1 - optim.momentum):.6g}")
    return "sgd", {**values, **own, "decay": decay}


def _filled(value: Json, values: JsonObject) -> Json:
    """Return a value in which each text that begins with $ is replaced by an entry of `values`.

    The text after the $ is the key of the entry.
    """
    if isinstance(value, dict):
        return {key: _filled(one, values) for key, one in value.items()}
    return values[value[1:]] if isinstance(value, str) and value.startswith("$") else value


def check_sent(experiment: Experiment) -> None:
    """Check that devices send gradients.

    Raises:
      ConfigError: a single device has the complete batch.
    """
    layout = experiment.layout
    shape = layout.mesh.shape
    sizes = {name: shape[name] for name in layout.batch_axes}
    if all(size == 1 for size in sizes.values()):
        raise ConfigError(
            f"--of compression: a single device computes the whole batch (mesh {dict(shape)}), so "
            "no gradient is sent; set mesh.data above 1, or use fake devices: --devices 4"
        )


def sent_bytes(experiment: Experiment) -> float:
    """Return the number of bytes that a device sends in a step after warm-up.

    Only the bytes of collectives over the mesh axes that share the batch are counted.
    """
    program, mesh = _without_warm_up(experiment.program), experiment.layout.mesh
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    shared = {*experiment.layout.batch_axes}
    return sum(
        collective.times_high * collective.sent_bytes
        for collective in ledger(compiled, mesh).collectives
        if shared & set(collective.axes or ())
    )


def _without_warm_up(program: Program) -> Program:
    """Return the program with only the last stage of each codec, without its warm-up stages."""
    exchange = program.exchange
    if not isinstance(exchange, Compressed):
        return program
    messages = replace(exchange.messages, choice=_last(exchange.messages.choice))
    return replace(program, exchange=replace(exchange, messages=messages))


def _last(choice: Choice) -> Choice:
    if isinstance(choice, Stages):
        return choice.stages[-1].codec
    if isinstance(choice, PerParameter):
        rules = tuple(r.model_copy(update={"codec": _last(r.codec)}) for r in choice.rules)
        return choice.model_copy(update={"rules": rules, "otherwise": _last(choice.otherwise)})
    return choice
