"""The cost of experts on devices of their own, for a plan."""

from __future__ import annotations

from dataclasses import dataclass

from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.gpt import GptConfig
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Places, Target
from jaxdist.sharding.experts import EXCHANGES, ExchangeName, choose_exchange, most_sent


@dataclass(frozen=True)
class PlannedExperts:
    """The layers of experts of a model to plan for.

    Attributes:
      layers: number of layers with experts.
      count: number of experts of a layer.
      top_k: number of experts of each token.
      embed, mlp: widths of the model and of an expert.
      length: number of tokens of a sequence.
      capacity: the most tokens of a sequence for an expert, or None for all.
      recomputes: whether the backward pass recomputes the exchange.
    """

    layers: int
    count: int
    top_k: int
    embed: int
    mlp: int
    length: int
    capacity: int | None = None
    recomputes: bool = False

    @classmethod
    def of(cls, model: GptConfig, experts: ExpertsConfig, length: int) -> PlannedExperts:
        """Return the experts of a gpt, in sequences of `length` tokens."""
        return cls(
            layers=model.layers // experts.every,
            count=experts.count,
            top_k=experts.top_k,
            embed=model.embed,
            mlp=experts.mlp or model.mlp_width,
            length=length,
            capacity=experts.capacity(length),
            recomputes=model.remat != "none",
        )

    def most(self, rows: int, devices: int) -> int:
        """Return the most tokens that a device with `rows` sequences sends to another."""
        here = self.count // devices
        return most_sent(rows * self.length, rows, self.capacity, here)

    def exchange(self, rows: int, devices: int, platform: str) -> ExchangeName:
        """Return the exchange that `sharding.experts: auto` chooses."""
        tokens, most = rows * self.length, self.most(rows, devices)
        return choose_exchange("auto", tokens, most, devices, self.top_k, platform)

    def spare_rows(self, rows: int, devices: int) -> int:
        """Return the rows of a layer's products that are room for the worst case.

        Buffers have room for every token that may come: devices x top_k times the mean, without a
        capacity. The rows that stay empty are not multiplied, but pass through memory.
        """
        if devices == 1:
            return 0
        here = min(self.top_k, self.count // devices)
        room = devices * self.most(rows, devices) * here
        return max(0, room - rows * self.length * self.top_k)

    def row_elements(self) -> int:
        """Return the activations of a row: its input and output, and three hidden values."""
        return 2 * self.embed + 3 * self.mlp

    def seconds(self, plan: Plan, places: Places, target: Target, rows: int, width: int) -> float:
        """Return a layer's waits for the exchange of `rows` sequences, in all passes."""
        if plan.expert == 1:
            return 0.0
        platform = "tpu" if target.is_tpu else "gpu"
        name = self.exchange(rows, plan.expert, platform)
        tokens, most = rows * self.length, self.most(rows, plan.expert)
        sent = EXCHANGES[name].tokens_sent(tokens, most, plan.expert, self.top_k)
        passes = 3 if self.recomputes else 2
        dims = places.inner_dims
        spent = passes * sent * self.embed * width / (target.link_rate(dims) * target.ports(dims))
        # An all-to-all passes several links of a torus: half of the longest way on average.
        return spent if name == "ring" else spent * max(1.0, target.hops(dims) / 2)
