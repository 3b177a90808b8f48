"""The settings of a mixture of experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxdist.config.schema import Config, Count

ProductName = Literal["auto", "loop", "ragged_dot", "megablox"]
"""The name of a method to multiply rows by the kernels of their experts."""
BALANCE = 0.01
"""The default weight of the balance loss, as in the Switch Transformer (arXiv 2101.03961)."""


class ExpertsConfig(Config):
    """Experts instead of the MLP: a router sends each token to a few experts."""

    count: Count
    """The number of experts of a layer."""
    top_k: Count = 2
    """The number of experts to which each token is sent."""
    mlp: Count | None = None
    """The hidden width of an expert; null takes the width of the model's MLP."""
    shared: Annotated[int, Field(ge=0)] = 0
    """The number of additional experts, which receive every token without the router."""
    every: Count = 1
    """The distance n between blocks with experts: every n-th block has experts, and the other
    blocks have the model's MLP."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """The scores of the experts, of which the largest are selected: a softmax over all experts, or
    a sigmoid for each expert."""
    normalize: bool = True
    """Whether to divide the weights of a token's selected experts by their sum."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """The factor by which the weights of the selected experts are multiplied."""
    balance_loss: Annotated[float, Field(ge=0)] | None = None
    """The weight of the auxiliary loss that balances the load of each sequence, as in the Switch
    Transformer. null means 0.01, or 0 if bias_rate is set."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the auxiliary z-loss, which is the square of the logsumexp of the router's
    logits. 0 adds no such loss."""
    bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """The change per step of a bias that only selects experts (arXiv 2408.15664). The bias rises
    for experts with less than the mean load, and falls for other experts. No gradient reaches the
    bias. 0 uses no bias."""
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """The largest number of tokens of a sequence that an expert takes, as a multiple of an even
    load (rounded up). An expert drops the later tokens of the sequence; null drops no token."""
    product: ProductName = "auto"
    """The method to multiply rows by the kernels of their experts: loop (over blocks of rows),
    ragged_dot (XLA's method, which on CPU computes every expert for every row) or megablox (a
    Pallas kernel for TPU). auto takes loop on CPU, megablox on TPU if its tiles fit, and otherwise
    ragged_dot."""

    @model_validator(mode="after")
    def _check(self) -> ExpertsConfig:
        if self.top_k > self.count:
            raise ValueError(
                f"top_k {self.top_k} exceeds the number of experts: use top_k {self.count} or "
                f"less, or count {self.top_k}"
            )
        if self.capacity_factor is not None and self.capacity_factor * self.top_k < 1:
            raise ValueError(
                f"capacity_factor {self.capacity_factor:g} drops most tokens from all their "
                f"{self.top_k} experts: use {1 / self.top_k:g} or more, or null, which drops no "
                "token"
            )
        if self.router == "softmax" and self.normalize and self.top_k == 1:
            raise ValueError(
                "with top_k 1, normalize makes the weight of the chosen expert always 1, so the "
                "router learns nothing: set normalize: false"
            )
        return self

    @property
    def balance(self) -> float:
        """The weight of the balance loss."""
        if self.balance_loss is not None:
            return self.balance_loss
        return 0.0 if self.bias_rate else BALANCE

    def capacity(self, length: int) -> int | None:
        """Return the largest number of tokens of a sequence that an expert processes.

        The sequence has `length` tokens. The result is None if there is no limit.

        >>> ExpertsConfig(count=4, top_k=2, capacity_factor=1.25).capacity(10)
        7
        """
        if self.capacity_factor is None:
            return None
        even = length * self.top_k / self.count
        return min(length, -int(-self.capacity_factor * even // 1))
