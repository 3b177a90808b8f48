"""The section of a run's report about the certificate of the run's plan."""

from __future__ import annotations

import json
from collections.abc import Iterator

from jaxdist.errors import RunError
from jaxdist.run.directory import RunDirectory
from jaxdist.types import JsonObject


def read_proof(directory: RunDirectory) -> JsonObject | None:
    """Return the certificate with which a run began, or None for a run without `--proved`.

    Raises:
      RunError: the file is not a certificate.
    """
    try:
        found = json.loads(directory.proof.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{directory.proof} is not a certificate: {error}; restore the file from a copy, or "
            "remove it"
        ) from error
    return found


def proof_lines(found: JsonObject | None) -> Iterator[str]:
    """Yield lines that summarize a certificate for the user, or no line without a certificate.

    >>> empty = {"verdict": "proved", "digest": "a" * 64, "types": None, "bytes": None}
    >>> numbers = {"seed": 3, "plans": [], "neighbours": []}
    >>> list(proof_lines({**empty, "numbers": numbers}))
    ['proof  proved, config aaaaaaaaaaaa, seed 3']
    """
    if found is None:
        return
    numbers, types, sent = found["numbers"], found["types"], found["bytes"]
    yield f"proof  {found['verdict']}, config {found['digest'][:12]}, seed {numbers['seed']}"
    if types is not None:
        yield (
            f"       types: {len(types['proved'])} of {len(types['outputs'])} outputs of "
            f"{types['regions']} shard_maps; XLA places all others"
        )
    for plan in (*numbers["plans"], *numbers["neighbours"]):
        equal = sum(one["equal"] for one in plan["quantities"])
        told = plan["undecided"] or f"{equal} of {len(plan['quantities'])} values equal one device"
        yield f"       numbers, {plan['plan']}: {told}"
    for axes, asked in (sent["asked"] if sent else {}).items():
        placed = sent["placed"].get(axes, 0)
        yield f"       bytes over {axes}: {asked:,.0f} asked for, {placed:,.0f} compiled"
