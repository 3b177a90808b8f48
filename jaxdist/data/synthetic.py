"""Synthetic data of any size, for benchmarks; an example depends only on seed and index."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from jaxdist.config.schema import LARGEST, Config
from jaxdist.data.permutation import key_of, mix
from jaxdist.data.source import BatchSource, Dataset, Example
from jaxdist.data.text.masking import MaskedWindows, MaskingConfig
from jaxdist.data.transform import TransformConfig, transformed
from jaxdist.errors import DataError
from jaxdist.runtime.hardware import host_memory_bytes

_SUCCESSORS = 4
_NOISES = 64
_TRAIN, _HELDOUT, _WORLD = range(3)

_ONLY = {
    "tokens": {"vocab_size", "window", "masking"},
    "labelled_tokens": {"vocab_size", "window", "classes"},
    "images": {"height", "width", "channels", "classes", "transform"},
}
"""The settings that only some kinds read, by kind."""


class SyntheticConfig(Config):
    """Random examples with a structure that a model can learn."""

    type: Literal["synthetic"] = "synthetic"
    """The name that selects synthetic data in a config."""
    kind: Literal["tokens", "labelled_tokens", "images"]
    """The kind of examples. tokens are drawn from a random bigram chain. labelled_tokens are such
    tokens, of which the first determines the class. images are the picture of the image's class
    plus noise."""
    examples: int = Field(default=65_536, ge=1, le=LARGEST)
    """The number of training examples, which are generated when they are read, and not stored."""
    heldout_examples: int = Field(default=1_024, ge=0, le=LARGEST)
    """The number of held-out examples, none of which is a training example."""
    seed: int = Field(default=0, ge=0)
    """The seed of the examples; equal seeds give equal examples."""
    vocab_size: int = Field(default=257, ge=2, le=LARGEST)
    """The size of the vocabulary, for the kinds of tokens."""
    window: int = Field(default=256, ge=1, le=LARGEST)
    """The number of tokens that an example of the kind tokens predicts, or the number of tokens of
    an example of the kind labelled_tokens."""
    masking: MaskingConfig | None = None
    """The tokens to hide from an encoder (bert), which predicts the hidden tokens. The setting is
    only for the kind tokens. null hides nothing."""
    height: int = Field(default=32, ge=1, le=LARGEST)
    """The number of rows of an image, in pixels."""
    width: int = Field(default=32, ge=1, le=LARGEST)
    """The number of columns of an image, in pixels."""
    channels: int = Field(default=3, ge=1, le=LARGEST)
    """The number of values in a pixel of an image."""
    classes: int = Field(default=10, ge=2, le=LARGEST)
    """The number of labels, for images and labelled tokens."""
    transform: TransformConfig | None = None
    """The transform of each image; null keeps uint8 values from 0 to 255."""

    @model_validator(mode="after")
    def _other_kind_is_not_set(self) -> SyntheticConfig:
        default = {name: field.default for name, field in type(self).model_fields.items()}
        for kind, names in _ONLY.items():
            other = sorted(names - _ONLY[self.kind])
            unused = [name for name in other if getattr(self, name) != default[name]]
            if unused:
                raise ValueError(
                    f"{', '.join(unused)} has no effect with kind {self.kind!r}: leave the setting "
                    f"out, or set kind to {kind!r}"
                )
        return self

    def build(self) -> Dataset:
        """Build the data set; examples are computed only when they are read.

        Raises:
          DataError: the images do not fit into this machine's memory.
        """
        tokens = self.kind != "images"
        if not tokens:
            _check_pictures(self)
        source = _TokenSource if tokens else _ImageSource
        shape = (
            f"windows of {self.window} tokens out of {self.vocab_size}"
            if tokens
            else f"{self.height} x {self.width} x {self.channels} images in {self.classes} classes"
        )
        dataset = Dataset(
            train=source(self, _TRAIN, self.examples),
            heldout=source(self, _HELDOUT, self.heldout_examples)
            if self.heldout_examples
            else None,
            vocab_size=self.vocab_size if tokens else None,
            classes=None if self.kind == "tokens" else self.classes,
            description=f"synthetic: {self.examples:,} {shape}",
        )
        if self.masking is not None:
            # The vocabulary receives an additional token, the mask, which replaces hidden tokens.
            size = self.vocab_size
            hidden = partial(
                MaskedWindows, config=self.masking, mask=size, vocab_size=size, special=(size,)
            )
            return dataset.with_sources(hidden, vocab_size=size + 1)
        return transformed(dataset, self.transform)


class _TokenSource(BatchSource):
    """A source of `tokens` int32 [L + 1], and of `segments` int32 [L], which are zeros.

    Each token of the vocabulary has four possible successors. Labelled examples have only L tokens,
    and `label` int32, which depends on the first token.
    """

    def __init__(self, config: SyntheticConfig, stream: int, length: int):
        self._window, self._vocab_size = config.window, config.vocab_size
        self._classes = config.classes if config.kind == "labelled_tokens" else None
        self._stream, self._length = key_of(config.seed, stream), length
        world = np.random.default_rng([config.seed, _WORLD])
        self._successors = world.integers(
            config.vocab_size, size=(config.vocab_size, _SUCCESSORS), dtype=np.int32
        )

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Example:
        draws = _draws(self._stream, indices, self._window + 1)
        tokens = np.empty(draws.shape, np.int32)
        tokens[:, 0] = draws[:, 0] % self._vocab_size
        choices = draws % _SUCCESSORS
        for place in range(1, self._window + 1):
            tokens[:, place] = self._successors[tokens[:, place - 1], choices[:, place]]
        found = {"tokens": tokens, "segments": np.zeros((len(indices), self._window), np.int32)}
        if self._classes is None:
            return found
        labels = (tokens[:, 0] % self._classes).astype(np.int32)
        return {**found, "tokens": tokens[:, :-1], "label": labels}


def _check_pictures(config: SyntheticConfig) -> None:
    """Check that the images fit into memory, before minutes are spent on random numbers."""
    shape = (config.height, config.width, config.channels)
    needed = (config.classes + _NOISES) * math.prod(shape)
    if needed > host_memory_bytes():
        raise DataError(
            f"data: {config.classes} pictures and {_NOISES} arrays of noise, each of shape "
            f"{list(shape)}, need {needed / 1e9:,.1f} GB, but this machine has "
            f"{host_memory_bytes() / 1e9:,.1f} GB: lower data.height, data.width, data.channels "
            "or data.classes"
        )


class _ImageSource(BatchSource):
    """A source of `image` uint8 [H, W, C], the picture of a class plus noise, and `label` int32."""

    def __init__(self, config: SyntheticConfig, stream: int, length: int):
        self._stream, self._length = key_of(config.seed, stream), length
        shape = (config.height, config.width, config.channels)
        world = np.random.default_rng([config.seed, _WORLD])
        # The picture and the noise are both below 128, so that their sum fits in uint8.
        self._pictures = world.integers(128, size=(config.classes, *shape), dtype=np.uint8)
        self._noises = world.integers(128, size=(_NOISES, *shape), dtype=np.uint8)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Example:
        labels, noises = _draws(self._stream, indices, 2).T
        labels = (labels % len(self._pictures)).astype(np.int32)
        return {"image": self._pictures[labels] + self._noises[noises % _NOISES], "label": labels}


def _draws(key: np.uint64, indices: np.ndarray, count: int) -> np.ndarray:
    """Return `count` random numbers for each example, uint64 [N, count].

    The numbers depend only on the key and on the index of the example.
    """
    examples = mix(indices.astype(np.uint64) ^ key)
    return mix(examples[:, None] + np.arange(count, dtype=np.uint64))
