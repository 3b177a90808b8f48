"""The class of plans, which spread a step over devices and over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxdist.types import Json

Schedule = Literal["1f1b", "interleaved", "zb_h1"]
ALL_NAMED = "all_named"
"""The planner's name for the remat policy that keeps every named activation of a block."""
_ALL = ("query", "key", "value", "attention", "attention_out", "mlp_gate", "mlp_up")
KEPT: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "save_attention": ("attention",),
    "save_qkv": ("query", "key", "value"),
    "save_dots_except_mlp": ("query", "key", "value", "attention_out"),
    "minimal": ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up"),
    ALL_NAMED: _ALL,
}
"""The activations that each remat policy of the search keeps, in addition to a block's input."""


def _given(**settings: Json) -> dict[str, Json]:
    """Return the settings whose values are not None, false, 0 or empty."""
    return {name: value for name, value in settings.items() if value}


@dataclass(frozen=True)
class Plan:
    """A plan: the settings that spread a step over devices and over time.

    Attributes:
      data: the size of axis data inside the fast network.
      tensor, stage: the sizes of the axes tensor and stage, or 1 for an absent axis.
      slices: the size of axis data across the slow network, which is the number of slices or of
        hosts with GPUs unless `wide` is set.
      zero: the ZeRO stage, 0 to 3.
      scope: "all" if ZeRO splits state over both networks, or "ici" if it splits state only over
        the fast network.
      remat: a key of `KEPT`, or None to keep the setting of the config.
      microbatches: the number of microbatches in a step.
      schedule: the schedule of the pipeline, or None without a pipeline.
      chunks: the number of chunks of the model on each stage.
      stash: whether a stage keeps the activations of forward tasks instead of recomputing them.
      ahead: whether forward tasks run earlier than in the schedule (`parallel.pipeline.ahead`).
      bfloat16_reduction: whether gradients are reduced in bfloat16, by an explicit reduction.
      context: the number of devices that share a sequence.
      expert: the number of devices with different experts, which have different parts of the batch.
      offload: whether the optimizer's state is in the host's memory.
      wide: whether the axes stage, data and context are across the slow network, while axis tensor
        has all GPUs of a host.
      resting: the patterns of the parameters that the host's memory holds between steps.
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
    context: int = 1
    expert: int = 1
    offload: bool = False
    wide: bool = False
    resting: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """The activations that remat keeps in addition to a block's input.

        The tuple is empty if the plan keeps the config's remat, whose activations are not known.
        """
        return KEPT[self.remat] if self.remat else ()

    @property
    def replicas(self) -> int:
        """The number of parts into which devices split the batch."""
        return self.slices * self.data * self.expert

    @property
    def devices(self) -> int:
        """The number of devices of the mesh, over all slices."""
        return self.replicas * self.stage * self.tensor * self.context

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in the config, which is 0 for a single replica."""
        return self.zero if self.replicas > 1 else 0

    @property
    def state_parts(self) -> int:
        """The number of devices over which ZeRO splits the training state."""
        return self.data if self.scope == "ici" else self.slices * self.data

    @property
    def collective_matmul(self) -> bool:
        """Whether MLPs send chunks of the sequence along axis tensor during their products.

        Such chunks belong to a single mesh axis, so a plan with axis context has no such chunks.
        """
        return self.tensor > 1 and self.context == 1

    @property
    def shares_embed(self) -> bool:
        """Whether axis context or expert splits the dim embed of all parameters outside experts.

        The dim is split with ZeRO 3. Axis expert also splits it with a lower stage if axis data has
        size 1. In a pipeline the dim is not split, since each task would gather the
        parameters again.
        """
        alone = self.expert > 1 and self.slices * self.data == 1
        return self.stage == 1 and self.context * self.expert > 1 and (self.zero == 3 or alone)

    def mesh(self) -> dict[str, Json]:
        """Return the section `mesh` of the config, with the slowest axis first."""
        sizes: dict[str, Json] = {}
        if self.stage > 1:
            sizes["stage"] = self.stage
        data: Json = {"dcn": self.slices, "ici": self.data} if self.slices > 1 else self.data
        sizes["data"] = self.slices if self.wide else data
        # The devices along the last axis are nearest to one another. In a wide plan, they are the
        # GPUs of a host.
        order = ("context", "tensor") if self.wide else ("tensor", "context")
        for name in (*order, "expert"):
            if (size := getattr(self, name)) > 1:
                sizes[name] = size
        return sizes

    def settings(self) -> dict[str, Json]:
        """Return the settings of the plan in a config.

        A key is the name of a section, or the dotted path of a setting.

        >>> Plan(data=8, tensor=4).settings()["mesh"]
        {'data': 8, 'tensor': 4}
        """
        narrow = "bfloat16" if self.bfloat16_reduction else None
        zero = {"stage": self.zero_stage} | _given(
            scope="ici" if self.zero and self.scope == "ici" else None,
            offload=self.offload,
            offload_parameters=list(self.resting),
            # XLA gathers parameters in bfloat16 if XLA places the reductions. An explicit reduction
            # by default gathers parameters in the dtype of their storage.
            gather_dtype=narrow if self.zero == 3 else None,
        )
        pipeline = _given(
            schedule=_given(
                type=self.schedule, chunks=self.chunks if self.schedule == "interleaved" else None
            ),
            activations="stash" if self.stash else None,
            ahead=self.ahead,
        )
        rules = _given(
            residual_seq="tensor" if self.tensor > 1 else None,
            embed=self.shares_embed and ("context" if self.context > 1 else "expert"),
        )
        remat: Json = dict.fromkeys(_ALL, "save") if self.remat == ALL_NAMED else self.remat
        return {
            "mesh": self.mesh(),
            "sharding": _given(rules=rules, collective_matmul=self.collective_matmul),
            "parallel": {"zero": zero}
            | _given(reduce=narrow and {"type": "xla"}, reduce_dtype=narrow, pipeline=pipeline),
            "train.microbatches": self.microbatches,
            **_given(**{"model.remat": remat}),
        }

    def words(self) -> str:
        """Return a short line that describes the plan.

        >>> Plan(data=8, tensor=4, remat="minimal").words()
        'data 8 x tensor 4, ZeRO 3, minimal'
        """
        parted = self.slices > 1 and not self.wide
        data = f"data {self.slices}x{self.data}" if parted else f"data {self.slices * self.data}"
        axes = [f"stage {self.stage}"] * (self.stage > 1) + [data]
        for name in ("tensor", "context", "expert"):
            if (size := getattr(self, name)) > 1:
                axes.append(f"{name} {size}")
        scope = " in a slice" if self.scope == "ici" and self.zero and self.slices > 1 else ""
        there = ["the optimizer's state"] * self.offload + ["parameters"] * bool(self.resting)
        where = f" with {' and '.join(there)} on the host" if there else ""
        zero = f"ZeRO {self.zero_stage}{scope}{where}"
        parts = [" x ".join(axes), zero, *filter(None, [self.remat])]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches")
        if self.schedule is not None:
            words = [self.schedule] + [str(self.chunks)] * (self.chunks > 1)
            parts.append(" ".join(words + ["ahead"] * self.ahead + ["stash"] * self.stash))
        if self.bfloat16_reduction:
            parts.append("bf16 sums")
        return ", ".join(parts)
