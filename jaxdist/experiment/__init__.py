"""A complete configuration: reading it, its cross-checks, and the experiment that it builds.

Only this package sees the whole tree; nothing below it receives more than its own section.
"""

from jaxdist.experiment.config import EvalConfig, ExperimentConfig, RunConfig, Source, load
from jaxdist.experiment.experiment import Experiment, TrainStage, build
from jaxdist.experiment.explain import explain_config

__all__ = [
    "EvalConfig",
    "Experiment",
    "ExperimentConfig",
    "RunConfig",
    "Source",
    "TrainStage",
    "build",
    "explain_config",
    "load",
]
