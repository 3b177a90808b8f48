"""Estimates of the costs of a model's layers, from traces without computation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from jaxdist.cost.flops import jaxpr_flops
from jaxdist.errors import ConfigError
from jaxdist.models.functional import Functional
from jaxdist.models.loss import Loss, Model, weighted
from jaxdist.parallel.pipeline.called import inputs_of
from jaxdist.parallel.pipeline.executor.buffers import zeros
from jaxdist.parallel.pipeline.executor.model_fns import Activation
from jaxdist.parallel.pipeline.planning.partition import LayerCosts
from jaxdist.parallel.pipeline.stand_in import HeadOnly, Output
from jaxdist.trees import flatten_with_names
from jaxdist.types import Leaf, Params, PyTree


def block_costs(
    model: Functional, loss: Loss, batch: Mapping[str, Leaf], layers: int
) -> LayerCosts:
    """Estimate the costs of a model with a stack of blocks, in percent of the whole model's cost.

    The cost is the number of operations of a forward pass.

    Args:
      model: the model whose costs are estimated.
      loss: the loss to minimize.
      batch: the arrays of a batch, or their shapes. The number of rows does not matter.
      layers: the number of blocks, which are all equal.
    """
    routed, buffers = model.routed, jax.tree.map(_first, model.buffers)

    def bound(params: Params, rows: Mapping[str, Leaf]) -> tuple[Model, tuple[jax.Array, ...]]:
        inputs = inputs_of(loss, weighted(rows), routed=routed)
        return model.bind(params, zeros(buffers)), inputs

    def embed(params: Params, rows: Mapping[str, Leaf]) -> Activation:
        module, inputs = bound(params, rows)
        return (module.routed_embed if routed else module.embed)(*inputs)

    def layer(params: Params, rows: Mapping[str, Leaf], x: Activation) -> Activation:
        module, inputs = bound(params, rows)
        return (module.routed_trunk if routed else module.trunk)(x, *inputs)

    def head(params: Params, rows: Mapping[str, Leaf], x: Activation) -> PyTree:
        module, _ = bound(params, rows)
        return loss(HeadOnly.of(module, x), weighted(rows))

    given = _with_one_layer(model), shapes_of(batch)
    x = jax.eval_shape(embed, *given)
    first, one, last = (
        jaxpr_flops(jax.make_jaxpr(part)(*given, *more), elementwise=True)
        for part, more in ((embed, ()), (layer, (x,)), (head, (x,)))
    )
    unit = 100 / (first + layers * one + last)
    return LayerCosts([unit * one] * layers, first_seconds=unit * first, last_seconds=unit * last)


def part_costs(model: Functional, loss: Loss, batch: Mapping[str, Leaf], parts: int) -> LayerCosts:
    """Estimate the costs of a model's parts, in percent of the cost of the model and the loss.

    The cost is the number of operations of a forward pass.

    Args:
      model: the model whose costs are estimated.
      loss: the loss to minimize.
      batch: the arrays of a batch, or their shapes. The number of rows does not matter.
      parts: the number of parts of the model.

    Raises:
      ConfigError: a part does not return an array with a row for each example.
    """

    def part(
        number: int, params: Params, rows: Mapping[str, Leaf], x: jax.Array | None
    ) -> jax.Array:
        given = (x,) if number else inputs_of(loss, weighted(rows))
        module: Model = model.bind(params, {})
        return module.parts()[number](*given)

    x, rows = None, shapes_of(batch)
    found = []
    for number in range(parts):
        trace = jax.make_jaxpr(partial(part, number), return_shape=True)
        jaxpr, x = trace(model.params, rows, x)
        _check_output(number, x, rows)
        found.append(jaxpr_flops(jaxpr, elementwise=True))
    head = jax.make_jaxpr(lambda rows, x: loss(Output(x), weighted(rows)))
    last = jaxpr_flops(head(rows, x), elementwise=True)
    unit = 100 / (sum(found) + last)
    return LayerCosts([unit * cost for cost in found], last_seconds=unit * last)


def shapes_of(batch: Mapping[str, Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a batch, without its shardings."""
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}


def _check_output(part: int, x: object, rows: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    count = next(iter(rows.values())).shape[0]
    shape = getattr(x, "shape", ())
    if shape[:1] != (count,):
        raise ConfigError(
            f"part {part} of the model gave {type(x).__name__} {[*shape]} for {count} examples: "
            "each part must return one array with a row for each example"
        )


def _first(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of the first layer of a stacked leaf."""
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)


def _with_one_layer(model: Functional) -> Params:
    leaves = [
        _first(leaf) if name in model.stacked else leaf
        for name, leaf in flatten_with_names(model.params)
    ]
    return jax.tree.structure(model.params).unflatten(leaves)
