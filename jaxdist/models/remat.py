"""The activations of a block that the backward pass keeps or recomputes: `model.remat`.

A policy selects activations either by the kind of operation (`ByKind`), or by name: a preset or a
mapping lists names that the block gives to some activations (`named`). All other activations are
recomputed from the block's input, which is always kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from pydantic import AfterValidator, Field

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.jaxprs import equations
from jaxdist.models.ahead import BlockFn
from jaxdist.types import PyTree

ByKind = Literal["none", "elementwise", "dots", "full"]
"""The kind of operations to recompute: none, cheap operations on single elements (rotations,
products, masks), all operations except matmuls, or whole blocks."""
Preset = Literal["minimal", "save_dots_except_mlp", "save_qkv", "save_attention"]
"""The name of a set of activations to keep (`PRESETS`); all others are recomputed."""
Keep = Literal["save", "offload", "recompute"]
"""The memory that keeps an activation: the device's (save), the host's (offload), or none
(recompute)."""
ActivationName = Literal[
    "block_input", "query", "key", "value", "attention", "attention_out", "mlp_gate", "mlp_up"
]
"""The names of activations of a transformer's block, in the order in which they are computed.

block_input: the input of the block, which is kept on the device unless it is offloaded.
query, key, value: the inputs of attention; query and key are already rotated (as in MaxText and
AXLearn), and key and value have `kv_heads` heads.
attention: the result of attention, before the output projection.
attention_out: the result of the output projection, which is added to the residual stream.
mlp_gate, mlp_up: the two products of SwiGLU, before the nonlinearity.

The MLP's result has no name, because no gradient needs it.
"""
PRESETS: Mapping[str, tuple[ActivationName, ...]] = {
    "minimal": ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up"),
    "save_dots_except_mlp": ("query", "key", "value", "attention_out"),
    "save_qkv": ("query", "key", "value"),
    "save_attention": ("attention",),
}
"""The activations that each preset keeps on the device.

The first three are `minimal`, `save_dot_except_mlp` and `save_qkv_proj` of MaxText. `minimal` keeps
the result of a matmul with parameters if a gradient needs it, but nothing inside attention.
`save_attention` keeps only the result of attention.
"""


class NamedKeeps(dict[str, Keep]):
    """A mapping from names of activations to the memory that keeps each of them.

    The mapping is hashable, because models that contain it are hashed. It must not be changed.
    """

    # `dict` sets `__hash__` to None, which makes a mapping unhashable.
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))


def _checked(keeps: Mapping[str, Keep]) -> NamedKeeps:
    if keeps.get("block_input") == "recompute":
        raise ValueError(
            "a block is recomputed from block_input, so block_input itself cannot be recomputed: "
            "save block_input (the default), or offload block_input"
        )
    return NamedKeeps(keeps)


Keeps = Annotated[dict[ActivationName, Keep], Field(min_length=1), AfterValidator(_checked)]
"""A policy that gives the memory of some activations; all others are recomputed."""
Remat = ByKind | Preset | Mapping[Any, Keep]
"""The policy of any block; the keys of a mapping are names that the block defines."""
RematConfig = ByKind | Preset | Keeps
"""The policy in a config, where the keys of a mapping are names in a transformer's block."""

named: Callable[[jax.Array, ActivationName], jax.Array] = checkpoint_name
"""A function that returns an activation unchanged, and gives it a name that policies can use."""

# These operations are cheap to recompute: XLA fuses them into the loop that reads their operands.
# Random bits are also drawn again rather than kept. The primitive `name` computes nothing.
_ELEMENTWISE = {
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate",
    "convert_element_type", "copy", "div", "eq", "floor", "ge", "gt", "integer_pow", "iota",
    "le", "lt", "max", "min", "mul", "name", "ne", "neg", "not", "or", "pad", "random_bits",
    "random_unwrap", "reshape", "rev", "round", "select_n", "shift_right_logical", "sign",
    "slice", "split", "square", "squeeze", "stop_gradient", "sub", "transpose", "xor",
}  # fmt: skip


def _not_elementwise(primitive: Primitive, *_: object, **__: object) -> bool:
    return primitive.name not in _ELEMENTWISE


