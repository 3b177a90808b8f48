"""One plan: how a step is split over devices and over time, as data and as settings of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxdist.types import Json

Schedule = Literal["1f1b", "interleaved", "zb_h1"]
ALL_NAMED = "all_named"
"""What this module calls keeping every activation of a block that has a name but its input."""
_ALL = ("query", "key", "value", "attention", "attention_out", "mlp_gate", "mlp_up")
KEPT: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "save_attention": ("attention",),
    "save_qkv": ("query", "key", "value"),
    "save_dots_except_mlp": ("query", "key", "value", "attention_out"),
    "minimal": ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up"),
    ALL_NAMED: _ALL,
}
"""Policies of remat that are searched, to the activations that they keep beside a block's input."""


@dataclass(frozen=True)
class Plan:
    """How a step is split.

    Attributes:
      slices: of the data axis across the slow network.
      data: of the data axis inside the fast network.
      stage, tensor: of these axes; 1 where the mesh has none.
      zero: ZeRO's stage.
      scope: of ZeRO, over both networks or inside the fast one.
      remat: a key of `KEPT`; None leaves the model's own.
      microbatches: of a step.
      schedule: of the pipeline; None without stages.
      chunks: of the model on each stage.
      stash: whether a stage keeps what its forward tasks leave, and does not run them again.
      ahead: whether forward tasks run further ahead.
      bfloat16_reduction: whether gradients are reduced in bfloat16, by an explicit reduction.
    """

    data: int = 1
    tensor: int = 1
    stage: int = 1
    slices: int = 1
    zero: int = 3
    scope: Literal["all", "ici"] = "all"
    remat: str | None = "full"
    microbatches: int = 1
    schedule: Schedule | None = None
    chunks: int = 1
    stash: bool = False
    ahead: bool = False
    bfloat16_reduction: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """Activations that remat keeps beside a block's input; none where it is the model's own."""
        return KEPT[self.remat] if self.remat else ()

    @property
    def replicas(self) -> int:
        """Devices that share the batch."""
        return self.slices * self.data

    @property
    def devices(self) -> int:
        """Of the whole mesh."""
        return self.replicas * self.stage * self.tensor

    @property
    def state_parts(self) -> int:
        """Devices over which ZeRO splits the training state."""
        return self.data if self.scope == "ici" else self.replicas

    def mesh(self) -> dict[str, Json]:
        """The mesh as a config has it, slowest axis first."""
        sizes: dict[str, Json] = {}
        if self.stage > 1:
            sizes["stage"] = self.stage
        sizes["data"] = {"dcn": self.slices, "ici": self.data} if self.slices > 1 else self.data
        if self.tensor > 1:
            sizes["tensor"] = self.tensor
        return sizes

    def settings(self) -> dict[str, Json]:
        """Sections of a config, dotted, that make this plan of it.

        >>> Plan(data=8, tensor=4).settings()["mesh"]
        {'data': 8, 'tensor': 4}
        """
        remat: Json = dict.fromkeys(_ALL, "save") if self.remat == ALL_NAMED else self.remat
        zero: dict[str, Json] = {"stage": self.zero}
        parallel: dict[str, Json] = {"zero": zero}
        if self.zero and self.scope == "ici":
            zero["scope"] = "ici"
        if self.bfloat16_reduction:
            parallel |= {"reduce": {"type": "xla"}, "reduce_dtype": "bfloat16"}
            if self.zero == 3:
                # As XLA gathers them where it places the reductions itself.
                zero["gather_dtype"] = "bfloat16"
        if self.schedule is not None:
            schedule: dict[str, Json] = {"type": self.schedule}
            if self.schedule == "interleaved":
                schedule["chunks"] = self.chunks
            pipeline: dict[str, Json] = {"schedule": schedule}
            if self.stash:
                pipeline["activations"] = "stash"
            if self.ahead:
                pipeline["ahead"] = True
            parallel["pipeline"] = pipeline
        sharding: dict[str, Json] = {}
        if self.tensor > 1:
            sharding = {"rules": {"residual_seq": "tensor"}, "collective_matmul": True}
        made: dict[str, Json] = {
            "mesh": self.mesh(),
            "sharding": sharding,
            "parallel": parallel,
            "train.microbatches": self.microbatches,
        }
        return made if remat is None else made | {"model.remat": remat}

    def words(self) -> str:
        """In one short line.

        >>> Plan(data=8, tensor=4, remat="minimal").words()
        'data 8 x tensor 4, ZeRO 3, minimal'
        """
        data = f"data {self.slices}x{self.data}" if self.slices > 1 else f"data {self.data}"
        axes = [f"stage {self.stage}"] * (self.stage > 1) + [data]
        axes += [f"tensor {self.tensor}"] * (self.tensor > 1)
        scope = " in a slice" if self.scope == "ici" and self.zero and self.slices > 1 else ""
        parts = [" x ".join(axes), f"ZeRO {self.zero}{scope}", *filter(None, [self.remat])]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches")
        if self.schedule is not None:
            words = [self.schedule] + [str(self.chunks)] * (self.chunks > 1)
            parts.append(" ".join(words + ["ahead"] * self.ahead + ["stash"] * self.stash))
        if self.bfloat16_reduction:
            parts.append("bf16 sums")
        return ", ".join(parts)
