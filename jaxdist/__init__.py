"""jaxdist: train any JAX model on any mesh by changing a config.

The public names are imported on first use, so that `import jaxdist` starts nothing and is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist.checkpoint.store import CheckpointStore as CheckpointStore
    from jaxdist.data.loader import Loader as Loader
    from jaxdist.errors import JaxdistError as JaxdistError
    from jaxdist.experiment import Experiment as Experiment
    from jaxdist.experiment import ExperimentConfig as ExperimentConfig
    from jaxdist.experiment import build as build
    from jaxdist.experiment import load as load
    from jaxdist.mesh import MeshAxis as MeshAxis
    from jaxdist.mesh import MeshConfig as MeshConfig
    from jaxdist.mesh import build_mesh as build_mesh
    from jaxdist.models.adapters import from_equinox as from_equinox
    from jaxdist.models.adapters import from_functions as from_functions
    from jaxdist.models.adapters import from_linen as from_linen
    from jaxdist.models.functional import functional as functional
    from jaxdist.models.mean import Mean as Mean
    from jaxdist.proofs.foreign import prove as prove
    from jaxdist.run.checkpoints import restore as restore
    from jaxdist.run.checkpoints import save as save
    from jaxdist.run.fit import fit as fit
    from jaxdist.run.hooks.contract import Hook as Hook
    from jaxdist.run.report.fit_result import FitResult as FitResult
    from jaxdist.runtime.environment import prepare as prepare
    from jaxdist.sharding import Layout as Layout
    from jaxdist.train.evaluate import evaluate as evaluate
    from jaxdist.train.step import Program as Program

_HOME = {
    "CheckpointStore": "checkpoint.store",
    "Experiment": "experiment",
    "ExperimentConfig": "experiment",
    "FitResult": "run.report.fit_result",
    "Hook": "run.hooks.contract",
    "JaxdistError": "errors",
    "Layout": "sharding",
    "Loader": "data.loader",
    "Mean": "models.mean",
    "MeshAxis": "mesh",
    "MeshConfig": "mesh",
    "Program": "train.step",
    "build": "experiment",
    "build_mesh": "mesh",
    "evaluate": "train.evaluate",
    "fit": "run.fit",
    "from_equinox": "models.adapters",
    "from_functions": "models.adapters",
    "from_linen": "models.adapters",
    "functional": "models.functional",
    "load": "experiment",
    "prove": "proofs.foreign",
    "prepare": "runtime.environment",
    "restore": "run.checkpoints",
    "save": "run.checkpoints",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]  (it reads literals only)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxdist' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxdist.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
