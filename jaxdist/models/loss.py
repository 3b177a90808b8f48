"""The losses and metrics, as sums with weights that add up exactly over the parts of a batch.

A loss returns `{"loss": Mean, ...}`. The totals and weights of microbatches, devices and evaluation
batches are added, and each total is divided once. (An average of averages would be wrong if weights
differ.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

from jaxdist.config.importing import load_object
from jaxdist.config.schema import Config
from jaxdist.cost.context import SequenceSplit, positions_of
from jaxdist.errors import ConfigError, RunError
from jaxdist.models.feed_forward.measure import Auxiliary
from jaxdist.models.hints import Hint, no_hint
from jaxdist.models.mean import Mean, OpaqueMean, Ranking, RootMean, Sums
from jaxdist.models.recommend.loss import ClickConfig, SquaredErrorConfig
from jaxdist.models.tuning.dpo import DpoConfig
from jaxdist.types import Kwargs, PyTree, Scalar

Batch = Mapping[str, jax.Array]
Model: TypeAlias = Any
"""An NNX module, or a plain function with the same call."""
Loss = Callable[[Model, Batch], PyTree]
"""A function from (module, batch) to named sums, `Sums`; training minimizes the mean "loss".

A user's loss may instead return the mean of a batch as a scalar, or (scalar, {name: scalar}), if
the batch is not computed in parts; see `check_adds_up`.
"""


def weighted(batch: Batch) -> Batch:
    """Return a batch with the field `weight`; if the field is missing, every weight is 1.

    If the field is missing, the compiler knows the weights and their sum. The gradient of the mean
    then does not wait for the weights of other devices.
    """
    if "weight" in batch:
        return batch
    rows = next(iter(batch.values())).shape[0]
    return {**batch, "weight": jnp.ones(rows, jnp.float32)}


def _as_mean(name: str, value: Scalar, rows: jax.Array) -> Any:
    if isinstance(value, RootMean | Ranking):
        return value
    if isinstance(value, Mean):
        return Mean(jnp.asarray(value[0], jnp.float32), jnp.asarray(value[1], jnp.float32))
    if getattr(value, "shape", None) == ():
        return OpaqueMean(jnp.asarray(value * rows, jnp.float32), rows)
    raise RunError(
        f"the loss returned {type(value).__name__} {getattr(value, 'shape', '')} for {name!r}: "
        "return {'loss': Mean(total, weight), ...}, a scalar mean, or (scalar, {name: scalar})"
    )


def as_sums(result: PyTree, batch: Batch, *, training: bool = False) -> Sums:
    """Convert the result of a loss to named sums; a scalar becomes an `OpaqueMean`.

    Args:
      training: whether to leave out the values that only an evaluation measures (`RootMean`,
        `Ranking`).

    Raises:
      RunError: the loss returned a value of another type, or no value named "loss".
    """
    rows = batch["weight"].sum()
    if isinstance(result, Mapping):
        named = dict(result)
    elif type(result) is tuple and len(result) == 2 and isinstance(result[1], Mapping):
        named = {"loss": result[0], **result[1]}
    else:
        named = {"loss": result}
    sums = {name: _as_mean(name, value, rows) for name, value in named.items()}
    if training:
        sums = training_sums(sums)
    if "loss" not in sums:
        raise RunError(
            f"the loss returned {sorted(sums)}, without the value to minimise: add the key 'loss'"
        )
    return sums


def training_sums(sums: Sums) -> Sums:
    """Return the sums, except the sums that only an evaluation measures."""
    return {name: mean for name, mean in sums.items() if isinstance(mean, Mean)}


Needs = Mapping[str, tuple[str, ...] | None]
"""For each field of an example that a loss reads, by name: the dims that the field must have, or
None if it may have any dims."""


class NextTokenConfig(Config):
    """Cross-entropy of each next token, in nats."""

    needs: ClassVar[Needs] = {"tokens": ("length + 1",), "segments": ("length",)}
    type: Literal["next_token"]
    """The name that selects this loss in a config."""
    chunks: Annotated[int, Field(ge=1)] = 1
    """The number of chunks of the sequence whose logits are computed one after another, and again
    in the backward pass. More chunks save memory with a large vocabulary, because not all logits
    are in memory together. The number must divide the sequence."""

    def build(self, hint: Hint = no_hint) -> Loss:
        """Return the loss function, which calls the module as `module(tokens, segments)`.

        With several chunks, the function instead calls the module's `hidden` and `head`.

        Args:
          hint: the layout of activations on the mesh.
        """
        loss: Loss = next_token
        if self.chunks > 1:
            loss = partial(next_token_in_chunks, chunks=self.chunks)
        if hint.parts("seq") == hint.parts("experts") == 1:
            return loss
        loss = partial(loss, hint=hint)
        return loss if hint.split is None else InOrder(loss, hint.split)


class MaskedTokensConfig(Config):
    """Cross-entropy of each masked token, in nats, and accuracy."""

    needs: ClassVar[Needs] = {
        "tokens": ("length",),
        "segments": ("length",),
        "positions": ("predicted",),
        "targets": ("predicted",),
    }
    type: Literal["masked_tokens"]
    """The name that selects this loss in a config."""

    def build(self, hint: Hint = no_hint) -> Loss:
        """Return the loss function, which calls `module.hidden(tokens, segments)` and a head.

        Args:
          hint: the layout of activations on the mesh.
        """
        whole = hint.parts("seq") == 1
        return masked_tokens if whole else partial(masked_tokens, hint=hint)


class ClassificationConfig(Config):
    """Softmax cross-entropy of one label per example, in nats, and accuracy."""

    needs: ClassVar[Needs] = {"image": None, "label": ()}
    of_text: ClassVar[Needs] = {"tokens": ("length",), "segments": ("length",), "label": ()}
    type: Literal["classification"]
    """The name that selects this loss in a config."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The fraction of each target's probability that is spread over all classes, in training and
    evaluation. 0 changes no target."""

    def build(self) -> Loss:
        """Return the loss function, which calls the module as `module(image)`, with values in 0..1.

        For examples with tokens, the call is `module(tokens, segments)` instead.
        """
        return partial(classification, label_smoothing=self.label_smoothing)


class ImportedLossConfig(Config):
    """A user's loss: a function of (module, batch)."""

    needs: ClassVar[Needs] = {}
    type: Literal["import"]
    """The name that selects this loss in a config."""
    path: str
    """The import path of the function, `mypkg.module:name`."""
    args: Kwargs = Field(default_factory=dict)
    """The keyword arguments for the function, by name."""

    def build(self) -> Loss:
        """Return the user's function with its keyword arguments bound."""
        return partial(load_object(self.path), **self.args)


