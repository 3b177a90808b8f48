"""The choice of an attention kernel: the kernel that a config names, or the best that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax

from jaxdist.cost.context import SequenceSplit
from jaxdist.cost.kernels import LANES
from jaxdist.errors import ConfigError
from jaxdist.models.attention.blockwise import Blockwise
from jaxdist.models.attention.contract import AttentionRequest, Kernel, Qkv
from jaxdist.models.attention.cudnn import Cudnn
from jaxdist.models.attention.plain import Plain
from jaxdist.models.attention.shared import attend_shared
from jaxdist.models.attention.splash import Splash, dims_of_arrays
from jaxdist.models.hints import Hint, no_hint

KernelName = Literal["auto", "plain", "blockwise", "splash", "cudnn"]

KERNELS: Mapping[str, Kernel] = {
    "plain": Plain(),
    "blockwise": Blockwise(),
    "splash": Splash(),
    "cudnn": Cudnn(),
}

SPLASH_FROM, BLOCKWISE_FROM = 1024, 2048
"""The sequence lengths from which `auto` takes splash and blockwise.

The scores of shorter sequences are small compared with the other activations of a block, and
programs without loops or custom kernels compile faster.
"""


def choose_kernel(name: KernelName, ask: AttentionRequest) -> str:
    """Return the name of the kernel for a request: `name`, or for `auto` the best kernel that fits.

    `auto` selects cudnn or splash if the devices and the request allow either of them, otherwise
    blockwise for long sequences, and otherwise plain. If the platform is unknown, the result is
    plain instead of a kernel for a single platform.

    Raises:
      ConfigError: the named kernel does not support the request.
    """
    if name == "auto":
        return _best(ask)
    refused = kernel_refusal(name, ask)
    if refused is not None:
        raise ConfigError(refused, setting=("attention",))
    return name if KERNELS[name].platform in (None, ask.platform) else "plain"


def kernel_refusal(name: KernelName, ask: AttentionRequest) -> str | None:
    """Explain why a kernel does not support a request, and list the kernels that support it.

    Return None if the kernel supports the request.
    """
    reason = None if name == "auto" else KERNELS[name].fits(ask)
    if reason is None:
        return None
    fitting = " or ".join(other for other in KERNELS if _runs(other, ask))
    here = "" if ask.platform is None else f" (here {_best(ask)})"
    return f"attention {name} {reason}; use auto{here} or {fitting}"


def _best(ask: AttentionRequest) -> str:
    wanted = {"cudnn": 0, "splash": SPLASH_FROM, "blockwise": BLOCKWISE_FROM, "plain": 0}
    length = ask.length or 0
    return next(name for name, least in wanted.items() if length >= least and _runs(name, ask))


def _runs(name: str, ask: AttentionRequest) -> bool:
    kernel = KERNELS[name]
    return kernel.platform in (None, ask.platform) and kernel.fits(ask) is None


def _kernel(name: KernelName, ask: AttentionRequest) -> Kernel:
    kernel = KERNELS[choose_kernel(name, ask)]
    return replace(kernel, family=ask.family) if isinstance(kernel, Splash) else kernel


def piecewise_kernel(
    name: KernelName, ask: AttentionRequest, split: SequenceSplit
) -> Callable[..., jax.Array] | None:
    """Return the kernel for a group's attention to gathered keys, or None if no kernel runs.

    Only splash has such a kernel, and only for sequences whose length its tiles divide.

    Args:
      name: the name of the kernel, or auto.
      ask: the request for whole sequences.
      split: the method by which devices share a sequence.
    """
    kernel = _kernel(name, ask)
    if not isinstance(kernel, Splash) or (ask.length or 0) % (split.groups * LANES):
        return None
    return kernel.pieces


@dataclass(frozen=True)
class Attend:
    """Attention by a kernel, which `choose_kernel` selects again for the shapes of each call.

    Attributes:
      name: the name of the kernel, or auto.
      ask: the request without the values that differ between calls: each call sets the length of
        its sequences, and whether it has segments.
      hint: the layout of activations on the mesh.
      ordered: whether the positions of a call are 0 to L - 1 in this order; otherwise the positions
        are in the order of `Hint.split`.
    """

    name: KernelName
    ask: AttentionRequest
    hint: Hint
    ordered: bool = True

    @property
    def at(self) -> None:
        """Always None, which means that the rotary positions of each call are counted from 0."""

    @property
    def reordered(self) -> Attend:
        """The same attention, for sequences whose positions are in the order of `Hint.split`."""
        return replace(self, ordered=False)

    def __call__(self, given: Qkv) -> jax.Array:
        """Compute attention, as `Kernel` specifies.

        Raises:
          ConfigError: the named kernel does not support the shapes of this call.
        """
        segments = given.segments is not None
        ask = replace(self.ask, length=given.q.shape[1], segments=segments)
        split = self.hint.split
        if split is None:
            return self._whole(ask, self.hint, given)
        if self.ordered:
            split = replace(split, order="contiguous")
        inside = replace(ask, head_parts=1, kv_head_parts=1, seq_parts=1)
        kernel = partial(self._whole, inside, no_hint)
        local = partial(
            attend_shared,
            split,
            kernel,
            window=ask.window,
            causal=ask.causal,
            pieces=piecewise_kernel(self.name, inside, split),
        )
        # XLA's partitioner cannot tell which blocks a mask hides, so each device computes its own
        # list of visible blocks.
        return self.hint.on_blocks(local, *dims_of_arrays(given))(*jax.tree.leaves(given))

    def _whole(self, ask: AttentionRequest, hint: Hint, given: Qkv) -> jax.Array:
        """Compute attention with the chosen kernel, for sequences that are not split."""
        return _kernel(self.name, ask)(given, window=ask.window, causal=ask.causal, hint=hint)
