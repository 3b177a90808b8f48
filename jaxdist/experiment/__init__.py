"""A complete configuration: how it is read, checked, and built into an experiment.

The packages that this package imports receive only their sections of the config, and never the
complete config.
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
