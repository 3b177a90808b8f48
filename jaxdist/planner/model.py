"""The sizes of a decoder and the settings of its training, from which the planner computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxdist.config import Document
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig
from jaxdist.experiment.config import at_setting
from jaxdist.experiment.part import trained_part
from jaxdist.models.functional import functional
from jaxdist.models.gpt import GptConfig
from jaxdist.models.loss import NextTokenConfig
from jaxdist.optim.build import AdamWConfig, SgdConfig
from jaxdist.optim.muon import MuonConfig, newton_schulz_flops
from jaxdist.parallel.compiler import PRESETS, SCOPED_VMEM
from jaxdist.sharding.dims import matching_names
from jaxdist.trees import flatten_with_names
from jaxdist.types import Dims

MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1, "muon": 2}
"""The number of moments that each optimizer keeps per parameter."""


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter of a model to plan for.

    Attributes:
      name: the parameter's name.
      shape: the shape in a single layer, without the dim of layers.
      split: the index of the dim that axis tensor splits, or None for a parameter that is not
        split. In a traced model, `split` is the dim that axis expert splits.
      layers: the number of blocks that each have the parameter, or 0 for a parameter outside of
        blocks.
      trained: whether the parameter has gradients and optimizer state.
      resting: whether plans with ZeRO keep the parameter in the host's memory between steps.
      embed: the index of dim embed in `shape`, or None if a plan cannot split this dim.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None
    layers: int = 0
    trained: bool = True
    resting: bool = False
    embed: int | None = None

    @property
    def stacked(self) -> bool:
        """Whether the parameter belongs to blocks."""
        return self.layers > 0

    @property
    def matrix(self) -> bool:
        """Whether the parameter belongs to blocks and has at least two dims."""
        return self.stacked and len(self.shape) > 1

    def count(self, stage: int = 1) -> int:
        """Return the number of arrays of this shape on each of `stage` pipeline stages."""
        return self.layers // stage if self.stacked else 1


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The numbers of a model and its training that all formulas for plans need.

    Attributes:
      batch: the number of sequences or examples in a step.
      narrow: whether activations and the factors of matrix products have two bytes per number.
      param_bytes: the mean number of bytes of a parameter element.
      state_bytes: the mean number of bytes of the optimizer's state per parameter element.
      spared_bytes: the bytes per element by which the state of a block's matrices is smaller than
        `state_bytes`. Muon keeps no second moment for these matrices.
      steps: the number of steps of the run, or None if the config gives epochs instead.
      offload: whether plans keep the optimizer's state that ZeRO splits in the host's memory.
      resting: the patterns of the parameters that plans with ZeRO keep in the host's memory.
      tensors: all parameters.
    """

    batch: int
    narrow: bool = True
    param_bytes: float = 4
    state_bytes: float = 8
    spared_bytes: int = 0
    steps: int | None = None
    offload: bool = False
    resting: tuple[str, ...] = ()
    tensors: tuple[PlannedParameter, ...] = ()

    @property
    def width(self) -> int:
        """The number of bytes of each element of an activation."""
        return 2 if self.narrow else 4

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(math.prod(one.shape) * one.count() for one in self.tensors)


