"""The first plan of Llama-2, compiled, beside MaxText's own script for the same chips and batch.

MaxText needs a Python of its own: `scripts/maxtext` compiles its program there, whose dump is read
and timed here in the same way as ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.core.report import Figure
from benchmarks.planner.cases import llama_7b, llama_70b
from benchmarks.planner.compiled import kept_or_compiled
from benchmarks.planner.ranking import SIZES_7B, Case
from benchmarks.tpu.peer import predicted
from jaxdist.errors import RunError
from jaxdist.planner.search import best, search
from jaxdist.planner.target import parse_target

TOPOLOGY, CHIPS, BATCH = "v5p:4x4x4", 64, 256
CASES = {
    "7b": Case("Llama-2-7B", llama_7b(BATCH), TOPOLOGY, (*SIZES_7B, f"train.batch_size={BATCH}")),
    "70b": Case("Llama-2-70B", llama_70b(BATCH), TOPOLOGY, (f"train.batch_size={BATCH}",)),
}
"""By the name of a dump: what it is of."""


def figures(dumps: Path) -> Sequence[Figure]:
    """Predicted steps of both, of each model.

    Args:
      dumps: holds a folder for each of `CASES` that `scripts/maxtext` has written.

    Raises:
      RunError: one is missing.
    """
    for name in CASES:
        if not (dumps / name).is_dir():
            raise RunError(
                f"{dumps / name} is no directory: write it with `python3.12 scripts/maxtext {name} "
                f"{dumps / name}`, where that Python has MaxText"
            )
    return [_figure(case, dumps / name) for name, case in CASES.items()]


def _figure(case: Case, dump: Path) -> Figure:
    (first,) = best(search(case.model, parse_target(case.topology)), 1)
    ours = kept_or_compiled(list(case.settings), first.plan, case.topology)
    if ours.refusal:
        raise RunError(f"{case.name}: the compiler refuses the first plan: {ours.refusal}")
    theirs = predicted(dump, case.topology, {"fsdp": CHIPS})
    note = (
        f"{first.plan.words()}; both programs compiled for {case.topology} with {BATCH} sequences "
        f"a step and timed in one way; ours takes {ours.peak_bytes / 1e9:.1f} GB"
    )
    return Figure(f"{case.name} beside MaxText", ours.seconds, theirs.seconds, "<= 1", "s", note)
