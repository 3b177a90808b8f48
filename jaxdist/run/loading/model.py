"""Functions for a run that begins with a downloaded model.

Each process reads only the shards that its devices hold.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxdist.interchange.leaves import BUFFERS, Leaf, Room, largest, place
from jaxdist.interchange.source import CONFIG, leaves_of, open_source
from jaxdist.models.tuning.lora import PREFIX
from jaxdist.run.directory import RunDirectory
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names
from jaxdist.types import Params


def is_downloaded_model(path: Path) -> bool:
    """Return whether a path is a file or folder of a downloaded model, and not a run directory."""
    return path.is_file() or ((path / CONFIG).is_file() and not RunDirectory(path).occupied)


def matched(program: Program, path: Path) -> list[Leaf]:
    """Match a program's parameters with the tensors of a model's files, without reading a tensor.

    Raises:
      JaxdistError: the path has no model, or the model of the path differs from the program's
        model.
    """
    return leaves_of(open_source(path), program.model)


def load_params(program: Program, leaves: list[Leaf]) -> Params:
    """Load parameters in the form that checkpoints hold (`jaxdist.train.home`).

    Each process reads only the shards of its devices.

    Adapters are not loaded, since a downloaded model has none.

    During the load, a process needs host memory for the shards of its devices. The process also
    needs memory for the largest tensor, or for the largest shard if that is larger.
    """
    return _loaded(_divided(program, program.state_shapes.params)[0], leaves, "")


def _divided(program: Program, params: Params) -> tuple[Params, Params]:
    """Return the part of the parameters that files fill, and the adapters."""
    adapters = {PREFIX: params[PREFIX]} if program.model.adapters else {}
    return {name: tree for name, tree in params.items() if name not in adapters}, adapters


def _loaded(shapes: Any, leaves: list[Leaf], prefix: str) -> Any:
    by_name, room = {leaf.name: leaf for leaf in leaves}, Room(largest(leaves))
    named = flatten_with_names(shapes)
    held = [place(by_name[prefix + name], shape, room) for name, shape in named]
    return jax.tree.unflatten(jax.tree.structure(shapes), held)


def initial_state(program: Program, leaves: list[Leaf]) -> TrainState:
    """Return an initial state with a model's parameters and buffers.

    The state has the form that checkpoints hold (`jaxdist.train.home`). Adapters have their initial
    values.
    """
    rest = program.home.to_files(program.init())
    # The randomly initialized parameters are dropped before the model's parameters are read, so
    # that devices never hold both.
    rest, adapters = replace(rest, params=None), _divided(program, rest.params)[1]
    buffers = _loaded(program.state_shapes.buffers, leaves, f"{BUFFERS}/")
    return replace(rest, params=load_params(program, leaves) | adapters, buffers=buffers)
