"""`jaxdist prove`: the proof of a config's plan, as a table and as a certificate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jaxdist.errors import JaxdistError
from jaxdist.experiment import Experiment, build, load
from jaxdist.mesh import axis_names
from jaxdist.metrics.report import write_json
from jaxdist.proofs.certificate import Proof, Undecided, identity_of, path_of, to_json, write
from jaxdist.proofs.neighbours import neighbours
from jaxdist.proofs.numbers import Compared, Reference, Steps
from jaxdist.proofs.reduce import reduced
from jaxdist.proofs.sent import Sent, compare, owed_sums
from jaxdist.proofs.types.program import types_of
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject

Say = Callable[[str], None]
NEAR = 2
"""The number of neighbours to compare by default."""
TRIES = 4
"""The number of neighbours that are tried for each neighbour to compare, since some are refused."""


def prove(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    near: int = NEAR,
    seed: int = 0,
    json_file: Path | None = None,
    console: Console,
) -> Proof:
    """Prove that a config's plan computes what one device would, and print and write the results.

    Args:
      path: the configuration file, to which `overrides` are applied.
      near: number of neighbours to compare.
      seed: seed of weights and neighbours.
      json_file: a second file for the certificate, in addition to that which `train --proved`
        reads.
      console: the console for the table.

    Raises:
      JaxdistError: any error that the user can fix.
    """
    document, config = load(path, overrides)
    devices = jax.devices()[: config.mesh.fake_devices]
    experiment = build(config, document, devices=devices)
    name = " ".join([str(path), *overrides])
    say = partial(console.print, soft_wrap=True, markup=False)
    say(f"proof of {name}, seed {seed}")
    proof = _proof(experiment, near, seed, say)
    say(str(proof))
    certificate = to_json(proof, identity_of(config, len(devices)), name)
    file = path_of(config, document)
    write(file, certificate)
    if json_file is not None:
        write_json(json_file, certificate, what="certificate")
    say(f"{proof.verdict}: {file}")
    return proof


def _proof(experiment: Experiment, near: int, seed: int, say: Say) -> Proof:
    """Follow types, compare numbers and compare bytes; `say` is called when a part begins."""
    say("types    following every value of the step")
    others: list[Undecided] = []
    typed = sent = None
    try:
        typed = types_of(experiment.program)
    except JaxdistError as error:
        others.append(Undecided("types", "the step", f"it cannot be traced: {error}"))
    sections, notes = reduced(experiment)
    for note in notes:
        say(f"reduced  {note}")
    plain, weighted = Reference(sections, False, seed), Reference(sections, True, seed)
    say("numbers  one device against the plan, at a reduced size")
    compared, steps = plain.compare("as configured", sections)
    found = compared, weighted.compare("with unequal weights", sections)[0]
    if steps is not None:
        say("bytes    the compiled step against its code")
        try:
            sent = _sent(steps)
        except JaxdistError as error:
            others.append(Undecided("bytes", "the step", str(error)))
    leaves = tuple(name for name, _ in flatten_with_names(experiment.program.own_shapes.params))
    proof = Proof(typed, found, (), sent, tuple(others), seed, notes, sections, leaves)
    if found[1].undecided:
        return proof  # the reason also applies to neighbours, which have the same model and weights
    return replace(proof, near=tuple(_near(weighted, sections, near, seed, say)))


def _near(
    reference: Reference, sections: JsonObject, count: int, seed: int, say: Say
) -> Iterator[Compared]:
    """Compare neighbours until `count` were compared, or `TRIES` times as many were tried."""
    tried = itertools.islice(neighbours(sections, seed), TRIES * count)
    compared = ((changed, reference.compare(changed, other)[0]) for changed, other in tried)
    for changed, one in itertools.islice((c for c in compared if not c[1].undecided), count):
        say(f"near     {changed}")
        yield one


def _sent(steps: Steps) -> Sent:
    program, layout = steps.experiment.program, steps.experiment.layout
    synchronous = steps.experiment.config.strategy.type == "synchronous"
    axis = layout.axis_of("batch") if synchronous else None
    trained, _ = program.model.divided(program.state_shapes.params)
    owed = owed_sums(trained, layout.mesh, axis_names(layout.mesh, axis) if axis else ())
    closed = jax.make_jaxpr(program.train)(program.state_shapes, program.batch)
    return compare(closed, steps.compiled, layout.mesh, program.state_shapes, owed)
