"""The comparison of optimizers by memory, stability, and the largest batch that keeps quality."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.experiment import build, load
from jaxdist.run.memory import bytes_per_device
from jaxdist.simulation.review.settings import RecordedScaling, ReviewConfig
from jaxdist.study.plan import contenders
from jaxdist.study.table import largest_batch, worst_acceptable


@dataclass(frozen=True)
class OptimizerRow:
    """A row of the table that compares optimizers.

    Attributes:
      largest: the largest batch size up to which every mean is within 1% (a point of accuracy) of
        the best mean at the base batch, or None if the mean at the base batch is worse.
      state_bytes: the bytes of state for each parameter, in float32.
      spread: the sample standard deviation over the seeds at the last batch size, or None if it is
        unknown.
      diverged: the number of batch sizes at which a run diverged.
      last: the mean at the last batch size, or None if a run diverged.
    """

    name: str
    largest: int | None
    state_bytes: float
    spread: float | None
    diverged: int
    last: float | None


def optimizer_rows(config: ReviewConfig) -> Iterator[OptimizerRow]:
    """Yield a row for each optimizer of the recorded study, in the order of the study.

    Raises:
      ConfigError: `jaxdist study batch-scaling` lacks an optimizer of the study, or every optimizer
        diverged at the base batch.
    """
    scaling = config.scaling
    limit = _limit(scaling)
    for name, cells in scaling.cells.items():
        means = zip(scaling.batches, (cell.mean for cell in cells), strict=True)
        up_to = largest_batch(means, limit, scaling.metric)
        diverged = sum(cell.mean is None for cell in cells)
        held = _state_bytes(config, name)
        yield OptimizerRow(name, up_to, held, cells[-1].spread, diverged, cells[-1].mean)


def _limit(scaling: RecordedScaling) -> float:
    """Return the worst mean at which an optimizer keeps the quality of the base batch."""
    means = [cells[0].mean for cells in scaling.cells.values() if cells[0].mean is not None]
    if not means:
        raise ConfigError(
            f"scaling.cells: all optimizers diverged at batch {scaling.batches[0]}: record a study "
            "with a smaller first batch size"
        )
    return worst_acceptable(means, scaling.metric)


def _state_bytes(config: ReviewConfig, name: str) -> float:
    """Return the bytes of an optimizer's state for each parameter of the compiled program."""
    known = contenders()
    if name not in known:
        raise ConfigError(f"scaling.cells: optimizer {name!r}: {did_you_mean(name, known)}")
    section = {**known[name].section, "learning_rate": known[name].start}
    overrides = ["mesh={data: 1, fake_devices: 1}", f"optim={json.dumps(section)}"]
    document, found = load(config.program_file, overrides)
    shapes = build(found, document, devices=jax.devices()[:1]).program.state_shapes
    return 4 * bytes_per_device(shapes.opt_state) / bytes_per_device(shapes.params)
