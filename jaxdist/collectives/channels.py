"""The assignment of a separate channel to each collective of a program for CPUs.

XLA:CPU may run a collective while a loop with other collectives runs, if the collective and the
loop do not need results of each other. XLA:CPU distinguishes such collectives by their channels,
but jax gives the same channel to all collectives in a `jax.shard_map`. Devices that have reached
different collectives may then join the same rendezvous, and the process aborts ("rendezvous ... Id
can't be larger than the number of participating threads", with jax 0.10 and 0.12). Collectives that
XLA inserts have separate channels already.
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
    """A jitted function that is compiled with a separate channel for each of its collectives.

    The object can be called, lowered and traced like the jitted function.

    Attributes:
      jitted: the result of `jax.jit`, which must have no static arguments.
    """

    jitted: jax.stages.Wrapped
    _compiled: dict[Hashable, jax.stages.Compiled] = field(default_factory=dict)

    def __call__(self, *args: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            # The plain function is called, because jax refuses a jit with compiler options inside
            # another jit. (The type stubs do not declare `__wrapped__`.)
            return self.jitted.__wrapped__(*args)  # pyright: ignore[reportAttributeAccessIssue]
        kinds = [(jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves]
        # A compiled program accepts only the types and shardings for which it was compiled.
        key = (structure, *kinds)
        if key not in self._compiled:
            self._compiled[key] = self.lower(*args).compile()
        return self._compiled[key](*args)

    def _cache_size(self) -> int:
        """Return the number of compiled programs, like the same method of a jitted function."""
        return len(self._compiled)

    def trace(self, *args: PyTree) -> jax.stages.Traced:
        """Trace the function, like `jax.jit(...).trace`."""
        return self.jitted.trace(*args)

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Lower the function to a program with separate channels, like `jax.jit(...).lower`."""
        lowered = self.jitted.lower(*args)
        separate(lowered)
        return lowered


def separate(lowered: jax.stages.Lowered) -> None:
    """Change a lowered program such that its collectives have the channels 1, 2, 3, ...."""
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