LossConfig = Annotated[
    NextTokenConfig
    | MaskedTokensConfig
    | ClassificationConfig
    | SquaredErrorConfig
    | ClickConfig
    | DpoConfig
    | ImportedLossConfig,
    Field(discriminator="type"),
]


def check_fields(config: LossConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse data without the fields that the loss reads.

    Args:
      shapes: the shape of each field of an example, by the field's name.

    Raises:
      ConfigError: a field is missing or has another number of dims than the loss needs; `chunks`
        does not divide the sequence.
    """
    if isinstance(config, ClassificationConfig) and _reads(config.of_text, shapes):
        return
    if _reads(config.needs, shapes):
        if isinstance(config, NextTokenConfig):
            _check_chunks(config.chunks, shapes["segments"][0])
        return
    built_in = (
        MaskedTokensConfig(type="masked_tokens"),
        NextTokenConfig(type="next_token"),
        ClassificationConfig(type="classification"),
        ClickConfig(type="click"),
    )
    fitting = [f"loss.type {other.type}" for other in built_in if _reads(other.needs, shapes)]
    instead = (*fitting, "a loss of your own, {type: import, path: ...}")[0]
    if isinstance(config, MaskedTokensConfig) and "tokens" in shapes:
        instead = f"data.masking: {{}} to hide tokens, or {instead}"
    needed = " and ".join(
        f"{name} [{'any shape' if dims is None else ', '.join(dims)}]"
        for name, dims in config.needs.items()
    )
    given = " and ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
    raise ConfigError(
        f"loss.type {config.type} needs {needed} in each example, but the data gives {given}; use "
        f"{instead}"
    )


def _reads(needs: Needs, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return all(
        name in shapes and (dims is None or len(dims) == len(shapes[name]))
        for name, dims in needs.items()
    )


def next_token(module: Model, batch: Batch, *, hint: Hint = no_hint) -> Sums:
    """Compute the weighted mean cross-entropy of the next tokens.

    Args:
      module: a module that maps tokens `[B, L]` and segments `[B, L]` to logits `[B, L, V]`. If the
        module has `padded_head`, the logits are `padded_head(hidden(tokens, segments))` instead.
      batch: tokens int32 `[B, L + 1]`, segments int32 `[B, L]`, and weight float32 `[B]`. An
        optional field answer, float32 `[B, L]`, multiplies the weight of each target.
      hint: the layout of activations on the mesh.
    """
    (given, targets), padded = _shifted(batch), _padded_head(module)
    if padded is None:
        return {"loss": _nats(module(*given), targets, _weights(batch), hint=hint)}
    x_BLD, more = _hidden(module, batch)
    nats = _nats(padded(x_BLD), targets, _weights(batch), hint=hint)
    return _with_auxiliary(nats, module, more)


def _hidden(module: Model, batch: Batch) -> tuple[jax.Array, Auxiliary | None]:
    """Return the head's input, and the auxiliary losses, which are None without routers."""
    given, _ = _shifted(batch)
    measured = getattr(module, "measured", None)
    if measured is not None:
        return measured(_weights(batch), *given)
    return module.hidden(*given), None


def _with_auxiliary(nats: Mean, module: Model, more: Auxiliary | None) -> Sums:
    """Return the sums of the loss `nats`, to which a model's auxiliary losses `more` are added.

    In evaluation, `loss` does not include the auxiliary losses, but their metrics are measured.
    """
    if more is None:
        return {"loss": nats}
    penalty = 0.0 if module.deterministic else more.penalty
    return {"loss": Mean(nats.total + penalty, nats.weight), "cross_entropy": nats, **more.sums}


def _shifted(batch: Batch) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return a model's inputs, and the target of each position."""
    if "order" in batch:
        return (batch["tokens"], batch["segments"], batch["order"]), batch["targets"]
    return (batch["tokens"][:, :-1], batch["segments"]), batch["tokens"][:, 1:]


@dataclass(frozen=True)
class InOrder:
    """A loss that first permutes the positions of sequences, as zigzag and striped orders need.

    Inputs, targets, documents and weights are permuted together, so the sums do not depend on the
    order.

    Attributes:
      loss: the loss of the permuted batch, `next_token` or `next_token_in_chunks`.
      split: the split of sequences over devices, which determines the order.
    """

    loss: Loss
    split: SequenceSplit

    def __call__(self, module: Model, batch: Batch) -> Sums:
        """Compute the loss of a batch in the order of the text, or of a batch from `arranged`."""
        moved = self.arranged(batch)
        order = jnp.asarray(self._order(moved["tokens"].shape[1]))[None]
        return self.loss(module, {**moved, "order": order})

    def arranged(self, batch: Batch) -> Batch:
        """Return a batch with targets, in which positions are in the order of the split.

        A batch that has targets already is returned unchanged.
        """
        if "targets" in batch:
            return batch
        (tokens, segments), targets = _shifted(batch)
        moved = {"tokens": tokens, "segments": segments, "targets": targets}
        if "answer" in batch:
            moved["answer"] = batch["answer"]
        if self.split.order != "contiguous":
            order = self._order(tokens.shape[1])
            moved = {name: x[:, order] for name, x in moved.items()}
        return {**batch, **moved}

    def _order(self, length: int) -> np.ndarray:
        return positions_of(self.split.order, length, self.split.groups)


def arranged(loss: Loss, batch: Batch) -> dict[str, jax.Array]:
    """Return the batch with its positions in the order of the loss."""
    return dict(loss.arranged(batch) if isinstance(loss, InOrder) else batch)


def _padded_head(module: Model) -> Callable[[jax.Array], jax.Array] | None:
    """Return the head whose logits include vocabulary padding, or None if the model has none."""
    return getattr(module, "padded_head", None)


def next_token_in_chunks(module: Model, batch: Batch, *, chunks: int, hint: Hint = no_hint) -> Sums:
    """Compute `next_token`, with the logits of only one chunk of the sequence in memory.

    Args:
      module: a `Stacked`, or a module that has `hidden(tokens, segments)` -> `[B, L, D]`, and
        `head` from hidden states to logits.

    Raises:
      ConfigError: the module has no `hidden`, or the sequence does not divide into `chunks`.
    """
    _, targets = _shifted(batch)
    if not hasattr(module, "hidden"):
        raise ConfigError(
            "loss.chunks needs a model of embedding, blocks and head "
            f"(jaxdist.models.layers.Stacked), but this is {type(module).__name__}: set "
            "loss.chunks: 1"
        )
    # Each device cuts its part of the sequence into chunks, so that all devices work on every
    # chunk.
    parts = hint.parts("seq")
    _check_chunks(chunks, targets.shape[1] // parts)
    (x_BLD, more), padded = _hidden(module, batch), _padded_head(module)

    # Without a checkpoint, the backward pass would keep the logits of all chunks.
    @jax.checkpoint
    def nats(x_BlD: jax.Array, targets_Bl: jax.Array, weight_Bl: jax.Array) -> Mean:
        head = module.head if padded is None else padded
        return _nats(head(x_BlD), targets_Bl, weight_Bl, hint=hint)

    def add(sums: Mean, piece: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Mean, None]:
        return jax.tree.map(jnp.add, sums, nats(*piece)), None

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(x.shape[0], parts, chunks, -1, *x.shape[2:]), 2, 0)
        return x.reshape(chunks, x.shape[1], -1, *x.shape[4:])

    pieces = cut(x_BLD), cut(targets), cut(_weights(batch))
    nothing = jnp.zeros((), jnp.float32)
    nats_of_all = jax.lax.scan(add, Mean(nothing, nothing), pieces)[0]
    return _with_auxiliary(nats_of_all, module, more)


def masked_tokens(module: Model, batch: Batch, *, hint: Hint = no_hint) -> Sums:
    """Compute the mean cross-entropy and accuracy of masked tokens, weighted by example.

    The head runs only at the positions of masked tokens.

    Args:
      module: a module with `hidden(tokens, segments)` -> `[B, L, D]`, and `head` from states to
        logits.
      batch: tokens int32 `[B, L]`, segments int32 `[B, L]`, positions int32 `[B, P]` of the masked
        tokens, targets int32 `[B, P]`, and weight float32 `[B]`.
      hint: the layout of activations on the mesh.
    """
    x_BLD = module.hidden(batch["tokens"], batch["segments"])
    x_BPD = jnp.take_along_axis(x_BLD, batch["positions"][:, :, None], axis=1)
    logits_BPV = (_padded_head(module) or module.head)(x_BPD)
    hits_BP = (logits_BPV.argmax(-1) == batch["targets"]).astype(jnp.float32)
    weight_BP = jnp.broadcast_to(batch["weight"][:, None], hits_BP.shape)
    return {
        "loss": _nats(logits_BPV, batch["targets"], weight_BP, hint=hint),
        "accuracy": Mean((hits_BP * weight_BP).sum(), weight_BP.sum()),
    }


def _check_chunks(chunks: int, length: int) -> None:
    if length % chunks:
        near = max(n for n in range(1, chunks) if length % n == 0)
        raise ConfigError(
            f"loss.chunks {chunks} does not divide sequences of {length} positions: use {near}"
        )


def _weights(batch: Batch) -> jax.Array:
    """Return the weight of each target `[B, L]`."""
    shape = batch["segments"].shape if "order" in batch else batch["tokens"][:, 1:].shape
    weight_BL = jnp.broadcast_to(batch["weight"][:, None], shape)
    return weight_BL * batch["answer"] if "answer" in batch else weight_BL


def _nats(
    logits_BLV: jax.Array, targets_BL: jax.Array, weight_BL: jax.Array, *, hint: Hint = no_hint
) -> Mean:
    # In bfloat16, the sum of exponentials over a vocabulary would keep only two to three digits.
    logits_BLV = logits_BLV.astype(jnp.float32)
    if hint.parts("vocab") > 1 and max(hint.parts("seq"), hint.parts("experts")) > 1:
        # XLA's partitioner aborts at a gather of targets from logits that two axes split, if
        # another axis is manual.
        chosen_BLV = jnp.arange(logits_BLV.shape[-1])[None, None] == targets_BL[..., None]
        target_BL = jnp.where(chosen_BLV, logits_BLV, 0).sum(-1)
        nats_BL = jax.nn.logsumexp(logits_BLV, -1) - target_BL
    else:
        nats_BL = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, targets_BL)
    return Mean((nats_BL * weight_BL).sum(), weight_BL.sum())


