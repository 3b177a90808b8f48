"""The computation of a worker between a read and a push, by the payload of its model."""

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
    """A worker's own arrays: none for gradients, a model and its optimizer for local updates.

    Attributes:
      pushes_first: whether its push is known after the read, before it computes, as with elastic
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
        self._pull: dict[str, np.ndarray] = {}

    @property
    def local_steps(self) -> int:
        """The number of gradients from a push to the next."""
        if isinstance(self.model, Elastic):
            return self.model.every
        return self.model.local_steps if isinstance(self.model, Decoupled) else 1

    def read(self, copy: Mapping[str, np.ndarray]) -> Computed | None:
        """Receive parameters; return what is pushed at once, if `pushes_first`."""
        if not isinstance(self.model, Elastic):
            self._own = dict(copy)
            return None
        if self._own is None:  # it begins at the centre
            self._own = dict(copy)
        self._pull = {
            name: elastic_difference(self._own[name], centre, self.alpha)
            for name, centre in copy.items()
        }
        return Computed(self._pull)

    def compute(self, clock: int) -> Computed:
        """Compute the gradient, or the sum of the changes by local steps."""
        assert self._own is not None, "nothing was read"
        if self.model.payload == "gradient":
            return self.problem.gradient(self._own, self.worker, clock)
        start, tokens = self._own, 0.0
        for step in range(self.local_steps):
            found = self.problem.gradient(self._own, self.worker, clock * self.local_steps + step)
            tokens += found.tokens
            # Without tokens there is no gradient, and the optimizer takes no step.
            moved = self._moved(found.gradient) if found.tokens else dict(self._own)
            if step == 0 and self._pull:
                # The paper takes the gradient at the position of the worker before it was pulled.
                moved = {name: moved[name] - self._pull[name] for name in moved}
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
