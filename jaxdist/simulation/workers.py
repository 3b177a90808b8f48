"""The gradients of a model on the workers' shares of the data, and its held-out loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate

import jax
import numpy as np

from jaxdist.data.loader import Loader
from jaxdist.errors import DataError
from jaxdist.models.loss import Batch
from jaxdist.parallel.jitted import Compiled
from jaxdist.param_server.contract import Arrays
from jaxdist.simulation.engine.problem import Computed
from jaxdist.train.evaluate import evaluate
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program, StepGradients
from jaxdist.train.strategy.statistics import divided, pushed_values, with_statistics
from jaxdist.trees import flatten_with_names
from jaxdist.types import Params


class ModelProblem:
    """The gradients of a config's model on its data, and the held-out loss.

    A batch is divided by rows: worker 0 has the first rows. All workers with shares of the same
    size run the same compiled program. Random layers draw separately for each worker and step.
    """

    def __init__(
        self,
        program: Program,
        loader: Loader,
        shares: Sequence[int],
        microbatches: Sequence[int],
        heldout: Loader | None,
        *,
        evaluation_batches: int | None = None,
    ) -> None:
        """Store the arguments; nothing is computed yet.

        Args:
          program: the program for whole batches.
          shares: the number of examples of each worker.
          microbatches: the number of microbatches of each worker.
          heldout: the loader of the held-out split, or None if there is no held-out split.
          evaluation_batches: the number of batches of the held-out split to use; None uses all.

        Raises:
          DataError: there is no held-out split.
        """
        if heldout is None:
            raise DataError(
                "the data has no held-out split, on which the curve is measured: set "
                "data.heldout_fraction or data.heldout_examples"
            )
        self._program, self._shares, self._microbatches = program, shares, microbatches
        starts = [0, *accumulate(shares)]
        # The last element of the starts is the end of the batch, where no share begins.
        self._loaders = [loader.part(*pair) for pair in zip(starts, shares, strict=False)]
        self._heldout, self._limit = heldout, evaluation_batches
        self._of_size = cache(self._gradients_of)

    @cached_property
    def _begun(self) -> TrainState:
        """The initial training state, in which `gradient` replaces step, parameters and buffers."""
        return self._program.init()

    @property
    def start(self) -> Arrays:
        """The initial parameters by name."""
        return self._start

    @cached_property
    def _start(self) -> Arrays:
        return _by_name(with_statistics(self._begun.params, self._begun.buffers))

    def gradient(self, params: Arrays, worker: int, step: int) -> Computed:
        """Return the mean gradient and the number of tokens of a worker's part of a batch."""
        batch = self._loaders[worker].batch(step)
        # Random layers draw by the step in the state, so each worker and step needs a separate
        # number.
        draw = np.int32(step * len(self._shares) + worker)
        given, buffers = divided(self._tree(params), self._begun.buffers)
        state = replace(self._begun, step=draw, params=given, buffers=buffers)
        size, pieces = self._shares[worker], self._microbatches[worker]
        found: StepGradients = self._of_size(size, pieces)(state, batch)
        pushed = pushed_values(found.grads, buffers, found.buffers)
        grads, weight = jax.device_get((pushed, found.sums["loss"].weight))
        return Computed(_by_name(grads), float(weight))

    def loss(self, params: Arrays) -> float:
        """Compute the held-out loss."""
        given = divided(self._tree(params), self._begun.buffers)
        return evaluate(self._program, *given, self._evaluated)["loss"]

    @cached_property
    def _evaluated(self) -> list[Batch]:
        with self._heldout.evaluation_batches(self._limit) as batches:
            return list(batches)

    def _gradients_of(self, size: int, microbatches: int) -> Compiled:
        worker = self._shares.index(size)
        program = replace(
            self._program,
            batch=self._loaders[worker].batch_shapes,
            compute=self._program.compute.resized(microbatches),
        )
        return program.gradients

    def _tree(self, params: Arrays) -> Params:
        shapes = self._program.state_shapes
        like = with_statistics(shapes.params, shapes.buffers)
        leaves = [params[name] for name, _ in flatten_with_names(like)]
        tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, like))


def _by_name(tree: Params) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten_with_names(tree)}