def classification(
    module: Callable[..., jax.Array], batch: Batch, *, label_smoothing: float
) -> Sums:
    """Compute the weighted means of cross-entropy and of accuracy over examples.

    Args:
      module: a module that maps images `[B, height, width, channels]`, or tokens and segments `[B,
        L]`, to logits `[B, classes]`.
      batch: tokens and segments int32, or image uint8 or float; label int32 `[B]`, and weight
        float32 `[B]`. After mixup, the batch also has mixed_label int32 `[B]` and mixed_share
        float32 `[B]`: the label and the share of the image that was mixed in.
      label_smoothing: the fraction of each target's probability that is spread over all classes.
    """
    label, weight = batch["label"], batch["weight"]
    if "tokens" in batch:
        logits = module(batch["tokens"], batch["segments"])
    else:
        image = batch["image"]
        logits = module(image.astype(jnp.float32) / 255 if image.dtype == jnp.uint8 else image)
    logits = logits.astype(jnp.float32)
    target = jax.nn.one_hot(label, logits.shape[-1])
    if "mixed_label" in batch:  # Labels are mixed in the same shares as images.
        share = batch["mixed_share"][:, None]
        other = jax.nn.one_hot(batch["mixed_label"], logits.shape[-1])
        target = (1 - share) * target + share * other
    target = optax.smooth_labels(target, label_smoothing)
    nats_B = optax.softmax_cross_entropy(logits, target)
    hit_B = (logits.argmax(-1) == label).astype(jnp.float32)
    count = weight.sum()
    return {
        "loss": Mean((nats_B * weight).sum(), count),
        "accuracy": Mean((hit_B * weight).sum(), count),
    }
