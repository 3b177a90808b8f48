"""The printed table of a proof, with a line for each parameter and value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxdist.errors import some_of
from jaxdist.proofs.numbers import Compared

if TYPE_CHECKING:
    from jaxdist.proofs.certificate import Proof

NAMED = 44
"""The width of the column of names."""


def proof_lines(proof: Proof) -> Iterator[str]:
    """Yield the lines of a proof's table: parameters, values, bytes, then problems.

    The problems are everything that is wrong, doubted or undecided.
    """
    leaves = proof.leaves
    yield f"{'parameter':<{NAMED}} {'types':<10} {'gradient':>9} {'update':>9}"
    for leaf in leaves:
        offs = [_worst(proof.numbers, kind, leaf) for kind in ("gradient", "update")]
        yield f"{_cut(leaf):<{NAMED}} {_typed(proof, leaf):<10} {offs[0]:>9} {offs[1]:>9}"
    found = (one for compared in proof.numbers for one in compared.quantities)
    others = dict.fromkeys((one.kind, one.name) for one in found if one.name not in leaves)
    yield f"{'value':<{NAMED + 21}} {'off by':>9}"
    for kind, name in others:
        yield f"{_cut(name):<{NAMED + 21}} {_worst(proof.numbers, kind, name):>9}"
    yield from _bytes(proof)
    yield from _problems(proof)


def _cut(name: str) -> str:
    return name if len(name) <= NAMED else "..." + name[3 - NAMED :]


def _typed(proof: Proof, leaf: str) -> str:
    """Return the verdict of types on a parameter's new value and on its optimizer moments.

    The result is "by XLA" if no `shard_map` computes them.
    """
    typed = proof.types

    def any_of(outputs: Iterable[str]) -> bool:
        return any(output == leaf or output.endswith(f"/{leaf}") for output in outputs)

    if any_of(output for finding in typed.findings for output in finding.leaves):
        return "doubt" if proof.doubted else "WRONG"
    if any_of(typed.undecided):
        return "undecided"
    return "proved" if any_of(typed.proved) else "by XLA"


def _worst(compared: Sequence[Compared], kind: str, name: str) -> str:
    """Return the largest difference of a value over all comparisons; `!` marks a wrong value.

    The result is "undecided" for a value that was not compared. For a gradient the result is "-" if
    the user has written the step, since such a step does not return gradients.
    """
    found = [q for one in compared for q in one.quantities if (q.kind, q.name) == (kind, name)]
    if not found:
        # If the user has written the step, it returns no gradients, so a missing gradient does not
        # mean that the gradient is undecided.
        shown = all(one.undecided for one in compared)
        return "undecided" if shown or kind != "gradient" else "-"
    worst = max(found, key=lambda one: one.off)
    return f"{worst.off:.1e}" + ("" if all(one.equal for one in found) else "!")


def _bytes(proof: Proof) -> Iterator[str]:
    sent = proof.sent
    shown = {**sent.asked, **sent.placed, **sent.summed}
    if shown:
        yield f"{'bytes of a step, over':<38} {'asked':>13} {'compiled':>13} {'by XLA':>13}"
    for axes in shown:
        numbers = (part.get(axes, 0.0) for part in (sent.asked, sent.placed, sent.summed))
        yield f"{axes:<38} " + " ".join(f"{number:>13,.0f}" for number in numbers)
    for one in sent.unasked:
        yield f"unasked  {one}"


def _problems(proof: Proof) -> Iterator[str]:
    found = "doubt    types, which no number confirms" if proof.doubted else "WRONG    types"
    yield from (f"{found}: {finding}" for finding in proof.types.findings)
    for compared in (*proof.numbers, *proof.near):
        for one in compared.wrong:
            yield (
                f"WRONG    numbers: {one.kind} {one.name}, {one.step} of the plan {compared.plan}: "
                f"off by {one.off:.1e}, and rounding explains {one.limit:.1e}"
            )
    for line in proof.sent.missing:
        yield f"WRONG    bytes: {line}"
    why: dict[tuple[str, str], list[str]] = {}
    for one in proof.undecided:
        why.setdefault((one.part, one.why), []).append(one.what)
    for (part, reason), names in why.items():
        yield f"undecided {part}: {some_of(names, 1)}: {reason}"
