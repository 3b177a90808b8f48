"""The experiment of a config, whose parts are built and checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
from flax import nnx

from jaxdist.config import Document
from jaxdist.data import Dataset
from jaxdist.data.loader import Loader
from jaxdist.errors import ConfigError
from jaxdist.experiment.config import ExperimentConfig, at_setting
from jaxdist.experiment.context import context_notices, with_context
from jaxdist.experiment.facts import config_facts
from jaxdist.experiment.program import ProgramInputs, make_program
from jaxdist.mesh import Device, build_mesh
from jaxdist.models.build import default_loss
from jaxdist.models.mean import scalars_in
from jaxdist.models.recommend.rows import seed_of
from jaxdist.models.recommend.tables import RecommenderConfig
from jaxdist.sharding import Layout, make_layout
from jaxdist.tables.batch import RowsLoader, TableRows
from jaxdist.train import replicas as replica_check
from jaxdist.train.parts import check_parts
from jaxdist.train.plan import (
    TrainConfig,
    TrainPlan,
    check_batch,
    check_stages,
    explain_plan,
    plan_learning_rate,
    plan_stages,
)
from jaxdist.train.rescale import Sizes
from jaxdist.train.step import Program
from jaxdist.train.strategy.config import Hybrid, ParameterServer
from jaxdist.train.strategy.contract import TrainStage
from jaxdist.validity.table import check


@dataclass(frozen=True)
class Experiment:
    """An experiment whose parts are built and checked, before anything is computed.

    Attributes:
      program: the step and the evaluation at train.batch_size. The states of the programs of all
        train stages have the same structure.
      loader: the loader of training batches at train.batch_size.
      stages: the train stages of a run; most runs have a single stage, with `program` and `loader`.
      explained: a line for each value that is derived from other settings.
      notices: a sentence for each setting that has no effect in this experiment.
      rows: the reader of the table rows that a batch needs, or None unless servers hold the model's
        tables.
    """

    config: ExperimentConfig
    dataset: Dataset
    layout: Layout
    program: Program
    loader: Loader
    heldout: Loader | RowsLoader | None
    total_steps: int
    stages: tuple[TrainStage, ...]
    explained: tuple[str, ...]
    notices: tuple[str, ...] = ()
    rows: TableRows | None = None

    @property
    def unit(self) -> str:
        """The unit in which rates are counted: "tokens" or "examples"."""
        return "tokens" if "tokens" in self.program.batch else "examples"

    @property
    def loss_unit(self) -> str | None:
        """The unit of the loss, or None for squared errors and for a user's loss."""
        loss = self.config.loss or default_loss(self.config.model)
        free = loss is not None and loss.type in ("import", "squared_error")
        return None if free else f"nats per {self.unit[:-1]}"

    def baselines(self) -> dict[str, float]:
        """Return the held-out losses of simple models, by name.

        The result is empty if the data has no held-out split, or if the loss has no unit
        (`loss_unit`) and cannot be compared with these losses.
        """
        if self.heldout is None or self.loss_unit is None:
            return {}
        return dict(self.dataset.baselines())

    @property
    def units_per_step(self) -> int:
        """The number of tokens, or examples, in a step at train.batch_size."""
        return self.config.train.batch_size * self.units_per_example

    @property
    def units_per_example(self) -> int:
        """The number of tokens in an example, or 1 if examples have no tokens."""
        if self.unit != "tokens":
            return 1
        batch = self.program.batch
        # The last token of a decoder's window is only a target; an encoder has separate targets.
        return batch["tokens"].shape[-1] - ("targets" not in batch)


