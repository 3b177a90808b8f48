"""What the backward pass keeps of a block and what it computes again: `model.remat`.

A word says it by kind of operation; a preset or a mapping says it by the names that a block gives
to some of its activations (`named`). What is not kept is computed again from the block's input,
which always is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from pydantic import AfterValidator, Field

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.models.ahead import BlockFn
from jaxdist.types import PyTree

ByKind = Literal["none", "elementwise", "dots", "full"]
"""Recomputes nothing, cheap operations on single elements (rotations, products, masks), all but
matmul results, or whole blocks."""
Preset = Literal["minimal", "save_dots_except_mlp", "save_qkv", "save_attention"]
"""Keeps the activations of `PRESETS`, and recomputes everything else."""
Keep = Literal["save", "offload", "recompute"]
"""In the device's memory, in the host's, or not at all."""
ActivationName = Literal[
    "block_input",
    "query",
    "key",
    "value",
    "attention",
    "attention_out",
    "mlp_gate",
    "mlp_up",
]
"""Activations of a transformer's block, in the order in which they are computed.

block_input: what the block begins with. It is kept on the device unless it is offloaded.
query, key, value: what attention takes, so query and key after their rotation (as MaxText and
  AXLearn have them), the latter two with `kv_heads` heads.
attention: what it gives, before the projection out.
attention_out: after that projection, as it is added to the residual stream.
mlp_gate, mlp_up: the two products of SwiGLU, before the nonlinearity.

The MLP's result has no name: no gradient needs it.
"""
PRESETS: Mapping[str, tuple[ActivationName, ...]] = {
    "minimal": ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up"),
    "save_dots_except_mlp": ("query", "key", "value", "attention_out"),
    "save_qkv": ("query", "key", "value"),
    "save_attention": ("attention",),
}
"""MaxText's `minimal`, `save_dot_except_mlp` and `save_qkv_proj`, and attention's result alone.

`minimal` keeps the result of every matmul of parameters, but nothing inside attention.
"""


class NamedKeeps(dict[str, Keep]):
    """A mapping of names that does not change: models hold it, and models are hashed."""

    # A dict has None for it, to say that it has no hash.
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))


def _checked(keeps: Mapping[str, Keep]) -> NamedKeeps:
    if keeps.get("block_input") == "recompute":
        raise ValueError(
            "block_input is what a block is computed again from: save it (as is done without "
            "saying so), or offload it"
        )
    return NamedKeeps(keeps)


Keeps = Annotated[dict[ActivationName, Keep], Field(min_length=1), AfterValidator(_checked)]
"""What happens to each of some activations; those that are not named are recomputed."""
Remat = ByKind | Preset | Mapping[Any, Keep]
"""What a block of any kind may be told; the keys of a mapping are names, of its own choice."""
RematConfig = ByKind | Preset | Keeps
"""The same in a config, whose names are those of a transformer's block."""

named: Callable[[jax.Array, ActivationName], jax.Array] = checkpoint_name
"""Gives an activation the name by which a policy keeps it; changes nothing else."""

# Cheap to recompute: XLA fuses them into the loop that reads their operands. Random bits are drawn
# again rather than kept; a name is no operation.
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
"""jax's name of the host's memory that a device reads and writes by itself."""


def recomputed(block: BlockFn, remat: Remat, *, prevent_cse: bool) -> BlockFn:
    """The block with a backward pass that keeps what `remat` says."""
    if remat == "none":
        return block
    return jax.checkpoint(block, policy=_policy(remat), prevent_cse=prevent_cse)


def _policy(remat: Remat) -> Callable[..., Any]:
    keeps = keeps_of(remat)
    if keeps is None:
        assert isinstance(remat, str)
        return _POLICIES[remat]
    saved, offloaded = ([n for n, k in keeps.items() if k == kind] for kind in ("save", "offload"))
    # A name for the input would keep it a second time.
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
    """What happens to each name; None where the policy goes by kind of operation.

    >>> keeps_of("save_attention"), keeps_of("dots")
    ({'attention': 'save'}, None)
    """
    if not isinstance(remat, str):
        return remat
    return dict.fromkeys(PRESETS[remat], "save") if remat in PRESETS else None


def listed(remat: Remat | Sequence[Remat]) -> tuple[Remat, ...]:
    """The policies of a list, or the one policy of all blocks.

    >>> listed("full"), listed(["full", {"query": "save"}])
    (('full',), ('full', {'query': 'save'}))
    """
    return (remat,) if isinstance(remat, str | Mapping) else tuple(remat)


def shown(remat: Remat | Sequence[Remat]) -> str:
    """As one writes it in a config, without the brackets of a list.

    >>> shown(["full", {"query": "save", "key": "offload"}])
    'full, {query: save, key: offload}'
    """
    return ", ".join(
        one if isinstance(one, str) else f"{{{', '.join(f'{n}: {k}' for n, k in one.items())}}}"
        for one in listed(remat)
    )


def offloads(remat: Remat | Sequence[Remat]) -> bool:
    """Whether activations go to the host's memory."""
    return any("offload" in (keeps_of(one) or {}).values() for one in listed(remat))


def check_memory(remat: Remat | Sequence[Remat], memories: Collection[str]) -> None:
    """Refuse to offload where there is nowhere to.

    Args:
      memories: kinds that a device has, as jax names them.

    Raises:
      ConfigError: the host's memory is not among them.
    """
    if offloads(remat) and HOST_MEMORY not in memories:
        raise ConfigError(
            f"remat {shown(remat)} offloads to the host's memory ({HOST_MEMORY}), and these "
            f"devices have only {', '.join(memories)}: save or recompute what it offloads",
            setting=("remat",),
        )


def check_names(
    remat: Remat | Sequence[Remat], block: Callable[..., jax.Array], *args: PyTree
) -> None:
    """Refuse names that a block does not give; it is traced where the policy has any.

    Raises:
      ConfigError: a name that no activation of the block has.
    """
    asked = [name for one in listed(remat) for name in keeps_of(one) or ()]
    if not asked:
        return
    given = list(dict.fromkeys(_names(jax.make_jaxpr(block)(*args))))
    unknown = [name for name in dict.fromkeys(asked) if name not in given]
    if not unknown:
        return
    if not given:
        raise ConfigError(
            f"remat {shown(remat)} keeps activations by name, and the blocks name none: give them "
            "names with jax.ad_checkpoint.checkpoint_name, or use one of "
            f"{', '.join(get_args(ByKind))}"
        )
    raise ConfigError(
        f"remat {shown(remat)}: no activation of the blocks has the name {unknown[0]!r}; "
        f"{did_you_mean(unknown[0], given)}"
    )


def _names(jaxpr: Any) -> Iterator[str]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(part, "jaxpr", part), "eqns"):
                    yield from _names(part)
