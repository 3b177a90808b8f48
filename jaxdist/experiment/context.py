"""The choice of the method by which an experiment's devices split sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxdist.cost.context import ContextNeeds
from jaxdist.experiment.config import ExperimentConfig
from jaxdist.models.attention.choose import KernelName, kernel_refusal, piecewise_kernel
from jaxdist.models.attention.contract import AttentionRequest
from jaxdist.models.bert import BertConfig
from jaxdist.models.gpt import GptConfig
from jaxdist.sharding import Layout, ShardingConfig
from jaxdist.sharding.context import share_sequences


def with_context(
    config: ExperimentConfig, layout: Layout, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout with the method to split sequences, and the reason for this method.

    Args:
      batch: the shape, dtype and sharding of each field of a batch.

    Raises:
      ConfigError: the sequences or the heads do not fit the mesh.
    """
    model = config.model
    if not isinstance(model, GptConfig | BertConfig) or "segments" not in batch:
        return layout, ()
    rows, length = batch["segments"].shape[0], batch["segments"].shape[-1]
    platform = layout.mesh.devices.flat[0].platform
    ask = model.ask(platform, layout, length)
    needs = ContextNeeds(
        heads=ask.heads // ask.head_parts,
        kv_heads=ask.kv_heads // ask.kv_head_parts,
        head_dim=ask.head_dim,
        length=length,
        rows=max(1, rows // layout.data_size // config.train.microbatches),
        itemsize=jnp.dtype(ask.dtype).itemsize,
        window=ask.window,
        causal=ask.causal,
        fused=model.attention not in ("auto", "blockwise"),
        rotates=layout.mesh.shape.get("stage", 1) == 1,
        gathers=_gathers(model.attention, ask, layout),
    )
    own_loss = config.loss is None or config.loss.type == "next_token"
    reorders = isinstance(model, GptConfig) and own_loss
    return share_sequences(layout, config.sharding, needs, reorders=reorders)


def _gathers(name: KernelName, ask: AttentionRequest, layout: Layout) -> bool:
    """Return whether a kernel computes attention to gathered keys."""
    split, inside = layout.split, replace(ask, head_parts=1, kv_head_parts=1)
    if split is None or kernel_refusal(name, inside) is not None:
        return False
    return piecewise_kernel(name, inside, split) is not None


def context_notices(config: ShardingConfig, layout: Layout) -> tuple[str, ...]:
    """Return a sentence for each setting that has no effect because no sequence is split."""
    if layout.split is not None:
        return ()
    given = {"context": config.context, "context_order": config.context_order}
    return tuple(
        f"sharding.{name} {value} has no effect: the mesh has no axis context; set mesh.context"
        for name, value in given.items()
        if value != "auto"
    )
