"""Pipelines of models that are a sequence of parts of different shapes.

The module has a method `parts`, which returns the parts in order. The first part takes the
arguments of the module. Every other part takes the output of the previous part. Every part returns
an array `[rows, ...]`. A chunk runs some consecutive parts, and its parameters are packed into a
vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist.errors import ConfigError
from jaxdist.jaxprs import depends_on
from jaxdist.models.functional import Functional
from jaxdist.models.layers import carried, whole
from jaxdist.models.loss import Batch, Loss, Sums, weighted
from jaxdist.parallel.contract import BatchContext, Gradients, StepInputs
from jaxdist.parallel.pipeline.called import inputs_of
from jaxdist.parallel.pipeline.executor.model_fns import ModelFns, StageSpecs, Visit
from jaxdist.parallel.pipeline.model.chunks import Cut
from jaxdist.parallel.pipeline.model.packed import Packed, pack_model
from jaxdist.parallel.pipeline.model.pipeline import Apart, Pipeline, lowered, minimised
from jaxdist.parallel.pipeline.model.stack import StageStack
from jaxdist.parallel.pipeline.planning.estimate import shapes_of
from jaxdist.parallel.pipeline.planning.plan import AXIS, ChunkPlan, PipelineConfig
from jaxdist.parallel.pipeline.stand_in import Output
from jaxdist.sharding import Dims, Layout
from jaxdist.trees import wide
from jaxdist.types import Buffers, Params, PyTree

WHOLE = PartitionSpec()


def plan_parted(
    config: PipelineConfig,
    plan: ChunkPlan,
    model: Functional,
    loss: Loss,
    layout: Layout,
    dims: Mapping[str, Dims],
    batch: Mapping[str, Any],
) -> PartedPipeline:
    """Build the pipeline of a model that is a sequence of parts.

    Args:
      config: the config of the pipeline.
      plan: the plan that `plan_chunks` returns for the same config and model.
      model: the model, whose module has the method `parts`.
      loss: the loss to minimize.
      layout: the layout of the training state.
      dims: the logical dims of each parameter, by name.
      batch: the shapes of a batch with any number of rows.

    Raises:
      ConfigError: the mesh splits something other than the batch and the stages, or the parameters
        have different dtypes, or the outputs of the parts have different dtypes.
    """
    axes, sizes = {AXIS, *layout.batch_axes}, layout.mesh.shape.items()
    others = [f"mesh.{name} {size}" for name, size in sizes if size > 1 and name not in axes]
    if others:
        raise ConfigError(
            f"{', '.join(others)} cannot be combined with mesh.stage for a model with `parts()`: "
            "the parameters of each chunk are one vector, which only mesh.data splits. Move these "
            "devices to mesh.data, or leave out mesh.stage"
        )
    ticks, forward = lowered(config, plan.schedule)
    vectors = Cut((1,) * len(plan.layers))
    found = PartedPipeline(
        model, loss, layout, dims, ticks, forward, vectors, plan.layers, shapes_of(batch)
    )
    _ = found._packed  # A model that cannot be packed raises its error here, not in a step.
    return found


@dataclass(frozen=True)
class PartedPipeline(Pipeline):
    """A pipeline of a model that is a sequence of parts of different shapes.

    `Pipeline` sees a chunk as a single layer, whose only parameter is the vector of the chunk.

    Attributes:
      counts: the number of parts of each chunk.
      batch: the shapes of a batch with any number of rows.
    """

    counts: tuple[int, ...]
    batch: Mapping[str, jax.ShapeDtypeStruct]

    def gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        """Compute gradients as `Pipeline` does, with packed parameters."""
        # The transpose of `_pack` unpacks the gradients. The gradients are in float32 or wider, so
        # `_pack` is transposed at copies of the parameters that are cast to float32 or wider.
        wider = wide(held.params)
        found = super().gradients(held._replace(params=self._pack(held.params)), around)
        # The vectors contain frozen parameters too. The gradients of frozen parameters are dropped.
        grads = self.model.divided(jax.vjp(self._pack, wider)[1](found.grads)[0])[0]
        return found._replace(grads=carried(grads))

    @cached_property
    def stack(self) -> StageStack | None:
        """None, because parameters are stored in the model's form and packed in each step."""
        return None

    def sums(self, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        """Compute sums as `Pipeline` does, with packed parameters."""
        return super().sums(self._pack(params), buffers, batch)

    def _pack(self, params: Params) -> list[jax.Array]:
        """Pack the parameters into vectors, and return a list with the array `[chunks, length]`.

        A parameter that several chunks use is in several vectors.
        """
        leaves = jax.tree.leaves(whole(params))
        vectors = self._packed.pack([[leaves[i] for i in own] for own in self._used])
        # All stages have replicas of the vectors. Without this constraint, XLA would nevertheless
        # make stages send parts of the vectors to each other.
        return [self._gathered(vectors, PartitionSpec(None))]

    def _divided(self, tree: PyTree) -> tuple[Apart, Apart]:
        return (tree, []), ([], [])

    def _together(self, layers: list[Any], shared: list[Any], like: PyTree) -> PyTree:
        assert not shared, shared
        return layers

    @cached_property
    def _specs(self) -> StageSpecs:
        return StageSpecs([PartitionSpec(None)], [], WHOLE)

    def _parts(self, *, training: bool, factor: jax.Array | None = None) -> ModelFns:
        chunks = tuple(
            partial(self._chunk, number, training=training) for number in range(len(self.counts))
        )

        def head(shared: PyTree, x: jax.Array, visit: Visit) -> tuple[jax.Array, Sums]:
            return minimised(self.loss, Output(x), visit, factor)

        parts = replace(self._packed, chunks=chunks, head=head).parts

        def blocks(vectors: list[jax.Array], x: jax.Array, visit: Visit) -> jax.Array:
            return parts.blocks(vectors[0][0], x, visit)

        return ModelFns(parts.embed, blocks, parts.head)

    def _chunk(
        self, number: int, own: list[jax.Array], x: jax.Array, visit: Visit, *, training: bool
    ) -> jax.Array:
        """Return the output of a chunk for the input `x`.

        Args:
          number: the index of the chunk.
          own: the parameters that the chunk uses.
          x: the input of the chunk, which the first chunk ignores.
          visit: the visit, with the rows for the first chunk and the random key.
          training: whether the module is in training mode.
        """
        shapes, structure = jax.tree.flatten(self.model.params)
        leaves = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        for index, leaf in zip(self._used[number], own, strict=True):
            leaves[index] = leaf
        return self._run(number, structure.unflatten(leaves), x, visit, training=training)

    def _run(
        self, number: int, params: Params, x: jax.Array, visit: Visit, *, training: bool
    ) -> jax.Array:
        module: Any = self.model.bind(params, {}, visit.key)
        module.train() if training else module.eval()
        low, high = (*pairwise((0, *accumulate(self.counts))),)[number]
        given = (x,) if number else inputs_of(self.loss, weighted(visit.rows))
        for part in module.parts()[low:high]:
            given = (part(*given),)
        return given[0]

    @cached_property
    def _used(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the parameters that each chunk uses, which are found by tracing."""
        leaves, structure = jax.tree.flatten(self.model.params)
        x, found = None, []
        for number in range(len(self.counts)):

            def run(leaves: Any, x: PyTree, visit: Any, number: int = number) -> jax.Array:
                return self._run(number, structure.unflatten(leaves), x, visit, training=True)

            trace = jax.make_jaxpr(run, return_shape=True)
            jaxpr, x = trace(leaves, x, self._visit)
            inputs = range(len(jaxpr.in_avals))
            found.append(
                tuple(
                    leaf
                    for leaf in range(len(leaves))
                    if any(depends_on(jaxpr.jaxpr, [at == leaf for at in inputs]))
                )
            )
        return tuple(found)

    @property
    def _visit(self) -> Visit:
        return jax.eval_shape(lambda rows: Visit(rows, jnp.int32(0), None), self.batch)

    @cached_property
    def _packed(self) -> Packed:
        """The packed form of the chunks, from which shapes are read.

        Its functions are not called: `_parts` has the chunks and the head that run.
        """
        leaves = jax.tree.leaves(self.model.params)
        chunks = [partial(self._chunk, number, training=True) for number in range(len(self.counts))]
        params = [[leaves[i] for i in own] for own in self._used]
        first = jax.eval_shape(chunks[0], params[0], None, self._visit)

        def embed(shared: PyTree, visit: Visit) -> jax.Array:
            # The first chunk ignores its input, and reads the rows, which every stage has.
            rows = len(jax.tree.leaves(visit.rows)[0])
            return jnp.zeros((rows, 1), first.dtype)

        def head(shared: PyTree, x: jax.Array, visit: Visit) -> tuple[jax.Array, Any]:
            raise AssertionError("shapes only")

        return pack_model(embed, chunks, head, params, [], self._visit)
