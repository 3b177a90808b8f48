"""The compilation of the functions of a plan, with the compiler options that the plan needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.collectives.channels import SeparateChannels
from jaxdist.parallel.compiler import PASSES, Options, merged_options
from jaxdist.parallel.contract import Compute, Exchange

KEEP_BARRIERS: Options = {PASSES: "cse_barrier_expander"}
"""The option that keeps `jax.lax.optimization_barrier` in programs for CPUs."""
Compiled = jax.stages.Wrapped | SeparateChannels


@dataclass(frozen=True)
class Jitted:
    """A compiler of functions that use a `Compute` and an `Exchange`.

    Attributes:
      compute: the computation of gradients.
      exchange: the exchange of gradients.
      options: the compiler options for all functions.
      platform: the platform of the devices.
    """

    compute: Compute
    exchange: Exchange
    options: Options
    platform: str

    def __call__(self, function: Any, more: Options | None = None, **settings: Any) -> Compiled:
        """Wrap a function in `jax.jit`, with the compiler options of the plan and `more` options.

        On CPUs, the result is a `jaxdist.collectives.channels.SeparateChannels` if the computation
        or the exchange calls collectives explicitly.

        Args:
          function: the function to compile.
          more: the compiler options of this function, in addition to the options of the plan, or
            None without such options.
          settings: the keyword arguments that are passed to `jax.jit`.
        """
        told = self.exchange.options(self.platform)
        options = merged_options(merged_options(self.options, told) or {}, more or {})
        jitted = jax.jit(function, compiler_options=options, **settings)
        # XLA:CPU mixes up explicit collectives on a common channel: see `collectives/channels.py`.
        named = self.exchange.explicit or self.compute.explicit
        return SeparateChannels(jitted) if named and self.platform == "cpu" else jitted

    def updating(self, function: Any, shardings: Any) -> Compiled:
        """Wrap a function from a training state to the next state in `jax.jit`.

        The compiled function donates the memory of its first argument, the old state.

        Args:
          function: the function to compile.
          shardings: the shardings of the results.
        """
        # XLA:CPU drops barriers before it fuses, but only barriers make the replicas of new
        # parameters equal.
        keep = self.exchange.keeps_barriers and self.platform == "cpu"
        more = KEEP_BARRIERS if keep else {}
        return self(function, more, donate_argnums=0, out_shardings=shardings)
