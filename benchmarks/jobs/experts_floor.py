"""The balance of a router that is perfectly even over all text, on a held-out split of few files.

`python -m benchmarks.jobs.experts_floor RUN` prints MaxVio of a run that trained with experts on
Python's standard library, once on the held-out split and once on as many random training windows.
With each value it prints the MaxVio that a perfectly even router would have.

Dims: P parts of a text, N layers with experts, E experts.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.data.text.dataset import TextConfig
from jaxdist.data.text.documents import python_stdlib, split_documents
from jaxdist.experiment import Experiment, build, load
from jaxdist.models.feed_forward.measure import LOAD
from jaxdist.models.feed_forward.router import violation
from jaxdist.run.checkpoints import restore
from jaxdist.train.state import TrainState

DRAWS = 2000


def floors(load_PNE: np.ndarray, draws: int = DRAWS) -> np.ndarray:
    """Return MaxVio of a perfectly even router on texts of random parts, `[draws, N]`.

    As many parts as the text has are drawn with replacement. The deviation of their relative load
    from the relative load of all parts estimates the deviation of an even router from an even load
    (a bootstrap).
    """
    random, count = np.random.default_rng(0), len(load_PNE)

    def relative(load_NE: np.ndarray) -> np.ndarray:
        return load_NE / load_NE.mean(-1, keepdims=True)

    whole_NE = relative(load_PNE.sum(0))
    drawn = (load_PNE[random.integers(0, count, count)].sum(0) for _ in range(draws))
    return np.stack([(relative(load_NE) - whole_NE).max(-1) for load_NE in drawn])


def loads(experiment: Experiment, state: TrainState, batches: Iterable[Any]) -> np.ndarray:
    """Return the load of the experts for each batch, `[P, N, E]`."""
    program = experiment.program
    sums = [program.evaluate(state.params, state.buffers, batch) for batch in batches]
    return np.stack([np.asarray(one[LOAD].total, np.float64) for one in sums])


def by_file(load_PNE: np.ndarray, fraction: float, tokens: int) -> np.ndarray:
    """Return the loads of batches, added up for each held-out file of the standard library.

    A batch counts for the file that has the middle of its tokens.
    """
    files = split_documents(python_stdlib(), heldout_fraction=fraction, not_utf8="keep").heldout
    ends = np.cumsum([len(file) for file in files])
    middles = np.arange(len(load_PNE)) * tokens + tokens // 2
    file_P = np.searchsorted(ends[:-1], middles, side="right")
    return np.stack([load_PNE[file_P == file].sum(0) for file in np.unique(file_P)])


def main(run: Path) -> None:
    """Print the balance of a run, with the floors."""
    document, config = load(run / "config.yaml")
    experiment = build(config, document)
    assert isinstance(config.data, TextConfig)
    assert experiment.heldout is not None
    with CheckpointStore(run / "checkpoints", keep=1, keep_best=False, on_event=print) as store:
        state = restore(store, experiment.program, say=print).state
    with experiment.heldout.evaluation_batches() as batches:
        held_PNE = loads(experiment, state, batches)
    with experiment.loader.batches() as batches:
        trained_PNE = loads(experiment, state, itertools.islice(batches, len(held_PNE)))
    files = by_file(held_PNE, config.data.heldout_fraction, experiment.units_per_step)
    for name, parts in (("held-out files", files), ("training batches", trained_PNE)):
        layers, worst = violation(parts.sum(0)), floors(parts)
        low, middle, high = np.quantile(worst.max(-1), (0.05, 0.5, 0.95))
        print(
            f"{len(parts)} {name}: MaxVio of the layers {np.round(layers, 3)}; of an even router "
            f"{np.round(worst.mean(0), 3)}, in the worst layer {middle:.3f} ({low:.3f} to "
            f"{high:.3f} in 90% of texts)"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