_POLICIES: dict[str, Callable[..., bool]] = {
    "elementwise": _not_elementwise,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
HOST_MEMORY = "pinned_host"
"""jax's name for the host memory that a device can read and write directly."""


def recomputed(block: BlockFn, remat: Remat, *, prevent_cse: bool) -> BlockFn:
    """Wrap a block so that its backward pass recomputes what the policy `remat` does not keep.

    Args:
      prevent_cse: whether to stop common subexpression elimination in XLA, which would undo the
        policy for a block outside of a loop.
    """
    if remat == "none":
        return block
    return jax.checkpoint(block, policy=_policy(remat), prevent_cse=prevent_cse)


def _policy(remat: Remat) -> Callable[..., Any]:
    keeps = keeps_of(remat)
    if keeps is None:
        assert isinstance(remat, str)
        return _POLICIES[remat]
    saved, offloaded = ([n for n, k in keeps.items() if k == kind] for kind in ("save", "offload"))
    # The block's input is always kept, so a policy that saves its name would keep a second copy.
    saved = [name for name in saved if name != "block_input"]
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )


def keeps_of(remat: Remat) -> Mapping[str, Keep] | None:
    """Return the memory for each name in a policy, or None for a policy by kind of operation.

    >>> keeps_of("save_attention"), keeps_of("dots")
    ({'attention': 'save'}, None)
    """
    if not isinstance(remat, str):
        return remat
    return dict.fromkeys(PRESETS[remat], "save") if remat in PRESETS else None


def listed(remat: Remat | Sequence[Remat]) -> tuple[Remat, ...]:
    """Return the policies as a tuple, which has one entry if all blocks have the same policy.

    >>> listed("full"), listed(["full", {"query": "save"}])
    (('full',), ('full', {'query': 'save'}))
    """
    return (remat,) if isinstance(remat, str | Mapping) else tuple(remat)


def format_policy(remat: Remat | Sequence[Remat]) -> str:
    """Format a policy as a config writes it; the brackets of a list are left out.

    >>> format_policy(["full", {"query": "save", "key": "offload"}])
    'full, {query: save, key: offload}'
    """
    return ", ".join(
        one if isinstance(one, str) else f"{{{', '.join(f'{n}: {k}' for n, k in one.items())}}}"
        for one in listed(remat)
    )


def offloads(remat: Remat | Sequence[Remat]) -> bool:
    """Return whether a policy offloads any activation to the host's memory."""
    return any("offload" in (keeps_of(one) or {}).values() for one in listed(remat))


def check_memory(remat: Remat | Sequence[Remat], memories: Collection[str]) -> None:
    """Refuse a policy that offloads, on devices that cannot access host memory.

    Args:
      memories: the kinds of memory that a device can access, as jax names them.

    Raises:
      ConfigError: the policy offloads, and the host's memory is not among these kinds.
    """
    if offloads(remat) and HOST_MEMORY not in memories:
        raise ConfigError(
            f"remat {format_policy(remat)} offloads to the host's memory ({HOST_MEMORY}), but "
            f"these devices have only {', '.join(memories)}: save or recompute the activations "
            "instead",
            setting=("remat",),
        )


def check_names(
    remat: Remat | Sequence[Remat], block: Callable[..., jax.Array], *args: PyTree
) -> None:
    """Refuse a policy with names that a block does not define.

    A block need not define every name of a preset, but must define at least one of the names. For
    example, a block without a gate has no `mlp_gate`. The block is traced only if the policy has
    names.

    Args:
      args: the arguments of the block, or examples of them.

    Raises:
      ConfigError: no activation of the block has one of the names.
    """
    asked = [name for one in listed(remat) for name in keeps_of(one) or ()]
    if not asked:
        return
    inside = equations(jax.make_jaxpr(block)(*args))
    given = list(dict.fromkeys(e.params["name"] for e in inside if e.primitive.name == "name"))
    own = [
        name for one in listed(remat) if not isinstance(one, str) for name in keeps_of(one) or ()
    ]
    named = own if set(asked) & set(given) else asked
    unknown = [name for name in dict.fromkeys(named) if name not in given]
    if not unknown:
        return
    if not given:
        raise ConfigError(
            f"remat {format_policy(remat)} keeps activations by name, but the blocks name no "
            "activations: name activations with jax.ad_checkpoint.checkpoint_name, or use one of "
            f"{', '.join(get_args(ByKind))}"
        )
    raise ConfigError(
        f"remat {format_policy(remat)}: no activation of the blocks has the name {unknown[0]!r}; "
        f"{did_you_mean(unknown[0], given)}"
    )
