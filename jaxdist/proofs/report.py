"""`jaxdist prove`: the table of a proof, and its certificate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jaxdist.experiment import build, load
from jaxdist.metrics.report import write_json
from jaxdist.proofs.certificate import Proof, identity_of, path_of, to_json, write
from jaxdist.proofs.numbers import Compared
from jaxdist.proofs.prove import prove as prove_experiment
from jaxdist.trees import flatten_with_names

NEAR = 2
"""Number of neighbours that are compared by default."""
NAMED = 44
"""Width of the names of leaves."""


def prove(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    near: int = NEAR,
    seed: int = 0,
    json_file: Path | None = None,
    console: Console,
) -> Proof:
    """Prove that a config's plan computes what one device would; print and write what was shown.

    Args:
      path: the configuration file, with `overrides` on top.
      near: number of neighbours to compare.
      seed: seed of weights and neighbours.
      json_file: another file for the certificate, besides the file that `train --proved` reads.

    Raises:
      JaxdistError: any error that the user can fix.
    """
    document, config = load(path, overrides)
    devices = jax.devices()[: config.mesh.fake_devices]
    experiment = build(config, document, devices=devices)
    name = " ".join([str(path), *overrides])
    say = partial(console.print, soft_wrap=True, markup=False)
    say(f"proof of {name}, seed {seed}")
    proof = prove_experiment(experiment, near=near, seed=seed, say=say)
    leaves = [name for name, _ in flatten_with_names(experiment.program.own_shapes.params)]
    for line in table(proof, leaves):
        say(line)
    certificate = to_json(proof, identity_of(config, len(devices)), name)
    file = path_of(config, document)
    write(file, certificate)
    if json_file is not None:
        write_json(json_file, certificate, what="certificate")
    say(f"{proof.verdict}: {file}")
    return proof


def table(proof: Proof, leaves: Sequence[str]) -> Iterator[str]:
    """Yield the lines that say for each leaf what was shown, then all that is wrong or undecided.

    Args:
      leaves: names of the parameters.
    """
    yield f"{'parameter':<{NAMED}} {'types':<10} {'gradient':>9} {'update':>9}"
    for leaf in leaves:
        offs = [_worst(proof.numbers, kind, leaf) for kind in ("gradient", "update")]
        yield f"{_cut(leaf):<{NAMED}} {_typed(proof, leaf):<10} {offs[0]:>9} {offs[1]:>9}"
    others = {
        (one.kind, one.name): None
        for compared in proof.numbers
        for one in compared.quantities
        if one.name not in leaves
    }
    yield f"{'value':<{NAMED + 21}} {'off by':>9}"
    for kind, name in others:
        yield f"{_cut(name):<{NAMED + 21}} {_worst(proof.numbers, kind, name):>9}"
    yield from _bytes(proof)
    yield from _problems(proof)


def _cut(name: str) -> str:
    return name if len(name) <= NAMED else "..." + name[3 - NAMED :]


def _typed(proof: Proof, leaf: str) -> str:
    """Return what types say about a parameter: its gradient, moments and new value."""
    typed = proof.types
    if typed is None:
        return "undecided"

    def any_of(outputs: Iterable[str]) -> bool:
        return any(output == leaf or output.endswith(f"/{leaf}") for output in outputs)

    if any_of(output for finding in typed.findings for output in finding.leaves):
        return "WRONG"
    if any_of(typed.undecided):
        return "undecided"
    return "proved" if any_of(typed.proved) else "by XLA"


def _worst(compared: Sequence[Compared], kind: str, name: str) -> str:
    """Return the largest difference of a value over all comparisons, marked where it is too large.

    Gradients may be absent where a plan has no comparison.
    """
    found = [q for one in compared for q in one.quantities if (q.kind, q.name) == (kind, name)]
    if not found:
        return "undecided"
    worst = max(found, key=lambda one: one.off)
    return f"{worst.off:.1e}" + ("" if all(one.equal for one in found) else "!")


def _bytes(proof: Proof) -> Iterator[str]:
    if proof.sent is None:
        return
    sent = proof.sent
    yield f"{'bytes of a step, over':<38} {'asked':>13} {'compiled':>13} {'by XLA':>13}"
    for axes in {**sent.asked, **sent.placed, **sent.summed}:
        numbers = (part.get(axes, 0.0) for part in (sent.asked, sent.placed, sent.summed))
        yield f"{axes:<38} " + " ".join(f"{number:>13,.0f}" for number in numbers)
    for one in sent.unasked:
        yield f"unasked  {one}"


def _problems(proof: Proof) -> Iterator[str]:
    for finding in proof.types.findings if proof.types else ():
        yield f"WRONG    types: {finding}"
    for compared in (*proof.numbers, *proof.near):
        for one in compared.wrong:
            yield (
                f"WRONG    numbers: {one.kind} {one.name}, {one.step} of the plan {compared.plan}: "
                f"off by {one.off:.1e}, and rounding explains {one.limit:.1e}"
            )
    for line in proof.sent.missing if proof.sent else ():
        yield f"WRONG    bytes: {line}"
    for one in proof.undecided:
        yield f"undecided {one.part}: {one.what}: {one.why}"
