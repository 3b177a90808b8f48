"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), from pairs of answers.

Dims: B batch, P the two answers (the preferred answer first), L sequence, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import PositiveFloat

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.models.mean import Mean, Sums


class DpoConfig(Config):
    """The loss of a preferred and a rejected answer: -log sigmoid(beta (margin - margin_ref)).

    The margin is the difference between the two answers' log-probabilities in the model, and
    margin_ref is the same difference in the reference.
    """

    needs: ClassVar[dict[str, tuple[str, ...] | None]] = {
        "tokens": ("pair", "length + 1"),
        "segments": ("pair", "length"),
        "answer": ("pair", "length"),
    }
    type: Literal["dpo"]
    """The name that selects this loss in a config."""
    beta: PositiveFloat = 0.1
    """The strength with which the model is kept near the reference model; a larger value allows
    less change."""

    def build(self) -> Dpo:
        """Return the loss function, which calls the model and the reference."""
        return Dpo(self.beta)


@dataclass(frozen=True)
class Dpo:
    """The loss as a function of (module, batch, base).

    Attributes:
      beta: the strength with which the model is kept near the reference.
      takes_base: whether the loss accepts `base`, the model without its adapters.
    """

    beta: float
    takes_base: ClassVar[bool] = True

    def __call__(self, module: Any, batch: Any, base: Any = None) -> Sums:
        """Compute the mean loss of pairs, and the fraction of pairs with a positive margin.

        The weights of the pairs apply to the mean loss and to the fraction. A pair's margin is
        positive if it exceeds the margin in the reference.

        Args:
          batch: tokens int32 `[B, 2, L + 1]`, segments int32 and answer float32 `[B, 2, L]`, weight
            float32 `[B]`. An optional field reference, float32 `[B, 2]`, has the log-probabilities
            of the answers in the reference.
          base: the reference model, which is used if the batch has no `reference`.

        Raises:
          ConfigError: the batch has no `reference`, and `base` is None.
        """
        own_BPL = log_probabilities(module, batch)
        if "reference" in batch:
            gained_BP = own_BPL.sum(-1) - batch["reference"]
        elif base is not None:
            # The two sums over an answer may be hundreds of times larger than their difference, so
            # that their rounding would show: the tokens are subtracted first.
            gained_BP = (own_BPL - jax.lax.stop_gradient(log_probabilities(base, batch))).sum(-1)
        else:
            raise ConfigError(
                "loss.type dpo needs a reference model: set model.lora, whose frozen base model "
                "is the reference, or give each example the field reference, the "
                "log-probabilities of its two answers"
            )
        margin_B = self.beta * (gained_BP[:, 0] - gained_BP[:, 1])
        weight_B = batch["weight"]
        total = weight_B.sum()
        return {
            "loss": Mean((-jax.nn.log_sigmoid(margin_B) * weight_B).sum(), total),
            "preferred": Mean(((margin_B > 0) * weight_B).sum(), total),
        }


def log_probabilities(module: Any, batch: Any) -> jax.Array:
    """Return the log-probability of each token of an answer, float32 `[B, 2, L]`.

    The entries of tokens outside of the answers are 0.
    """
    tokens, segments = batch["tokens"], batch["segments"]
    flat = tokens.reshape(-1, tokens.shape[-1])
    logits = module(flat[:, :-1], segments.reshape(-1, segments.shape[-1]))
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    said = jnp.take_along_axis(logs, flat[:, 1:, None], -1)[..., 0].reshape(segments.shape)
    return said * batch["answer"]
