"""A channel for each collective, where XLA tells collectives apart by it.

XLA:CPU may run a collective while a loop with collectives before it still runs, where neither needs
the other's results. It tells them apart by their channel, but jax gives all collectives under
`jax.shard_map` the same one: then devices that have come to different collectives meet, and the
process ends ("rendezvous ... Id can't be larger than the number of participating threads"; seen on
jax 0.10 and 0.12). What XLA places by itself has channels of its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.mlir import ir

from jaxdist.types import PyTree

ATTRIBUTE = "channel_handle"
_TYPE = re.compile(r"type = (\d+)")


@dataclass(frozen=True)
class SeparateChannels:
    """A jitted function, compiled with a channel for each of its collectives.

    It is called, lowered and traced like the jitted function.

    Attributes:
      jitted: what `jax.jit` returns, without static arguments.
    """

    jitted: jax.stages.Wrapped
    _compiled: dict[Hashable, jax.stages.Compiled] = field(default_factory=dict)

    def __call__(self, *args: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            # The plain function, which no stub has: jax refuses a jit with compiler options inside
            # another jit.
            return self.jitted.__wrapped__(*args)  # pyright: ignore[reportAttributeAccessIssue]
        kinds = [(jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves]
        key = (structure, *kinds)
        if key not in self._compiled:
            self._compiled[key] = self.lower(*args).compile()
        return self._compiled[key](*args)

    def _cache_size(self) -> int:
        """How many programs were compiled; jitted functions have a method of this name too."""
        return len(self._compiled)

    def trace(self, *args: PyTree) -> jax.stages.Traced:
        """As `jax.jit(...).trace`."""
        return self.jitted.trace(*args)

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`; `compile` of what it returns has the channels."""
        lowered = self.jitted.lower(*args)
        separate(lowered)
        return lowered


def separate(lowered: jax.stages.Lowered) -> None:
    """Number the channels of a program that is not compiled yet, in place."""
    numbers = itertools.count(1)
    module: Any = lowered.compiler_ir("stablehlo")

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        if ATTRIBUTE in attributes:
            found = _TYPE.search(str(attributes[ATTRIBUTE]))
            assert found, f"a channel without a type: {attributes[ATTRIBUTE]}"
            text = f"#stablehlo.channel_handle<handle = {next(numbers)}, type = {found[1]}>"
            attributes[ATTRIBUTE] = ir.Attribute.parse(text)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
