"""Stand-ins: the objects that a loss gets instead of a model that is on several stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax

from jaxdist.errors import ConfigError
from jaxdist.models.feed_forward.measure import Auxiliary, auxiliary
from jaxdist.models.feed_forward.stack import RoutedStack
from jaxdist.types import PyTree


class StandIn:
    """The base class of objects that a loss may call like its model, but that have no parameters.

    No stage has all parameters. If a loss adds a penalty on the parameters, a stand-in without
    parameters would silently remove the penalty. An attempt to read an attribute of a stand-in, or
    to flatten the stand-in, therefore raises ConfigError.
    """

    # Built-in losses read only these attributes of a model and, if the model has routers, the
    # attribute `deterministic`.
    padded_head: Callable[[jax.Array], jax.Array] | None = None
    measured: Callable[..., Any] | None = None

    def __init_subclass__(cls) -> None:
        # flax and jax find parameters by flattening, which must raise the error too. Without this
        # registration, a stand-in would be a leaf.
        jax.tree_util.register_pytree_node(cls, _refused, _refused)

    def __getattr__(self, name: str) -> Any:
        # Python's protocols, such as copying, expect an AttributeError for a missing method.
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"{name} of its model")


def _refused(*_: object) -> NoReturn:
    _refuse("the parameters of its model")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"the loss reads {what}, but with mesh.stage it may only call its model, since no stage "
        "has all parameters. Use optim.weight_decay for a penalty on the squares of parameters, "
        "add a term for each row or token to the losses, or leave out mesh.stage"
    )


@dataclass(frozen=True)
class HeadOnly(StandIn):
    """A stand-in that computes the head of a `Stacked` model on the fixed input `x`.

    Attributes:
      head: the head of the model.
      x: the input of the head, for any arguments with which a loss calls the model.
      padded_head: the model's head with a padded vocabulary, or None if there is no such head.
    """

    head: Callable[[jax.Array], PyTree]
    x: jax.Array
    padded_head: Callable[[jax.Array], jax.Array] | None = None

    @classmethod
    def of(cls, module: Any, x: Any) -> HeadOnly:
        """Return a `HeadOnly` with the heads of a `Stacked` model and the input `x`.

        Args:
          module: the model.
          x: the result of the last block, which for a model with routers is a `Routed`.
        """
        own: object = module
        experts = own.experts if isinstance(own, RoutedStack) else None
        if experts is None:
            return cls(module.head, x, getattr(module, "padded_head", None))
        x_BLD, statistics = x
        found = partial(auxiliary, statistics, experts=experts)
        return RoutedHead(module.head, x_BLD, module.padded_head, found, module.deterministic)

    def hidden(self, *inputs: PyTree) -> jax.Array:
        """Return the input of the head, and ignore the arguments."""
        del inputs
        return self.x

    def __call__(self, *inputs: PyTree) -> PyTree:
        """Return the output of the head for `x`, and ignore the arguments."""
        return self.head(self.hidden(*inputs))


@dataclass(frozen=True)
class RoutedHead(HeadOnly):
    """A `HeadOnly` of a model whose blocks pass the statistics of routers on to the head.

    Attributes:
      found: the function that computes the auxiliary losses from the weight of each token.
      deterministic: whether the model runs in evaluation mode.
    """

    found: Callable[[jax.Array], Auxiliary] = _refused
    deterministic: bool = False

    def measured(self, weight_BL: jax.Array, *inputs: PyTree) -> tuple[jax.Array, Auxiliary]:
        """Return the input of the head, `x`, and the auxiliary losses; do not read `inputs`."""
        del inputs
        return self.x, self.found(weight_BL)


@dataclass(frozen=True)
class Output(StandIn):
    """A stand-in that returns the same output for all arguments.

    Attributes:
      x: the output of the model.
    """

    x: jax.Array

    def __call__(self, *inputs: PyTree) -> jax.Array:
        """Return the output `x`, and ignore the arguments."""
        del inputs
        return self.x