def build(
    config: ExperimentConfig,
    document: Document | None = None,
    *,
    devices: Sequence[Device] | None = None,
    sizes: Sizes = (),
    traced: bool = True,
) -> Experiment:
    """Build the experiment of a config.

    Args:
      document: the document from which the config was read, for the locations in errors, or None
        for a config without a document.
      devices: the devices of the mesh, or None for all devices.
      sizes: the batch sizes of a resumed run, as `jaxdist.train.plan.plan_stages` describes them.
      traced: whether to trace the step, so that its errors are raised before any compilation. A
        caller that compiles at once can set it to false to save time.

    Raises:
      ConfigError: a part cannot be built, or parts do not fit together.
    """
    at = partial(at_setting, document or Document(config.model_dump(mode="json")))
    with at("mesh"):
        mesh = build_mesh(config.mesh, devices)
    with at("sharding", "collective_matmul"):
        layout = make_layout(config.sharding, mesh)
    with at("train", "batch_size"):
        shards = config.parallel.shards
        check_batch(config.train.batch_size, config.train.microbatches, layout, shards)
    # The config is checked first, because reading the data may take long.
    with at():
        check(config_facts(config, layout))
    with at("data"):
        dataset = config.data.build()
    with at("data"):
        loader = _loader(config, layout, dataset)
        heldout = (
            None if dataset.heldout is None else _loader(config, layout, dataset, heldout=True)
        )
    with at("train"):
        plan = plan_stages(config.train, len(dataset.train), sizes)
        check_stages(config.train, plan, layout, shards)
    with at("optim"):
        rate = plan_learning_rate(config.train, config.optim, plan, len(dataset.train))
    with at("strategy"):
        rows = batch_rows(config, dataset, layout)
    with at():
        layout, shared = with_context(config, layout, loader.batch_shapes)
    shapes = loader.batch_shapes if rows is None else rows.with_rows(loader.batch_shapes)
    given = ProgramInputs(config, dataset, shapes, layout, at)
    program, derived, notices = make_program(given, plan, rate, traced=traced)
    if rows is not None:
        rows.seed = int(seed_of(nnx.Rngs(program.init_key).params()))
        heldout = heldout and RowsLoader(heldout, rows)
    # Scalars of several batches cannot be combined into a mean, so all held-out examples form a
    # single batch.
    if heldout is not None and scalars_in(program.measured):
        heldout = heldout.at_once()
    with at("checkpoint"):
        notices = (*notices, *check_parts(config.checkpoint, config.strategy.type, program))
    with at("train"):
        stages = _stages(config.train, plan, program, loader)
    replicas = config.train.check_replicas, program
    return Experiment(
        config=config,
        dataset=dataset,
        layout=layout,
        program=program,
        loader=loader,
        heldout=heldout,
        total_steps=plan.total_steps,
        stages=stages,
        explained=(
            *explain_plan(plan, rate),
            *shared,
            *derived,
            *_explain_placement(config, program),
            *replica_check.explained(*replicas),
        ),
        notices=(
            *notices,
            *context_notices(config.sharding, layout),
            *replica_check.replica_notices(*replicas),
        ),
        rows=rows,
    )


def batch_rows(config: ExperimentConfig, dataset: Dataset, layout: Layout) -> TableRows | None:
    """Return the reader of table rows if servers hold the model's tables, else None.

    Raises:
      ConfigError: the tables have no limit.
    """
    # Data without fields are refused when the model is built; that error names the types of data
    # that have fields.
    if not isinstance(config.strategy, Hybrid) or dataset.fields is None:
        return None
    assert isinstance(config.model, RecommenderConfig), "the validity table refuses other models"
    most = config.strategy.most_rows or 0
    free = [name for name, size in dataset.fields.items() if not size]
    if free and not most:
        raise ConfigError(
            f"the tables of {', '.join(free[:3])} have a row for each 64-bit id that occurs, so "
            "their size has no limit: set strategy.most_rows, or data.hash_size"
        )
    return TableRows(replace(config.model.form(dataset.fields), most=most), layout)


def _explain_placement(config: ExperimentConfig, program: Program) -> Sequence[str]:
    """Return lines on the placement of parameters, or () unless several servers hold them."""
    strategy = config.strategy
    if not isinstance(strategy, ParameterServer) or strategy.servers == 1:
        return ()
    return strategy.placed(program.model.params, config.optim).explain().splitlines()


def _stages(
    train: TrainConfig, plan: TrainPlan, program: Program, loader: Loader
) -> tuple[TrainStage, ...]:
    """Return the train stages of a plan, each with a program and a loader.

    Train stages of equal batch size share a program.
    """
    programs = {train.batch_size: program}
    stages = []
    for stage, seen in zip(plan.stages, plan.first_examples, strict=True):
        size, batches = stage.batch_size, loader
        compute = program.compute.resized(train.microbatches_of(size))
        if seen or size != train.batch_size:
            batches = loader.resized(size, start_example=seen)
        if size not in programs:
            programs[size] = replace(program, batch=batches.batch_shapes, compute=compute)
        last = stage.first_step + stage.steps
        stages.append(TrainStage(stage.first_step, last, size, programs[size], batches))
    return tuple(stages)


def _loader(
    config: ExperimentConfig, layout: Layout, dataset: Dataset, *, heldout: bool = False
) -> Loader:
    def sharding(name: str, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        return layout.sharding(("batch", *(None,) * (len(shape) - 1)))

    source = dataset.heldout if heldout else dataset.train
    assert source is not None
    return Loader(
        source,
        batch_size=config.train.batch_size,
        seed=config.seed,
        shuffle=not heldout,
        sharding=sharding,
        prefetch=config.train.prefetch,
        allowed=dataset.allowed,
        split="held-out split" if heldout else "training split",
    )
