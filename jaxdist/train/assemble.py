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
from jaxdist.parallel.exchange.xla import XlaExchange
from jaxdist.parallel.objective import Objective, may_weigh_nothing
from jaxdist.parallel.pipeline.model.pipeline import Pipeline
from jaxdist.parallel.pipeline.model.stack import StageStack
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.sharding import Dims, Layout, param_shardings
from jaxdist.train.home import FilledShards, StageOrder, View
from jaxdist.train.offload import HostMemory, HostParameters
from jaxdist.train.state import Outer
from jaxdist.train.step import Program


def assemble(
    model: Functional,
    loss: Loss,
    optimizer: Optimizer,
    layout: Layout,
    dims: Mapping[str, Dims],
    batch: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seed: int = 0,
    microbatches: int = 1,
    exchange: Exchange | None = None,
    pipeline: Pipeline | None = None,
    outer: Outer | None = None,
    options: Options | None = None,
    skips_empty: bool | None = None,
) -> Program:
    """Return the program of a plan: model, loss and optimizer as compiled functions on a mesh.

    Args:
      dims: the logical dims of each parameter, by name.
      batch: the shape, dtype and sharding of each field of a global batch.
      seed: the seed of the initial parameters and of the random layers.
      microbatches: the number of microbatches. With `pipeline` the argument is ignored, since the
        pipeline's schedule has the number.
      exchange: the exchange of gradients, or None if XLA inserts the collectives.
      pipeline: the stages that hold the layers, or None if each device has all layers.
      outer: the exchange of parameters between steps, or None without such an exchange.
      options: the options for the compiler, or None for the compiler's defaults.
      skips_empty: whether to skip steps whose batches have no weight. With None such steps are
        skipped if a trace of the loss shows that the weight of a batch depends on its values.

    Raises:
      ShardingError: the mesh cannot split a parameter into equal parts.
    """
    if exchange is None:
        exchange = XlaExchange(
            param_shardings(layout, model.params, dims), None, frozen=model.frozen
        )
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


def views_of(
    model: Functional, zero: ZeroSplit | None, stack: StageStack | None
) -> tuple[View, ...]:
    """Return the views of a plan, in the order in which `Home.stored` applies them.

    Args:
      zero: the plan of ZeRO, which may pad uneven shards, or None without ZeRO.
      stack: the order of the layers on a pipeline's stages, or None for the order of the model.
    """
    views: list[View] = []
    if stack is not None:
        views.append(StageOrder(stack, model.stacked))
    if zero is not None and zero.padded:
        views.append(FilledShards(zero))
    if zero is not None and zero.offload:
        # The layers of pipeline stages have another order in memory than in files. The leaves must
        # therefore be converted before they are written to files.
        views.append(HostMemory(zero, in_files=stack is None))
    if zero is not None and zero.resting:
        views.append(HostParameters(zero.resting))
    return tuple(views)
