"""The planner's best plan of Llama-2, compiled, compared with MaxText's script for the same chips.

MaxText needs another Python, with which `scripts/maxtext` compiles its program; the dump of that
program is timed here in the same way as jaxdist's.
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
"""The case of each dump, by the dump's name."""


def figures(dumps: Path) -> Sequence[Figure]:
    """Compare the predicted steps of jaxdist and MaxText, for each model.

    Args:
      dumps: a directory with a folder for each of `CASES`, written by `scripts/maxtext`.

    Raises:
      RunError: a folder is missing.
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
