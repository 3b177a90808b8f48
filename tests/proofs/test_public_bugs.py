"""Public reports of wrong numbers, each found by numbers, and by types where they can see it."""

from __future__ import annotations

import jax
import pytest

from benchmarks.prove.known import MESH, proof_of
from benchmarks.prove.public_bugs import BUGS, COLUMNS, NO_ROWS, Bug, plain, plain_sum, steps_of
from jaxdist.proofs.types.check import check_types

NUMBERS_ALONE = {
    "Automodel#3530: the last microbatch",
    "Megatron-LM#7452, 4: recomputed of other rows",
    "Megatron-LM#7452, 5: mask of another group",
    "jaxformer#28: decay of what is not decayed",
    "miles_diffusion#35: logged by a root",
    "unsloth#10616: padded vocabulary",
    "verl#4250: labels at the edge of shards",
}
"""The sums are all taken, of what is not meant, or types are undecided."""
RIGHT = {
    "a weighted mean": Bug(plain_sum, plain),
    "an update of a shard": Bug(
        lambda w, x, y, m: (w * 0.9, m.sum()),
        lambda w, x, y, m: (w * 0.9, m.sum()),
        COLUMNS,
        NO_ROWS,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_types_name_the_line(name):
    wrong, _, *arguments = steps_of(BUGS[name], MESH)
    found = check_types(jax.make_jaxpr(wrong)(*arguments), ["state/w", "outputs/value"]).findings
    assert bool(found) != (name in NUMBERS_ALONE)
    assert all(finding.where.startswith("public_bugs.py:") for finding in found)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in NUMBERS_ALONE else pytest.mark.full) for n in BUGS]
)
def test_numbers_differ_from_one_device(name):
    proof = proof_of(BUGS[name])
    assert proof.verdict == "wrong"
    assert proof.numbers[0].wrong, str(proof)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_proved(name):
    assert proof_of(RIGHT[name]).verdict == "proved"
