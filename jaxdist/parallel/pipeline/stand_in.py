"""Stand-ins: the objects that a loss is given for a model that lies on several stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from jaxdist.errors import ConfigError
from jaxdist.types import PyTree


class StandIn:
    """An object that a loss may call as it calls its model, and read nothing of.

    No stage has all parameters. A loss that adds a penalty on them would see none, and its penalty
    would be lost in silence, so that reading anything is refused by name.
    """

    # The one name that built-in losses ask of every model.
    padded_head: Callable[[jax.Array], jax.Array] | None = None

    def __init_subclass__(cls) -> None:
        # flax and jax find parameters by flattening, which an object that is no tree survives.
        jax.tree_util.register_pytree_node(cls, _refused, _refused)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a question of Python's own, such as how to copy
            raise AttributeError(name)
        _refuse(f"{name} of its model")


def _refused(*_: object) -> NoReturn:
    _refuse("the parameters of its model")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"the loss reads {what}, but with mesh.stage it may only call its model, since no stage "
        "has all parameters; use optim.weight_decay for a penalty on their squares, add a term for "
        "each row or token to the losses, or take mesh.stage away"
    )


@dataclass(frozen=True)
class HeadOnly(StandIn):
    """The last part of a `Stacked`, which a loss calls as it does the whole; its input is given."""

    head: Callable[[jax.Array], PyTree]
    x: jax.Array
    padded_head: Callable[[jax.Array], jax.Array] | None = None

    @classmethod
    def of(cls, module: Any, x: jax.Array) -> HeadOnly:
        """Return the heads of a `Stacked` for this input."""
        return cls(module.head, x, getattr(module, "padded_head", None))

    def hidden(self, *inputs: PyTree) -> jax.Array:
        """x, whatever the model's inputs."""
        del inputs
        return self.x

    def __call__(self, *inputs: PyTree) -> PyTree:
        """`head(x)`."""
        return self.head(self.hidden(*inputs))


@dataclass(frozen=True)
class Output(StandIn):
    """The result of a model, which a loss gets whatever it calls the model with."""

    x: jax.Array

    def __call__(self, *inputs: PyTree) -> jax.Array:
        """x, whatever the model's inputs."""
        del inputs
        return self.x
