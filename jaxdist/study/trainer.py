"""The training of trials in sequence, with the same compiled program for all learning rates."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Generic

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.config import Document
from jaxdist.errors import ConfigError, DataError
from jaxdist.experiment import Experiment, ExperimentConfig, build, load
from jaxdist.optim.build import Optimizer
from jaxdist.study.definition import Contender, contenders
from jaxdist.study.trial import Trial, TrialOutcome, TrialT, trial_key
from jaxdist.train.evaluate import evaluate
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.types import JsonObject

_NOT_OURS = {"run", "checkpoint", "eval"}


def adjustable(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer that multiplies its updates by a factor in its state, initially 1.

    If updates are proportional to the learning rate, a program that is compiled for the rate 1 can
    train with any other rate: the factor is then the learning rate.
    """
    factor = optax.inject_hyperparams(optax.scale)(step_size=1.0)
    chained = optax.chain(optimizer.transform, factor)
    chosen = optimizer.eval_params
    # `chosen` needs the state of the given optimizer: the first element of the chain's state.
    return replace(
        optimizer,
        transform=optax.with_extra_args_support(chained),
        eval_params=chosen and (lambda state, params: chosen(state[0], params)),
    )


def at_rate(start: TrainState, learning_rate: float) -> TrainState:
    """Return a copy of a training state with a learning rate.

    Args:
      start: a state of a program whose optimizer is `adjustable`.
      learning_rate: the learning rate, which becomes the state's factor of the updates.
    """
    # The state is copied, since a step donates its state, and later trials need `start`.
    copied = jax.tree.map(jnp.copy, start)
    old = optax.tree.get(copied.opt_state, "step_size")
    value = jax.device_put(jnp.asarray(learning_rate, old.dtype), old.sharding)
    return replace(copied, opt_state=optax.tree.set(copied.opt_state, step_size=value))


class ConfigTrainer(ABC, Generic[TrialT]):
    """A trainer of trials of one config; a subclass gives the settings of each trial.

    Args:
      path: the path of the config.
      overrides: settings of all trials.
    """

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        self._path, self._overrides = path, tuple(overrides)

    @abstractmethod
    def settings(self, trial: TrialT) -> Sequence[str]:
        """Return the settings of a trial, including its seed."""

    def __call__(self, trial: TrialT) -> TrialOutcome[TrialT]:
        """Train a trial, evaluate it on the complete held-out split, and return the outcome.

        No output files are written.
        """
        begun = time.perf_counter()
        experiment = self.experiment(trial)
        return finish(trial, experiment, experiment.program.init(), begun=begun)

    def identity(self, trial: TrialT) -> str:
        """Return a key for a trial, which is equal for trials that must have the same result."""
        _, config = self._load(trial)
        return trial_key(config.model_dump(mode="json", exclude=_NOT_OURS))

    def experiment(self, trial: TrialT) -> Experiment:
        """Build the experiment of a trial."""
        document, config = self._load(trial)
        return build(config, document)

    def _load(self, trial: TrialT) -> tuple[Document, ExperimentConfig]:
        return load(self._path, [*self._overrides, *self.settings(trial)])


