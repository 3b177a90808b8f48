"""The proof of a config's plan: by types, then by numbers, then by bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax

from jaxdist.errors import JaxdistError
from jaxdist.experiment import Experiment
from jaxdist.mesh import axis_names
from jaxdist.proofs.certificate import Proof, Undecided
from jaxdist.proofs.neighbours import neighbours
from jaxdist.proofs.numbers import Compared, Reference
from jaxdist.proofs.reduce import reduced
from jaxdist.proofs.sent import Sent, compare, owed_sums
from jaxdist.proofs.types.check import Typed
from jaxdist.proofs.types.program import types_of
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject

Say = Callable[[str], None]
TRIES = 4
"""The number of neighbours that are tried for each neighbour to compare, since some are refused."""


def prove(experiment: Experiment, *, near: int, seed: int, say: Say) -> Proof:
    """Prove that an experiment's plan computes what a single device would.

    Args:
      experiment: the experiment.
      near: number of neighbours to compare.
      seed: seed of weights and neighbours.
      say: a function that is called with a line of text when a part begins.
    """
    say("types    following every value of the step")
    typed, undecided = _typed(experiment.program)
    sections, notes = reduced(experiment)
    for note in notes:
        say(f"reduced  {note}")
    found: list[Compared] = []
    plain, weighted = Reference(sections, False, seed), Reference(sections, True, seed)
    say("numbers  one device against the plan, at a reduced size")
    compared, steps = plain.compare("as configured", sections)
    found.append(compared)
    found.append(weighted.compare("with unequal weights", sections)[0])
    undecided += [Undecided("numbers", one.plan, one.undecided) for one in found if one.undecided]
    sent = None
    if steps is not None:
        say("bytes    the compiled step against its code")
        sent, more = _sent(steps)
        undecided += more
    leaves = tuple(name for name, _ in flatten_with_names(experiment.program.own_shapes.params))
    proof = Proof(typed, tuple(found), (), sent, tuple(undecided), seed, notes, sections, leaves)
    if any(one.undecided for one in found[1:]):
        return proof  # the reason also applies to neighbours, which have the same model and weights
    return replace(proof, near=tuple(_near(weighted, sections, near, seed, say)))


def _near(
    reference: Reference, sections: JsonObject, count: int, seed: int, say: Say
) -> Iterator[Compared]:
    """Compare neighbours until `count` were compared, or `TRIES` times as many were tried."""
    left = count
    tries = TRIES * count
    for changed, other in neighbours(sections, seed):
        if not left or not tries:
            return
        tries -= 1
        compared, _ = reference.compare(changed, other)
        if not compared.undecided:
            say(f"near     {changed}")
            left -= 1
            yield compared


def _typed(program: Program) -> tuple[Typed | None, list[Undecided]]:
    """Return the types of the step and of the evaluation, and the outputs without a type."""
    try:
        typed = types_of(program)
    except JaxdistError as error:
        return None, [Undecided("types", "the step", f"it cannot be traced: {error}")]
    return typed, [
        Undecided("types", leaf, "; ".join(why)) for leaf, why in typed.undecided.items()
    ]


def _sent(steps: Any) -> tuple[Sent | None, list[Undecided]]:
    experiment = steps.experiment
    program, layout = experiment.program, experiment.layout
    axis = layout.axis_of("batch") if experiment.config.strategy.type == "synchronous" else None
    trained, _ = program.model.divided(program.state_shapes.params)
    owed = owed_sums(trained, layout.mesh, axis_names(layout.mesh, axis) if axis else ())
    try:
        closed = jax.make_jaxpr(program.train)(program.state_shapes, program.batch)
        return compare(closed, steps.compiled, layout.mesh, program.state_shapes, owed), []
    except JaxdistError as error:
        return None, [Undecided("bytes", "the step", str(error))]
