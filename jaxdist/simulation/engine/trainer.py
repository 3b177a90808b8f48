"""A worker's computation between a read and a push, for each kind of consistency model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxdist.param_server.consistency.arrays import elastic_difference
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.contract import Arrays, RuleState
from jaxdist.simulation.engine.problem import Computed, TrainingProblem, UpdateRule


class LocalTrainer:
    """The computation of a worker: a gradient, or local steps with the worker's optimizer.

    Attributes:
      pushes_first: whether the push is known before the worker computes. This is true for elastic
        averaging, whose workers continue from their own parameters.
    """

    def __init__(
        self,
        model: Consistency,
        problem: TrainingProblem,
        rule: UpdateRule,
        worker: int,
        workers: int,
    ) -> None:
        self.model, self.problem, self.rule, self.worker = model, problem, rule, worker
        self.alpha = model.rate_of(workers) if isinstance(model, Elastic) else 0.0
        self.pushes_first = isinstance(model, Elastic)
        self._own: dict[str, np.ndarray] | None = None
        self._rules: dict[str, RuleState] = {}
        self._difference: dict[str, np.ndarray] = {}

    @property
    def local_steps(self) -> int:
        """The number of gradients that the worker computes between two pushes."""
        if isinstance(self.model, Elastic):
            return self.model.every
        return self.model.local_steps if isinstance(self.model, Decoupled) else 1

    def read(self, copy: Mapping[str, np.ndarray]) -> Computed | None:
        """Receive parameters; return the change to push at once, or None if it is not known yet."""
        if not isinstance(self.model, Elastic):
            self._own = dict(copy)
            return None
        if self._own is None:  # A new worker begins with the parameters of the centre.
            self._own = dict(copy)
        self._difference = {
            name: elastic_difference(self._own[name], centre, self.alpha)
            for name, centre in copy.items()
        }
        return Computed(self._difference)

    def compute(self, clock: int) -> Computed:
        """Compute the gradient, or the sum of the changes by all local steps."""
        assert self._own is not None, "nothing was read"
        if self.model.payload == "gradient":
            return self.problem.gradient(self._own, self.worker, clock)
        start, tokens = self._own, 0.0
        for step in range(self.local_steps):
            found = self.problem.gradient(self._own, self.worker, clock * self.local_steps + step)
            tokens += found.tokens
            # Without tokens there is no gradient, so the optimizer takes no step.
            moved = self._moved(found.gradient) if found.tokens else dict(self._own)
            if step == 0 and self._difference:
                # Elastic averaging computes the gradient at the worker's parameters before the
                # elastic difference is subtracted.
                moved = {name: moved[name] - self._difference[name] for name in moved}
            self._own = moved
        return Computed({name: self._own[name] - start[name] for name in start}, tokens)

    def _moved(self, gradient: Arrays) -> dict[str, np.ndarray]:
        assert self._own is not None
        found: dict[str, np.ndarray] = {}
        for name, array in self._own.items():
            if name not in self._rules:
                self._rules[name] = self.rule.init(name, array)
            found[name], self._rules[name] = self.rule.update(
                name, array, gradient[name], 1.0, self._rules[name]
            )
        return found
