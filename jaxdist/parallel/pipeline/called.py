"""What a loss calls its model with: the input of a pipeline, which has no whole model to call."""

from __future__ import annotations

from typing import Any

from jaxdist.errors import ConfigError
from jaxdist.models.loss import Batch, Loss
from jaxdist.parallel.pipeline.stand_in import StandIn
from jaxdist.types import PyTree


class _CalledError(Exception):
    """Carries what a loss calls its module with."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs


class _Asked(StandIn):
    """A model that hands back what it is called with."""

    def hidden(self, *inputs: PyTree) -> Any:
        raise _CalledError(inputs)

    __call__ = hidden


def inputs_of(loss: Loss, batch: Batch) -> tuple[Any, ...]:
    """The arguments of a loss's call of its module.

    Raises:
      ConfigError: the loss does not call it.

    >>> inputs_of(lambda module, batch: module(batch["x"] + 1), {"x": 1})
    (2,)
    """

    try:
        loss(_Asked(), batch)
    except _CalledError as called:
        return called.inputs
    raise ConfigError("the loss does not call the model, so that a pipeline cannot feed it")
