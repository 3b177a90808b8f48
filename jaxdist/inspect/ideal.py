"""Bounds for a train step: the FLOPs that attention's mask discards, and the least sent bytes."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxdist.experiment import Experiment
from jaxdist.mesh import entry_names
from jaxdist.parallel.exchange.strict import Strict
from jaxdist.sharding import param_shardings


def masked_flops(experiment: Experiment) -> float:
    """Return the FLOPs, in a step, of products that attention's mask discards.

    The result is 0 for models without a method `masked_flops`.
    """
    model: Any = experiment.config.model
    count = getattr(model, "masked_flops", None)
    if count is None:
        return 0.0
    examples = experiment.config.train.batch_size
    return float(count(examples, experiment.units_per_step // examples))


def gradient_bound(experiment: Experiment) -> tuple[tuple[str, ...], float] | None:
    """Return the mesh axes that share the batch, and the least bytes that a device must send.

    The bytes are for an all-reduce of the gradients. In an all-reduce of S bytes over N devices,
    each device sends at least 2(N-1)/N S bytes, with any algorithm. S is the size of the gradients
    on a device, in the model's compute dtype. A parameter that the batch's axes split counts with
    its size before the split, since a gather and a reduce-scatter together send as many bytes as an
    all-reduce. The result is None if no axis shares the batch.
    """
    layout = experiment.layout
    names = layout.batch_axes
    if not names:
        return None
    program = experiment.program
    compute_dtype = getattr(experiment.config.model, "compute_dtype", None)
    shardings = param_shardings(layout, program.model.trained, program.dims)
    size_bytes = 0
    for leaf, sharding in zip(
        jax.tree.leaves(program.model.trained), jax.tree.leaves(shardings), strict=True
    ):
        split = [
            name for entry in sharding.spec for name in entry_names(entry) if name not in names
        ]
        parts = math.prod(layout.mesh.shape[name] for name in split)
        dtype = np.dtype(compute_dtype or leaf.dtype)
        size_bytes += leaf.size // parts * min(dtype.itemsize, leaf.dtype.itemsize)
    count = math.prod(layout.mesh.shape[name] for name in names)
    return names, 2 * (count - 1) / count * size_bytes


def bound_notes(experiment: Experiment) -> tuple[str, ...]:
    """Return phrases about the bound of `gradient_bound`.

    The first phrase is the assumption of the bound. Each other phrase states a property of the
    experiment because of which devices send more or fewer bytes than the bound.
    """
    parallel, program = experiment.config.parallel, experiment.program
    computed = getattr(experiment.config.model, "compute_dtype", None)
    dtype = f"in {computed}, the model's compute dtype" if computed else "in the parameters' dtype"
    stage, count = parallel.zero.stage, program.compute.microbatches
    notes = [f"one all-reduce of the gradients {dtype}"]
    stored = {str(leaf.dtype) for leaf in jax.tree.leaves(program.state_shapes.params)}
    if computed and stored != {computed}:
        notes.append(f"parameters and their gradients are {', '.join(sorted(stored))}")
    if parallel.compression is not None:
        notes.append(
            f"parallel.compression.type {parallel.compression.type} sends encoded messages instead "
            "of gradients"
        )
    exchange = program.exchange
    if isinstance(exchange, Strict):
        if exchange.local.blocks > 1:
            notes.append(
                f"each device sends the sums of its {exchange.order.shards} logical shards in "
                f"{exchange.local.blocks} chunks; with a power of two shards there is a single "
                "chunk"
            )
        return tuple(notes)
    if stage == 3:
        passes = "once a step" if exchange.zero.once else "for both passes"
        notes.append(f"parallel.zero.stage 3 gathers parameters {passes}")
    if stage >= 2 and count > 1:
        notes.append(
            f"each of the {count} microbatches (train.microbatches) sends its own gradients"
        )
    return tuple(notes)