@dataclass(frozen=True)
class Decoder(PlannedModel):
    """The sizes of a decoder, and the settings of its training that plans depend on.

    Attributes:
      layers: the number of blocks.
      embed, heads, kv_heads, head_dim, mlp: the sizes of a block's dims.
      vocab: the size of the padded vocabulary.
      window: the number of positions in a sequence.
      tied: whether the head shares its weights with the embedding.
      newton_schulz: the number of Newton-Schulz steps of Muon, or 0 for other optimizers.
      span: the number of positions that a position attends to, including itself, or None if it
        attends to all positions before it.
      loss_chunks: the number of chunks of the sequence whose logits are computed separately.
      scoped: whether `parallel.xla` gives products more vector memory than libtpu's default.
      gated: whether the MLP has a gate.
      frozen: the names of the parameters that are not trained.
      adapters: the parameters of low-rank adapters.
      on_host: the names of the parameters that plans with ZeRO keep in the host's memory.
      tensors: all parameters, which are derived from the other fields.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    window: int
    tied: bool = True
    newton_schulz: int = 0
    span: int | None = None
    loss_chunks: int = 1
    scoped: bool = True
    gated: bool = True
    frozen: frozenset[str] = frozenset()
    adapters: tuple[PlannedParameter, ...] = ()
    on_host: frozenset[str] = frozenset()
    tensors: tuple[PlannedParameter, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", (*self._tensors(), *self.adapters))

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.batch * self.window

    @property
    def unit(self) -> str:
        """The unit in which the data of a step are counted, "tokens"."""
        return "tokens"

    @property
    def step_words(self) -> str:
        """The amount of data in a step, as text."""
        return f"{self.batch:,} sequences of {self.window:,}: {self.tokens:,} tokens"

    @property
    def layer_flops(self) -> float:
        """The forward FLOPs per token of a block's products with its weights."""
        return 2.0 * sum(math.prod(t.shape) for t in self.tensors if t.matrix)

    @property
    def activations(self) -> dict[str, int]:
        """The number of elements per token of each activation of a block that remat may keep."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "query": query,
            "key": key,
            "value": key,
            "attention": query,
            "attention_out": self.embed,
            "mlp_gate": self.mlp,
            "mlp_up": self.mlp,
        }

    @property
    def attention_flops(self) -> float:
        """The forward FLOPs per token of a block's attention; masked products count too."""
        return 4.0 * self.window * self.heads * self.head_dim

    @property
    def head_flops(self) -> float:
        """The forward FLOPs per token of the head."""
        return 2.0 * self.embed * self.vocab

    def model_flops(self, *, masked: bool) -> float:
        """Return the FLOPs of a step in both passes, without recomputation.

        Args:
          masked: whether products that the causal mask discards count. If false, half of
            attention's products count.
        """
        attention = self.attention_flops * (1.0 if masked else 0.5)
        return 3 * self.tokens * (self.layers * (self.layer_flops + attention) + self.head_flops)

    @property
    def update_flops(self) -> float:
        """The FLOPs of Newton-Schulz for all matrices of blocks in a step, or 0 without Muon."""
        if not self.newton_schulz:
            return 0.0
        sizes = (
            (self.embed, math.prod(t.shape) // self.embed) for t in self._tensors() if t.matrix
        )
        return self.layers * sum(newton_schulz_flops(size, self.newton_schulz) for size in sizes)

    def _tensors(self) -> Iterator[PlannedParameter]:
        d, h, k, e, f = self.embed, self.heads, self.kv_heads, self.head_dim, self.mlp
        for name, shape, split, layers in (
            ("query", (d, h, e), 1, self.layers),
            ("key", (d, k, e), 1, self.layers),
            ("value", (d, k, e), 1, self.layers),
            ("out", (h, e, d), 0, self.layers),
            *([("gate", (d, f), 1, self.layers)] if self.gated else []),
            ("up", (d, f), 1, self.layers),
            ("down", (f, d), 0, self.layers),
            ("attention_norm", (d,), None, self.layers),
            ("mlp_norm", (d,), None, self.layers),
            ("embedding", (self.vocab, d), 0, 0),
            *([] if self.tied else [("output", (d, self.vocab), 1, 0)]),
            ("norm", (d,), None, 0),
        ):
            yield PlannedParameter(
                name,
                shape,
                split,
                layers,
                trained=name not in self.frozen,
                resting=name in self.on_host,
                embed=len(shape) - 1 if split == 0 else 0,
            )


def check_plannable(config: ExperimentConfig, document: Document) -> None:
    """Check that a config has no setting that the planner does not take into account.

    Raises:
      ConfigError: the config has such a setting, which the message names.
    """
    for name in ("deterministic", "compression"):
        with at_setting(document, "parallel", name):
            if getattr(config.parallel, name) is not None:
                raise ConfigError(
                    "the planner does not search with this setting: leave the setting out to see "
                    "plans, and add it to the config that --write makes"
                )
    for name in ("freeze", "lora"):
        with at_setting(document, "model", name):
            if getattr(config.model, name) and not isinstance(config.model, GptConfig):
                raise ConfigError(
                    "plans of other models than gpt are ranked by the memory and time of training "
                    "all parameters. Leave the setting out to see plans (they are upper "
                    "bounds), and add it to the config that --write makes; `jaxdist inspect` has "
                    "the memory of the part that is trained"
                )
    with at_setting(document, "strategy", "type"):
        if config.strategy.type != "synchronous":
            raise ConfigError(
                f"{config.strategy.type}: the planner plans only synchronous steps; set "
                "strategy.type: synchronous to see plans"
            )


def decoder_of(config: ExperimentConfig, document: Document) -> Decoder:
    """Return the sizes of the decoder of a config whose model is a gpt.

    Raises:
      ConfigError: the data have no tokens, the size of the optimizer's state is unknown, or a
        pattern of frozen or adapted parameters matches no parameter.
    """
    model, optim = config.model, config.optim
    assert isinstance(model, GptConfig), "other models are traced"
    with at_setting(document, "data"):
        dataset = config.data.build()
        if dataset.vocab_size is None:
            raise ConfigError(
                "a language model is planned only for data with tokens: set data.type text or chat"
            )
        # An example has one token more than the window, for targets shifted by one position.
        window = dataset.train[0]["tokens"].shape[0] - 1
    with at_setting(document, "optim", "type"):
        if not isinstance(optim, AdamWConfig | SgdConfig) and optim.type not in MOMENTS:
            known = ", ".join(MOMENTS)
            raise ConfigError(
                f"{optim.type}: the planner does not know the size of this optimizer's state; "
                f"known optimizers: {known}"
            )
    moments = MOMENTS[optim.type]
    if isinstance(optim, SgdConfig) and not optim.momentum:
        moments = 0
    narrow_params, moment_bytes = optim.master_weights is not None, 2 if optim.bf16_moments else 4
    xla = config.parallel.xla
    chunks = config.loss.chunks if isinstance(config.loss, NextTokenConfig) else 1
    return Decoder(
        layers=model.layers,
        embed=model.embed,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head_dim=model.head_dim,
        mlp=model.mlp_width,
        vocab=-(-dataset.vocab_size // model.vocab_multiple) * model.vocab_multiple,
        window=window,
        batch=config.train.batch_size,
        tied=model.tied_head,
        gated=model.mlp_type != "gelu",
        narrow=model.compute_dtype != "float32",
        param_bytes=2 if narrow_params else 4,
        state_bytes=moments * moment_bytes + 4 * narrow_params,
        spared_bytes=moment_bytes if isinstance(optim, MuonConfig) else 0,
        newton_schulz=optim.ns_steps if isinstance(optim, MuonConfig) else 0,
        span=model.attention_window,
        loss_chunks=chunks,
        steps=config.train.steps,
        offload=config.parallel.zero.offload,
        resting=config.parallel.zero.offload_parameters,
        scoped=SCOPED_VMEM in {**PRESETS[xla.preset], **xla.options},
        **_part(config, model, dataset.vocab_size, document),
    )


def _part(
    whole_config: ExperimentConfig, config: GptConfig, vocab_size: int, document: Document
) -> dict[str, Any]:
    """Return the fields `frozen`, `adapters` and `on_host` of a decoder.

    The mapping is empty if all parameters are trained and stay on the devices.

    Raises:
      ConfigError: a pattern matches no parameter.
    """
    patterns = whole_config.parallel.zero.offload_parameters
    if not config.freeze and config.lora is None and not patterns:
        return {}
    whole = functional(lambda rngs: config.build(rngs, vocab_size=vocab_size))
    with at_setting(document, "model"):
        model = trained_part(config, whole)
    names = [name for name, _ in flatten_with_names(model.params)]
    with at_setting(document, "parallel"):
        chosen = matching_names(patterns, names, "zero", "offload_parameters")
    adapters = [
        PlannedParameter(
            name,
            shape[one.layers is not None :],
            _split(dims[one.layers is not None :]),
            layers=one.layers or 0,
            resting=name in chosen,
        )
        for one in model.adapters
        for name, shape, dims in zip(one.names, one.shapes, one.all_dims, strict=True)
    ]
    frozen, on_host = (frozenset(map(_short, some)) for some in (model.frozen, chosen))
    return {"frozen": frozen, "adapters": tuple(adapters), "on_host": on_host}


def _short(name: str) -> str:
    """Return the planner's name of a parameter: the last word of its path, without `/scale`.

    >>> _short("blocks/attention_norm/scale")
    'attention_norm'
    """
    return name.removesuffix("/scale").rpartition("/")[2]


def _split(dims: Dims) -> int | None:
    """Return the index of the dim that axis tensor splits, or None if there is none."""
    found = [i for i, dim in enumerate(dims) if dim in ("heads", "kv_heads", "mlp", "vocab")]
    return found[0] if found else None
