"""The types of an experiment's train step and of its evaluation."""

from __future__ import annotations

import jax

from jaxdist.data.loader import WEIGHT
from jaxdist.parallel.pipeline.executor.trial import mistake_of
from jaxdist.parallel.pipeline.model.pipeline import Pipeline
from jaxdist.parallel.pipeline.planning.plan import AXIS
from jaxdist.proofs.types.check import Finding, Typed, check_types
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names


def types_of(program: Program) -> Typed:
    """Trace the train step and the evaluation of a program, and return the types of their outputs.

    The outputs are named `state/NAME`, `metrics` and `evaluation/NAME`.
    """
    state, batch = program.state_shapes, dict(program.batch)
    step, out = jax.make_jaxpr(program.train, return_shape=True)(state, batch)
    names = [*(f"state/{name}" for name, _ in flatten_with_names(out[0])), "metrics"]
    pipeline, mistakes, scheduled = program.compute, [], frozenset[str]()
    if isinstance(pipeline, Pipeline):
        found = [(mistake_of(ticks), ticks.name) for ticks in (pipeline.ticks, pipeline.forward)]
        mistakes = [Finding(AXIS, said, f"the tables of {name}") for said, name in found if said]
        scheduled = frozenset() if mistakes else frozenset([AXIS])
    trained = check_types(step, names, scheduled)
    rows = next(iter(batch.values())).shape[:1]
    # An evaluated batch always has weights, which are 0 for the rows that fill up the last batch.
    batch.setdefault(WEIGHT, jax.ShapeDtypeStruct(rows, "float32"))
    given = state.params, state.buffers, batch
    sums, shapes = jax.make_jaxpr(program.evaluate, return_shape=True)(*given)
    names = [f"evaluation/{name}" for name, _ in flatten_with_names(shapes)]
    evaluated = check_types(sums, names, scheduled)
    return Typed(
        (*mistakes, *trained.findings, *evaluated.findings),
        {**trained.undecided, **evaluated.undecided},
        trained.regions + evaluated.regions,
        (*trained.outputs, *evaluated.outputs),
    )
