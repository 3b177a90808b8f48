"""A search for the arguments with which a loss calls its model, without running a model."""

from __future__ import annotations

from typing import Any

from jaxdist.errors import ConfigError
from jaxdist.models.loss import Batch, Loss
from jaxdist.parallel.pipeline.stand_in import StandIn
from jaxdist.types import PyTree


class _CalledError(Exception):
    """An exception that carries the arguments with which a loss called its model."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs


class _Asked(StandIn):
    """A stand-in that reports the arguments with which a loss calls its model."""

    # The exception ends the loss here, because the loss could not compute with a stand-in's result.
    def hidden(self, *inputs: PyTree) -> Any:
        raise _CalledError(inputs)

    __call__ = hidden


class _AskedRouted(_Asked):
    """A stand-in for a model with routers, which also reports the arguments of `measured`."""

    # A loss reads this head, but never runs it: the loss computes the head's input first, and the
    # call of `measured` for this input raises.
    padded_head = staticmethod(lambda x: x)

    def measured(self, weight: Any, *inputs: Any) -> Any:
        raise _CalledError((weight, *inputs))


def inputs_of(loss: Loss, batch: Batch, *, routed: bool = False) -> tuple[Any, ...]:
    """Return the arguments of the first call of the model in a loss.

    Args:
      loss: the loss, which is called with a stand-in for the model.
      batch: the batch that the loss gets.
      routed: whether the model has routers. The first argument is then the weight of each token.

    Raises:
      ConfigError: the loss does not call its model.

    >>> inputs_of(lambda module, batch: module(batch["x"] + 1), {"x": 1})
    (2,)
    """
    try:
        loss(_AskedRouted() if routed else _Asked(), batch)
    except _CalledError as called:
        return called.inputs
    raise ConfigError(
        "the loss does not call the model, which a pipeline requires: call it in the loss"
    )
