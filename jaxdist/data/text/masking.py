"""Hidden tokens, which an encoder must predict (Devlin, arXiv 1810.04805).

Dims: N examples, L sequence, P predicted positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from jaxdist.config.schema import Config
from jaxdist.data.draws import Draws
from jaxdist.data.permutation import mix
from jaxdist.data.source import BatchSource, Example, HostBatch, Source, take

_Fraction = Annotated[float, Field(ge=0, le=1)]


class MaskingConfig(Config):
    """The settings for hiding some tokens of each window, which an encoder must predict."""

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The fraction of the tokens that are predicted. Every window has the same number of predicted
    tokens."""
    masked: _Fraction = 0.8
    """The fraction of the predicted tokens that the mask replaces."""
    random: _Fraction = 0.1
    """The fraction of the predicted tokens that a random token replaces. The predicted tokens that
    are replaced neither by the mask nor by a random token are kept."""
    token: str = "[MASK]"
    """The tokenizer's token for the mask. If the tokenizer lacks this token, the vocabulary grows
    by one token."""

    @model_validator(mode="after")
    def _check(self) -> MaskingConfig:
        if self.masked + self.random > 1:
            raise ValueError(
                f"masked {self.masked} and random {self.random} add up to more than 1: lower one "
                "of the two fractions"
            )
        if self.masked + self.random == 0:
            raise ValueError(
                "masked 0 and random 0 hide nothing, and the model would read what it must "
                "predict: raise one of them"
            )
        return self

    def predicted(self, window: int) -> int:
        """Return the number of predicted tokens in a window: at least 1, and fewer than all.

        >>> MaskingConfig().predicted(128), MaskingConfig(rate=0.99).predicted(16)
        (19, 15)
        """
        return max(1, min(window - 1, round(self.rate * window)))


@dataclass(frozen=True)
class MaskedWindows(BatchSource):
    """A source of windows with hidden tokens, from a source of `tokens` [L + 1] and `segments` [L].

    An example has `tokens` int32 [L], in which hidden tokens are replaced; `segments` int32 [L];
    `positions` int32 [P], the positions of the predicted tokens; and `targets` int32 [P], the
    original tokens at these positions. In training, the hidden tokens of a window depend on the key
    with which it is drawn. Evaluation always hides the same tokens.

    Attributes:
      mask: the token that replaces hidden tokens.
      vocab_size: the number of tokens from which random tokens are drawn.
      special: the tokens, such as the end of a document, that are predicted only if a window has
        too few other tokens.
    """

    source: Source
    config: MaskingConfig
    mask: int
    vocab_size: int
    special: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: np.ndarray) -> Example:
        return self.draw(indices, mix(indices.astype(np.uint64)))

    def draw(self, indices: np.ndarray, keys: np.ndarray) -> Example:
        batch = take(self.source, indices)
        return self._hidden(batch["tokens"][:, :-1], batch["segments"], Draws(keys))

    def _hidden(self, tokens: np.ndarray, segments: np.ndarray, draws: Draws) -> HostBatch:
        L = tokens.shape[1]
        count = self.config.predicted(L)
        # The positions with the smallest random numbers are predicted. The top bit is set only for
        # special tokens, so that special tokens come last.
        order = mix(draws.bits()[:, None] ^ mix(np.arange(L, dtype=np.uint64)))
        order >>= np.uint64(1)
        special = np.isin(tokens, self.special)
        order[special] |= np.uint64(1 << 63)
        positions = np.sort(np.argpartition(order, count - 1, axis=1)[:, :count], axis=1)
        targets = np.take_along_axis(tokens, positions, axis=1)
        chosen = mix(draws.bits()[:, None] ^ mix(np.arange(count, dtype=np.uint64)))
        kind = (chosen >> np.uint64(11)) * 2.0**-53
        other = (mix(chosen) % np.uint64(self.vocab_size)).astype(np.int32)
        replaced = np.where(
            kind < self.config.masked,
            np.int32(self.mask),
            np.where(kind < self.config.masked + self.config.random, other, targets),
        )
        hidden = tokens.copy()
        np.put_along_axis(hidden, positions, replaced, axis=1)
        return {
            "tokens": hidden,
            "segments": segments,
            "positions": positions.astype(np.int32),
            "targets": targets,
        }
