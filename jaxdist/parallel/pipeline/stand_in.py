"""Stand-ins: the objects that a loss receives in place of a model that is on several stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from jaxdist.errors import ConfigError
from jaxdist.types import PyTree


class StandIn:
    """An object that a loss may call like its model, but whose attributes it cannot read.

    No stage has all parameters. A loss that adds a penalty on the parameters would see none, and
    the penalty would be lost silently. Reading any attribute is therefore an error that names the
    attribute.
    """

    # Built-in losses read these attributes alone from every model. Routers, of which `measured`
    # tells, are refused in pipelines.
    padded_head: Callable[[jax.Array], jax.Array] | None = None
    measured: None = None

    def __init_subclass__(cls) -> None:
        # flax and jax find parameters by flattening, which must fail too: an unregistered object
        # would count as a leaf.
        jax.tree_util.register_pytree_node(cls, _refused, _refused)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own protocols, such as copying, expect this error.
            raise AttributeError(name)
        _refuse(f"{name} of its model")


def _refused(*_: object) -> NoReturn:
    _refuse("the parameters of its model")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"the loss reads {what}, but with mesh.stage it may only call its model, since no stage "
        "has all parameters. Use optim.weight_decay for a penalty on their squares, add a term "
        "for each row or token to the losses, or leave out mesh.stage"
    )


@dataclass(frozen=True)
class HeadOnly(StandIn):
    """The head of a `Stacked` with the input `x`, which a loss calls like the whole model."""

    head: Callable[[jax.Array], PyTree]
    x: jax.Array
    padded_head: Callable[[jax.Array], jax.Array] | None = None

    @classmethod
    def of(cls, module: Any, x: jax.Array) -> HeadOnly:
        """Return a `HeadOnly` with the heads of a `Stacked` and the input `x`."""
        return cls(module.head, x, getattr(module, "padded_head", None))

    def hidden(self, *inputs: PyTree) -> jax.Array:
        """Return the input of the head, and ignore the model's inputs."""
        del inputs
        return self.x

    def __call__(self, *inputs: PyTree) -> PyTree:
        """Return the output of the head for `x`, and ignore the model's inputs."""
        return self.head(self.hidden(*inputs))


@dataclass(frozen=True)
class Output(StandIn):
    """An object that returns a model's output for any arguments with which a loss calls it."""

    x: jax.Array

    def __call__(self, *inputs: PyTree) -> jax.Array:
        """Return the model's output, and ignore the model's inputs."""
        del inputs
        return self.x
