"""`jaxdist prove`: the proof of a config's plan, as a table and as a certificate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jaxdist.errors import JaxdistError
from jaxdist.experiment import Experiment, build, load
from jaxdist.metrics.report import write_json
from jaxdist.proofs.certificate import Proof, identity_of, path_of, to_json, write_certificate
from jaxdist.proofs.neighbours import neighbours
from jaxdist.proofs.numbers import Compared, Reference, Steps
from jaxdist.proofs.reduce import reduced
from jaxdist.proofs.sent import Sent, compare, owed_sums
from jaxdist.proofs.types.check import Typed
from jaxdist.proofs.types.program import types_of
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject

Say = Callable[[str], None]
TRIES = 4
"""The number of neighbours that are tried for each neighbour to compare. Some neighbours cannot be
built."""


def prove(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    near: int = 2,
    seed: int = 0,
    json_file: Path | None = None,
    console: Console,
) -> Proof:
    """Prove that a config's plan computes what a single device would, and return the results.

    The function prints the results as a table, and writes the certificate that `train --proved`
    reads.

    Args:
      path: the configuration file, to which `overrides` are applied.
      near: the number of neighbours (plans with three changed settings) to compare.
      seed: the seed of the examples' weights and of the choice of neighbours.
      json_file: a second file for the certificate, or None to write none.
      console: the console for the table.

    Raises:
      JaxdistError: the config cannot be read or built, or the certificate cannot be written.
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
    write_certificate(file, certificate)
    if json_file is not None:
        write_json(json_file, certificate, what="certificate")
    say(f"{proof.verdict}: {file}")
    return proof


def _proof(experiment: Experiment, near: int, seed: int, say: Say) -> Proof:
    """Return the types, the compared numbers and the compared bytes of an experiment.

    Neighbours (plans with three changed settings) are not compared if the plan cannot be compared
    for examples with unequal weights.

    Args:
      experiment: the experiment at its full size.
      near: the number of neighbours to compare.
      seed: the seed of weights and neighbours.
      say: a function that prints a line when a part begins.
    """
    leaves = tuple(name for name, _ in flatten_with_names(experiment.program.own_shapes.params))
    say("types    following every value of the step")
    try:
        typed = types_of(experiment.program)
    except JaxdistError as error:
        typed = Typed(undecided=dict.fromkeys(leaves, (f"the step cannot be traced: {error}",)))
    sections, notes = reduced(experiment)
    for note in notes:
        say(f"reduced  {note}")
    plain, weighted = Reference(sections, False, seed), Reference(sections, True, seed)
    say("numbers  one device against the plan, at a reduced size")
    compared, steps = plain.compare("as configured", sections)
    found = compared, weighted.compare("with unequal weights", sections)[0]
    say("bytes    the compiled step against its code")
    sent = Sent() if steps is None else _sent(steps)
    # Neighbours have the same model and weights, so they would be undecided for the same reason.
    neighbours_ = () if found[1].undecided else tuple(_near(weighted, sections, near, seed, say))
    return Proof(typed, found, neighbours_, sent, seed, notes, sections, leaves)


def _near(
    reference: Reference, sections: JsonObject, count: int, seed: int, say: Say
) -> Iterator[Compared]:
    """Yield the comparisons of up to `count` neighbours with a single device.

    At most `TRIES * count` neighbours are tried, so the result may have fewer than `count`
    comparisons.
    """
    tried = itertools.islice(neighbours(sections, seed), TRIES * count)
    compared = ((changed, reference.compare(changed, other)[0]) for changed, other in tried)
    for changed, one in itertools.islice((c for c in compared if not c[1].undecided), count):
        say(f"near     {changed}")
        yield one


def _sent(steps: Steps) -> Sent:
    program, layout = steps.experiment.program, steps.experiment.layout
    synchronous = steps.experiment.config.strategy.type == "synchronous"
    axes = layout.batch_axes if synchronous else ()
    trained, _ = program.model.divided(program.state_shapes.params)
    owed = owed_sums(trained, layout.mesh, axes)
    closed = jax.make_jaxpr(program.train)(program.state_shapes, program.batch)
    return compare(closed, steps.compiled, layout.mesh, program.state_shapes, owed)