class Trainer(ConfigTrainer[Trial]):
    """A trainer of trials that differ in optimizer, batch size and learning rate.

    Args:
      path: the path of the config.
      overrides: settings of all trials.
      optimizers: the optimizers by the names that trials use, or None for the shipped optimizers.
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        optimizers: Mapping[str, Contender] | None = None,
    ) -> None:
        super().__init__(path, overrides)
        self._optimizers = contenders() if optimizers is None else optimizers
        self._built = lru_cache(maxsize=8)(self._build)

    def __call__(self, trial: Trial) -> TrialOutcome[Trial]:
        """Train a trial, evaluate it on the complete held-out split, and return the outcome.

        No output files are written.
        """
        begun = time.perf_counter()
        # Trials that differ only in the learning rate share a compiled program.
        experiment, start = self._built(replace(trial, learning_rate=1.0))
        return finish(trial, experiment, at_rate(start, trial.learning_rate), begun=begun)

    def settings(self, trial: Trial) -> Sequence[str]:
        """Return the optimizer, the batch size and the seed of a trial."""
        optim: JsonObject = {
            **self._optimizers[trial.optimizer].section,
            "learning_rate": trial.learning_rate,
            "schedule": {"type": "linear", "warmup_steps": trial.warmup_steps},
        }
        return (
            f"optim={json.dumps(optim)}",
            f"train.batch_size={trial.batch_size}",
            f"seed={trial.seed}",
        )

    def check(self, trials: Sequence[Trial]) -> list[Experiment]:
        """Return the experiments of trials, and check them before the first trial is trained.

        Raises:
          JaxdistError: an experiment cannot be built, for example because the mesh does not divide
            the batch.
          ConfigError: a batch is larger than the training split, or changes within a run.
          DataError: the data has no held-out split.
        """
        experiments = [self.experiment(trial) for trial in trials]
        for trial, experiment in zip(trials, experiments, strict=True):
            examples = len(experiment.dataset.train)
            if trial.batch_size > examples:
                raise ConfigError(
                    f"--batches {trial.batch_size} is larger than the training split of "
                    f"{examples:,} examples; leave this size out"
                )
            check_comparable(experiment, self._path)
        return experiments

    def _build(self, trial: Trial) -> tuple[Experiment, TrainState]:
        """Return an experiment with an adjustable optimizer, and its state for the rate 1."""
        experiment = self.experiment(trial)
        optimizer = adjustable(experiment.program.optimizer)
        program = replace(experiment.program, optimizer=optimizer)
        return replace(experiment, program=program), program.init()


def check_comparable(experiment: Experiment, path: Path) -> None:
    """Check that all steps of a run use a single program, and that the data has a held-out split.

    Args:
      experiment: the experiment of the run.
      path: the path of the config, for error messages.

    Raises:
      ConfigError: the batch size changes within a run, or the strategy changes parameters between
        steps.
      DataError: the data has no held-out split.
    """
    if len(experiment.stages) > 1:
        sizes = ", ".join(str(stage.batch_size) for stage in experiment.stages)
        raise ConfigError(
            f"{path}: its runs change the batch size ({sizes}), but a study trains each run at a "
            "single size; set train.batch_ramp=null and train.phases=null"
        )
    strategy = experiment.config.strategy.type
    if strategy != "synchronous":
        raise ConfigError(
            f"{path}: strategy.type {strategy} changes parameters between steps, but a study "
            "compares only steps; set strategy={type: synchronous}"
        )
    if experiment.heldout is None:
        raise DataError(
            f"data of {path} has no held-out split, on which a study compares the results: set "
            "data.heldout_fraction or data.heldout_examples"
        )


def finish(
    trial: TrialT, experiment: Experiment, state: TrainState, *, begun: float
) -> TrialOutcome[TrialT]:
    """Train from a state, evaluate on the complete held-out split, and return the outcome.

    No output files are written.

    Args:
      trial: the trial to run.
      experiment: the experiment of the trial.
      state: the initial state, which is donated.
      begun: the start time of the trial, by `time.perf_counter`.
    """
    program = experiment.program
    state, diverged = train_trial(experiment, state)
    assert experiment.heldout is not None, "checked before the first trial"
    with experiment.heldout.evaluation_batches() as batches:
        metrics = evaluate(program, program.evaluated(state), state.buffers, batches)
    diverged = diverged or not np.isfinite(metrics["loss"])
    seconds = round(time.perf_counter() - begun, 3)
    return TrialOutcome(trial, experiment.total_steps, metrics, diverged, seconds)


def train_trial(experiment: Experiment, state: TrainState) -> tuple[TrainState, bool]:
    """Train from a state, and return the last state and whether the run diverged.

    A loss that is not finite ends the run.
    """
    program, previous = experiment.program, None
    with experiment.loader.batches() as batches:
        for _ in range(experiment.total_steps):
            state, values = program.train(state, next(batches))
            # The loss of the previous step is read, since the present step is still running.
            if previous is not None and _diverged(program, previous):
                return state, True
            previous = values
    return state, False


def _diverged(program: Program, values: jax.Array) -> bool:
    """Return whether a step that the optimizer did not skip has a loss that is not finite."""
    found = dict(zip(program.metrics, np.asarray(values).tolist(), strict=True))
    return not np.isfinite(found["loss"]) and not found.get("skipped_in_a_row")
