"""Generated clicks: any number of examples with any number of ids, which follow a power law."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from jaxdist.config.schema import LARGEST, Config, Count
from jaxdist.data.permutation import key_of, mix
from jaxdist.data.source import BatchSource, Dataset, Example

_TRAIN, _HELDOUT, _WORLD = range(3)


class ClicksConfig(Config):
    """Generated clicks: random ids, and a click that depends on hidden values of the ids.

    The frequency of the k-th most frequent id is about proportional to k to the power of -`skew`. A
    permutation spreads frequent ids over a table.
    """

    type: Literal["clicks"]
    """The name that selects generated clicks in a config."""
    fields: Count = 8
    """The number of categorical fields of an example."""
    ids: Annotated[int, Field(ge=2, le=LARGEST)] = 10_000
    """The number of different ids of each field."""
    dense: Annotated[int, Field(ge=0, le=1024)] = 0
    """The number of dense features of an example."""
    skew: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """The exponent of the power law by which ids are drawn. A larger exponent makes few ids more
    frequent."""
    examples: Count = 65_536
    """The number of training examples, which are computed when they are read and take no memory."""
    heldout_examples: Annotated[int, Field(ge=0, le=LARGEST)] = 4_096
    """The number of held-out examples, none of which is a training example."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of the examples; equal seeds give equal examples."""

    def build(self) -> Dataset:
        """Build the data set; examples are computed only when they are read."""
        heldout = _Clicks(self, _HELDOUT, self.heldout_examples) if self.heldout_examples else None
        return Dataset(
            train=_Clicks(self, _TRAIN, self.examples),
            heldout=heldout,
            fields={f"field_{at}": self.ids for at in range(self.fields)},
            description=(
                f"clicks: {self.examples:,} generated, {self.fields} fields of {self.ids:,} ids"
            ),
        )


class _Clicks(BatchSource):
    """A source of `ids` int32 [F], `target` float32, and `dense` float32 [C] if C is not 0."""

    def __init__(self, config: ClicksConfig, stream: int, length: int):
        self._config, self._length = config, length
        self._key, self._world = key_of(config.seed, stream), key_of(config.seed, _WORLD)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Example:
        config = self._config
        count = config.fields + config.dense + 1
        unit_BN = _unit(mix(indices.astype(np.uint64) ^ self._key)[:, None], count)
        # This inverts the integral of the density x^-skew, which is proportional to x^(1 - skew).
        share_BF = unit_BN[:, : config.fields] ** (1 / (1 - config.skew))
        ranks_BF = (config.ids * share_BF).astype(np.int64)
        # A product with a factor that is coprime to the number of ids permutes the ids.
        ids_BF = ranks_BF * _coprime(config.ids) % config.ids
        columns = np.arange(config.fields, dtype=np.uint64)[None, :]
        keys_BF = mix(ids_BF.astype(np.uint64) ^ mix(columns ^ self._world))
        hidden_BF = 2 * _unit(keys_BF[..., None], 1)[..., 0] - 1
        logit_B = 2 * (hidden_BF.sum(1) + hidden_BF[:, 0] * hidden_BF[:, -1])
        found: dict[str, np.ndarray] = {"ids": ids_BF.astype(np.int32)}
        if config.dense:
            dense_BC = (2 * unit_BN[:, config.fields : -1] - 1).astype(np.float32)
            found["dense"] = dense_BC
            logit_B = logit_B + dense_BC.sum(1)
        clicked_B = unit_BN[:, -1] < 1 / (1 + np.exp(-logit_B))
        return {**found, "target": clicked_B.astype(np.float32)}


def _unit(keys: np.ndarray, count: int) -> np.ndarray:
    """Return `count` random numbers in (0, 1) for each key, as float64 along the last dim.

    The size of the last dim of `keys` is 1.
    """
    bits = mix(keys + np.arange(count, dtype=np.uint64))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _coprime(size: int) -> int:
    found = 1 + size * 5 // 8
    while np.gcd(found, size) != 1:
        found += 1
    return found
