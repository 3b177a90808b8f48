"""A batch that shrinks and grows with the mesh: the sizes that a run has had, and what follows.

Examples are counted, not steps. A step of b examples is b / B of one of the full size B: so much
of the run it takes, and so far it moves on the schedule of the learning rate, whose values are
scaled by the rule of `optim.scale_from` from B to b. Which examples are next does not depend on
sizes: the loader takes them in its order, from where the last batch of another size ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.optim.batch_scaling import RULES, BatchPhase, ScaleFromConfig
from jaxdist.optim.build import Rate
from jaxdist.types import Json

if TYPE_CHECKING:
    pass

Sizes = tuple[tuple[int, int], ...]
"""By the step after which it began, in their order: examples of a step."""
KEY = "batch_sizes"
"""Under which they are kept beside a state."""


def extended(found: Json, step: int, size: int, full: int) -> Sizes:
    """The sizes of a run that goes on after `step` with batches of `size`.

    Args:
      found: as they were kept beside the state; None: it had batches of the full size.

    >>> extended([[0, 64], [100, 48]], 120, 48, 64), extended(None, 120, 32, 64)
    (((0, 64), (100, 48)), ((0, 64), (120, 32)))
    """
    sizes = tuple((first, of) for first, of in (found or [(0, full)]) if first < step)
    return sizes if sizes and sizes[-1][1] == size else (*sizes, (step, size))


def seen(sizes: Sizes, step: int) -> int:
    """Examples of the first `step` steps.

    >>> seen(((0, 64), (100, 48)), 110)
    6880
    """
    ends = [*(first for first, _ in sizes[1:]), step]
    return sum((end - first) * size for (first, size), end in zip(sizes, ends, strict=True))


def last_stage(sizes: Sizes, total_examples: int) -> BatchPhase:
    """The stretch from the last change on, which goes on until all examples were seen.

    Its last batch may go beyond them by a part of it; there is one at least.

    >>> last_stage(((0, 64), (100, 48)), 6400 + 96)
    BatchPhase(first_step=100, steps=2, batch_size=48)
    """
    first, size = sizes[-1]
    left = total_examples - seen(sizes[:-1], first) if len(sizes) > 1 else total_examples
    return BatchPhase(first, max(-(-left // size), 1), size)


def rescaled(base: Rate, scale: ScaleFromConfig | None, full: int, sizes: Sizes) -> Rate:
    """The learning rate since the last change.

    Args:
      base: of the run at the full batch size.
      scale: whose rule scales it.
    """
    first, size = sizes[-1]
    if size == full and len(sizes) == 1:
        return base
    assert scale is not None, "it was refused without a rule"
    factor = (size / full) ** RULES[scale.rule][0]
    before, share = seen(sizes, first) / full, size / full
    why = f"learning rate x {factor:.6g} since step {first}: batches of {size}, not {full}"

    def schedule(step: ArrayLike) -> jax.Array:
        since = jnp.asarray(step, jnp.float32) - first
        return jnp.asarray(factor * base.schedule(before + since * share))

    return Rate(schedule, (*base.explained, f"{why}, rule {scale.rule}"))
