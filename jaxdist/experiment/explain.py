"""Explanations of the values that a run derives from its config, before anything is built."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxdist.config import Document
from jaxdist.data import DataConfig, Dataset
from jaxdist.errors import JaxdistError
from jaxdist.experiment.config import At, ExperimentConfig, at_setting
from jaxdist.experiment.program import ProgramInputs
from jaxdist.train.plan import explain_plan, needs_examples, plan_learning_rate, plan_stages


def explain_config(config: ExperimentConfig, document: Document | None = None) -> tuple[str, ...]:
    """Return a line for each value that a run derives from the config.

    If reading the data takes little time, the function reads the data to learn their size.

    Args:
      document: the document from which the config was read, for the locations in errors, or None
        for a config without a document.

    Raises:
      ConfigError: values do not fit together.
    """
    at = partial(at_setting, document or Document(config.model_dump(mode="json")))
    return (*_explain_steps(config, at), *_explain_pipeline(config, at))


def _explain_steps(config: ExperimentConfig, at: At) -> tuple[str, ...]:
    train, optim, examples = config.train, config.optim, None
    if needs_examples(train, optim):
        if optim.scale_from is None and train.batch_ramp is None and train.phases is None:
            return ()
        data = _at_hand(config.data)
        if data is None:
            return ("learning rate, warm-up and stages are unknown before the data is read",)
        examples = len(data.train)
    with at("train"):
        plan = plan_stages(train, examples)
    with at("optim"):
        return explain_plan(plan, plan_learning_rate(train, optim, plan, examples))


def _explain_pipeline(config: ExperimentConfig, at: At) -> tuple[str, ...]:
    stages, rows = config.mesh.stage, config.train.batch_size
    if not isinstance(stages, int) or stages < 2:
        return ()
    data = _at_hand(config.data)
    if data is None or "import" in (config.model.type, config.loss and config.loss.type):
        return ("the pipeline is unknown before the data and the model are read",)
    batch = {
        name: jax.ShapeDtypeStruct((rows, *jnp.shape(value)), jnp.result_type(value))
        for name, value in data.train[0].items()
    }
    given = ProgramInputs(config, data, batch, None, at)
    with at("model"):
        model = given.model()
    with at("loss"):
        loss = given.loss()
    with at("parallel", "pipeline"):
        chunks = given.chunks(model, loss, stages)
    return () if chunks is None else chunks.explained


def _at_hand(data: DataConfig) -> Dataset | None:
    """Return the data set, or None if it needs a download, large files or user code."""
    quick = data.type == "synthetic" or getattr(data, "source", "") in ("digits", "python-stdlib")
    try:
        return data.build() if quick else None
    except JaxdistError:
        return None
