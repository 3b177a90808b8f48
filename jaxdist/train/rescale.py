"""The batch sizes and the learning rate of a run whose batch size follows the mesh.

The length of such a run is counted in examples, not in steps. A step of b examples counts as b / B
of a step of the full size B. The step advances the run and the schedule of the learning rate by
this fraction, and the rule of `optim.scale_from` scales the learning rate from B to b. The order of
the examples does not depend on batch sizes: after a change of size, the loader continues with the
next example.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.optim.batch_scaling import RULES, BatchPhase, ScaleFromConfig
from jaxdist.optim.build import Rate
from jaxdist.types import Json

Sizes = tuple[tuple[int, int], ...]
"""The batch sizes of a run, in order: pairs of the step after which a size began, and the size."""
KEY = "batch_sizes"
"""The key of the batch sizes in the metadata of a saved state."""


def extended(found: Json, step: int, size: int, full: int) -> Sizes:
    """Return the sizes of a run that continues after `step` with batches of `size`.

    Args:
      found: the sizes that were saved with the state, or None if all batches had the full size.
      full: the full size.

    >>> extended([[0, 64], [100, 48]], 120, 48, 64), extended(None, 120, 32, 64)
    (((0, 64), (100, 48)), ((0, 64), (120, 32)))
    """
    sizes = tuple((first, of) for first, of in (found or [(0, full)]) if first < step)
    return sizes if sizes and sizes[-1][1] == size else (*sizes, (step, size))


def seen(sizes: Sizes, step: int) -> int:
    """Return the number of examples in the first `step` steps of a run with these batch sizes.

    >>> seen(((0, 64), (100, 48)), 110)
    6880
    """
    ends = [*(first for first, _ in sizes[1:]), step]
    return sum((end - first) * size for (first, size), end in zip(sizes, ends, strict=True))


def last_stage(sizes: Sizes, total_examples: int) -> BatchPhase:
    """Return the phase from the last change of size until `total_examples` were trained on.

    The last batch may exceed this number. The phase has at least one batch.

    >>> last_stage(((0, 64), (100, 48)), 6400 + 96)
    BatchPhase(first_step=100, steps=2, batch_size=48)
    """
    first, size = sizes[-1]
    left = total_examples - seen(sizes[:-1], first) if len(sizes) > 1 else total_examples
    return BatchPhase(first, max(-(-left // size), 1), size)


def rescaled(base: Rate, scale: ScaleFromConfig | None, full: int, sizes: Sizes) -> Rate:
    """Return the learning rate after the last change of the batch size.

    Args:
      base: the learning rate of the run at the full batch size.
      scale: the rule by which the learning rate depends on the batch size; the rule may be None
        only if all batches have the full size.
      full: the full batch size.
    """
    first, size = sizes[-1]
    if size == full and len(sizes) == 1:
        return base
    assert scale is not None, "it was refused without a rule"
    factor = (size / full) ** RULES[scale.rule][0]
    before, share = seen(sizes, first) / full, size / full
    why = (
        f"learning rate x {factor:.6g} since step {first}: the batches have {size} examples "
        f"instead of {full}"
    )

    def schedule(step: ArrayLike) -> jax.Array:
        since = jnp.asarray(step, jnp.float32) - first
        return jnp.asarray(factor * base.schedule(before + since * share))

    return Rate(schedule, (*base.explained, f"{why}, rule {scale.rule}"))
