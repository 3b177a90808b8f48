"""The assembly of a program, which chooses an implementation for each contract."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxdist.models.functional import Functional
from jaxdist.models.loss import Loss
from jaxdist.optim.build import Optimizer
from jaxdist.parallel.compiler import Options
from jaxdist.parallel.compute import whole_or_accumulated
from jaxdist.parallel.contract import Exchange
from jaxdist.parallel.objective import Objective, may_weigh_nothing
from jaxdist.parallel.pipeline.model.pipeline import Pipeline
from jaxdist.parallel.pipeline.model.stack import StageStack
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.sharding import Dims, Layout
from jaxdist.train.home import View, filled_shards, host_memory, stage_order
from jaxdist.train.state import Outer
from jaxdist.train.step import Program


def assemble(
    model: Functional,
    loss: Loss,
    optimizer: Optimizer,
    layout: Layout,
    dims: Mapping[str, Dims],
    batch: Mapping[str, jax.ShapeDtypeStruct],
    exchange: Exchange,
    *,
    seed: int = 0,
    microbatches: int = 1,
    pipeline: Pipeline | None = None,
    outer: Outer | None = None,
    options: Options | None = None,
    skips_empty: bool | None = None,
) -> Program:
    """Return the program of a plan: model, loss and optimizer as compiled functions on a mesh.

    Args:
      dims: the logical dims of each parameter, by name.
      batch: the shape, dtype and sharding of each field of a global batch.
      exchange: the exchange of gradients.
      seed: the seed of the initial parameters and of the random layers.
      microbatches: the number of microbatches. With `pipeline` the argument is ignored, since the
        pipeline's schedule has the number.
      pipeline: the stages that hold the layers, or None if each device has all layers.
      outer: the exchange of parameters between steps, or None without such an exchange.
      options: the options for the compiler, or None for the compiler's defaults.
      skips_empty: whether to skip steps whose batches have no weight. With None such steps are
        skipped if a trace of the loss shows that the weight of a batch depends on its values.
    """
    objective, optimizer = Objective(model, loss), optimizer.placed(exchange.placements.shares)
    if may_weigh_nothing(objective, batch) if skips_empty is None else skips_empty:
        optimizer = optimizer.skipping_empty()
    compute = pipeline or whole_or_accumulated(objective, layout, microbatches)
    views = views_of(model, exchange.zero, None if pipeline is None else pipeline.stack)
    return Program(
        model,
        optimizer,
        layout,
        dims,
        batch,
        seed,
        compute,
        exchange,
        views,
        outer,
        options=options or {},
    )


def views_of(model: Functional, zero: ZeroSplit, stack: StageStack | None) -> tuple[View, ...]:
    """Return the views of a plan, in the order in which `Home.stored` applies them.

    Args:
      zero: the split of the training state, which may pad uneven shards.
      stack: the order of the layers on a pipeline's stages, or None for the order of the model.
    """
    views: list[View] = []
    if stack is not None:
        views.append(stage_order(stack, model.stacked))
    if zero.padded:
        views.append(filled_shards(zero))
    if zero.offloaded:
        # The layers of pipeline stages have another order in memory than in files. The leaves must
        # therefore be converted before they are written to files.
        views.append(host_memory(zero.offloaded, params=False, in_files=stack is None))
    if zero.resting:
        views.append(host_memory(zero.resting, params=True))
    return tuple(views)
