"""The cost of experts in plans that put experts on different devices (axis expert)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.gpt import GptConfig
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Places, Target
from jaxdist.sharding.experts import EXCHANGES, ExchangeName, choose_exchange, most_sent


@dataclass(frozen=True)
class PlannedExperts:
    """The layers with experts of a model to plan for.

    Attributes:
      layers: the number of layers with experts.
      count: the number of experts in a layer.
      top_k: the number of experts that each token is sent to.
      embed, mlp: the widths of the model and of an expert.
      length: the number of tokens in a sequence.
      capacity: the largest number of a sequence's tokens that an expert accepts, or None for no
        limit.
      recomputes: whether the backward pass repeats the exchange of the forward pass.
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
        """Return the layers with experts of a gpt, for sequences of `length` tokens."""
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
        """Return the largest number of tokens that a device sends to another device.

        Args:
          rows: the number of sequences on the device.
          devices: the size of axis expert.
        """
        here = self.count // devices
        return most_sent(rows * self.length, rows, self.capacity, here)

    def exchange(self, rows: int, devices: int, platform: str) -> ExchangeName:
        """Return the exchange that `sharding.experts: auto` chooses.

        Args:
          rows: the number of sequences on a device.
          devices: the size of axis expert.
          platform: "tpu" or "gpu".
        """
        tokens, most = rows * self.length, self.most(rows, devices)
        return choose_exchange("auto", tokens, most, devices, self.top_k, platform)

    def spare_rows(self, rows: int, devices: int) -> int:
        """Return the number of rows in a layer's buffers that are empty on average.

        The buffers have a row for every token that could be sent to an expert of the device.
        Without a capacity, the number of these rows is the number of tokens on all devices, times
        `top_k` or, if it is smaller, the number of experts on the device. Empty rows are not
        multiplied, but pass through memory.

        Args:
          rows: the number of sequences on a device.
          devices: the size of axis expert. If the size is 1, no rows are empty.
        """
        if devices == 1:
            return 0
        here = min(self.top_k, self.count // devices)
        room = devices * self.most(rows, devices) * here
        return max(0, room - rows * self.length * self.top_k)

    def spare_bytes(self, rows: int, devices: int, width: int) -> float:
        """Return the bytes of the empty rows of all layers, for elements of `width` bytes."""
        # The elements of a row are its input, its output, and three hidden values of the expert.
        elements = 2 * self.embed + 3 * self.mlp
        return self.layers * self.spare_rows(rows, devices) * elements * width

    def block_elements(self, rows: int, devices: int) -> int:
        """Return the number of temporary elements in the backward pass of a block with experts.

        The result is 0 without remat, since most of the arrays are kept anyway. The numbers of
        arrays are read from the buffer assignments of programs with the shapes of Mixtral (with and
        without axis expert) and DeepSeek-V3 on v5p. Four arrays have the width of the model for all
        rows of the buffers (input and output, and their gradients). Six arrays have this width for
        all tokens (attention and the residual stream). Three arrays have the hidden values of all
        rows (gate, up and their product, or gradients of them). Only one of these three arrays is
        left when the gradient of the last kernel is computed, but this gradient and a copy of a
        gathered kernel are live then.

        Args:
          rows: the number of sequences on a device.
          devices: the size of axis expert.
        """
        if not self.recomputes:
            return 0
        tokens = rows * self.length
        room = tokens * self.top_k + self.spare_rows(rows, devices)
        kernel = self.count // devices * self.embed * self.mlp
        hidden = room * self.mlp
        inside = max(3 * hidden, hidden + 2 * kernel)
        return inside + room * 4 * self.embed + tokens * 6 * self.embed

    def seconds(self, plan: Plan, places: Places, target: Target, rows: int, width: int) -> float:
        """Return the seconds that a layer waits for its exchanges, in all passes.

        Args:
          plan: the plan whose time is computed.
          places: the layout of the plan's mesh on the torus.
          target: the chips.
          rows: the number of sequences on a device.
          width: the number of bytes of an activation element.
        """
        if plan.expert == 1:
            return 0.0
        platform = "tpu" if target.is_tpu else "gpu"
        name = self.exchange(rows, plan.expert, platform)
        tokens, most = rows * self.length, self.most(rows, plan.expert)
        sent = EXCHANGES[name].tokens_sent(tokens, most, plan.expert, self.top_k)
        passes = 3 if self.recomputes else 2
        dims = places.inner_dims
        spent = passes * sent * self.embed * width / (target.link_rate(dims) * target.ports(dims))
        # An all-to-all passes several links of a torus: on average half of the longest path.
        return spent if name == "ring" else spent * max(1.0, target.hops(dims) / 2)
