"""Layers that the models share.

Dims: B batch, L sequence, D embed, H heads, K kv_heads, d head_dim.

Parameters are created with their logical dims: `Param(value, dims=("embed", "mlp"))`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.errors import ConfigError
from jaxdist.models.ahead import scan_ahead

ComputeDtype = Literal["float32", "bfloat16"]
Initializer = Callable[..., jax.Array]


_LECUN = nnx.initializers.lecun_normal()


class Hint(Protocol):
    """Says how an activation lies on the mesh: takes it with its dims, returns it constrained.

    With `was`, x is moved from how those dims lie; where they lie alike, it is left as it is.
    """

    def __call__(
        self, x: jax.Array, *dims: str | None, was: tuple[str | None, ...] | None = None
    ) -> jax.Array: ...


def no_hint(
    x: jax.Array, *dims: str | None, was: tuple[str | None, ...] | None = None
) -> jax.Array:
    """The hint of a single device."""
    return x


RESIDUAL = ("batch", "residual_seq", "embed")
"""Dims of the stream that blocks add to; its sequence may be split where theirs is whole."""
WITHIN = ("batch", "seq", "embed")
"""Dims of what goes into a block's layers, and of what comes out of them."""


class Deferred(ABC):
    """In a parameter's place, what becomes the parameter where it is used; a pytree."""

    @classmethod
    @abstractmethod
    def whole(cls, several: Sequence[Any]) -> list[jax.Array]:
        """The parameters, of those of this class that are used together."""

    @abstractmethod
    def carried(self) -> jax.Array:
        """Of a gradient of the same form, what is wanted of it."""

    @property
    def ahead(self) -> bool:
        """Whether `scan_blocks` shall make the next layer's whole while a layer computes."""
        return False


def whole(tree: Any) -> Any:
    """The tree with each `Deferred` made the parameter it stands for, all of a kind together."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_deferred)
    for kind in dict.fromkeys(type(leaf) for leaf in leaves if _is_deferred(leaf)):
        mine = [i for i, leaf in enumerate(leaves) if type(leaf) is kind]
        for i, leaf in zip(mine, kind.whole([leaves[i] for i in mine]), strict=True):
            leaves[i] = leaf
    return structure.unflatten(leaves)


def carried(tree: Any) -> Any:
    """The tree of a gradient with each `Deferred` made what it carries."""
    return jax.tree.map(
        lambda leaf: leaf.carried() if _is_deferred(leaf) else leaf, tree, is_leaf=_is_deferred
    )


def _is_deferred(node: Any) -> bool:
    return isinstance(node, Deferred)


def param(
    rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], dims: tuple[str | None, ...]
) -> nnx.Param:
    """A float32 parameter that names its dims."""
    assert len(shape) == len(dims), (shape, dims)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), dims=dims)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [..., D] @ kernel [D, ...]` over flattened rows, in x's dtype.

    Rows are flattened because the kernel's gradient otherwise contracts over two dims, which XLA
    runs at half the speed on CPU.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = rows @ kernel.astype(x.dtype).reshape(kernel.shape[0], -1)
    return out.reshape(*x.shape[:-1], *kernel.shape[1:])


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, size: int, rngs: nnx.Rngs, *, epsilon: float = 1e-6):
        self.scale = param(rngs, nnx.initializers.ones, (size,), ("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """x `[..., D]` to the same shape and dtype."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.epsilon)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * inverse * scale).astype(x.dtype)


class Linear(nnx.Module):
    """x @ kernel + bias with named dims."""

    def __init__(
        self,
        shape: tuple[int, int],
        dims: tuple[str, str],
        rngs: nnx.Rngs,
        *,
        init: Initializer = _LECUN,
    ):
        self.kernel = param(rngs, init, shape, dims)
        self.bias = param(rngs, nnx.initializers.zeros, shape[1:], dims[1:])

    def __call__(self, x: jax.Array) -> jax.Array:
        """x `[..., in]` to `[..., out]`."""
        bias = self.bias[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return matmul(x, self.kernel[...]) + bias


MOST_ANGLES = 2**18
"""Of rotary positions as constants of a program, each of them two float32."""


def rotate(x_BLHd: jax.Array, *, theta: float) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864), halves paired; positions 0..L-1.

    Attention sees only differences of positions, so packed documents need no restart.
    """
    length, half = x_BLHd.shape[1], x_BLHd.shape[-1] // 2
    # XLA would turn each row and head by angles of its own making; constants it reads.
    xp = np if length * half <= MOST_ANGLES else jnp
    frequency = theta ** (-xp.arange(half, dtype=jnp.float32) / half)
    angle = xp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (jnp.asarray(f(angle))[None, :, None, :] for f in (xp.cos, xp.sin))
    first, second = jnp.split(x_BLHd.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLHd.dtype)


def dims_of(variable: nnx.Variable) -> tuple[str | None, ...] | None:
    """The logical dims of a parameter: our `dims`, or flax's own logical sharding metadata."""
    metadata = variable.get_metadata()
    for key in ("dims", "out_sharding", "sharding_names", "sharding"):
        found = metadata.get(key)
        if found is not None:
            return tuple(found)
    return None


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one whose arrays have a leading dim "layers", for `scan_blocks`.

    Args:
      make: a module of any kind; the config's sharding.params names the dims that it does not.
    """
    keys = jax.random.split(rngs.params(), count)
    stacked = jax.vmap(lambda key: nnx.split(make(nnx.Rngs(key)))[1])(keys)
    module = nnx.merge(nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0], stacked)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            dims = dims_of(node)
            node.set_metadata(dims=None if dims is None else ("layers", *dims), scanned=True)
    return module


Remat = Literal["none", "elementwise", "dots", "full"]

# Done again where their operands are read anyway, in the loop that reads them. Random numbers are
# drawn again rather than kept.
_ELEMENTWISE = {
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate",
    "convert_element_type", "copy", "div", "eq", "floor", "ge", "gt", "integer_pow", "iota",
    "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "random_bits",
    "random_unwrap", "reshape", "rev", "round", "select_n", "shift_right_logical", "sign",
    "slice", "split", "square", "squeeze", "stop_gradient", "sub", "transpose", "xor",
}  # fmt: skip


def _not_elementwise(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _ELEMENTWISE


_POLICIES: dict[str, Any] = {
    "elementwise": _not_elementwise,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def scan_blocks(
    stacked: nnx.Module,
    x: jax.Array,
    *operands: Any,
    remat: Remat | Sequence[Remat] = "none",
    unroll: int = 1,
) -> jax.Array:
    """Run a stack of blocks one after another by one compiled loop body.

    Args:
      stacked: from `stack` or `nnx.vmap`; each block maps `(x, *operands)` to a new x.
      remat: what the backward pass recomputes: nothing, cheap operations on single elements, all
        but matmul results, or all; or one of these for each of so many blocks, over and over. A
        list's blocks make one iteration, which holds all of their activations at once.
      unroll: blocks per loop iteration, in whole lists of `remat`; all, where they are fewer.

    Raises:
      ConfigError: parameters are to be fetched ahead, and `remat` is not "full"; a block changes
        its own state.
    """
    graph, state = nnx.split(stacked)
    if _fetches_ahead(state):
        return _scan_ahead(graph, state, x, operands, remat)

    unroll = min(unroll, jax.tree.leaves(state)[0].shape[0])

    def block(x: jax.Array, layer: Any) -> jax.Array:
        return _run(graph, whole(layer), x, operands)

    if not isinstance(remat, str):
        return _scan_lists(block, remat, state, x, unroll)
    # A loop keeps forward and backward apart; where it is unrolled away, CSE would undo remat.
    run = _recomputed(block, remat, prevent_cse=unroll > 1)
    return jax.lax.scan(lambda x, layer: (run(x, layer), None), x, state, unroll=unroll)[0]


def _run(graph: Any, layer: Any, x: jax.Array, operands: tuple[Any, ...]) -> jax.Array:
    """One block, which must leave its own state as it was; counts of random draws may go on."""
    block: Any = nnx.merge(graph, layer)
    given = _kept(block)
    y = block(x, *operands)
    changed = [
        name
        for name, leaves in _kept(block).items()
        if name in given and any(a is not b for a, b in zip(leaves, given[name], strict=True))
    ]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} of a stack of {type(block).__name__} changed while it ran, and "
            "a loop over layers keeps no state: use a norm without running statistics, or keep the "
            "blocks in an nnx.List and run them one by one"
        )
    return y


def _kept(block: nnx.Module) -> dict[str, list[Any]]:
    """The arrays of a block's state, by name; those of random streams are left out."""
    flat = nnx.to_flat_state(nnx.state(block, nnx.Not(nnx.RngState)))
    return {"/".join(map(str, path)): jax.tree.leaves(variable) for path, variable in flat}


def _scan_lists(
    block: Any, policies: Sequence[Remat], state: Any, x: jax.Array, unroll: int
) -> jax.Array:
    """A loop that runs a block for each policy; those too few for a whole list come after it."""
    together = len(policies)
    count = jax.tree.leaves(state)[0].shape[0]
    looped = count - count % together

    def run(x: jax.Array, layers: Any, *, prevent_cse: bool) -> jax.Array:
        for i, policy in zip(range(jax.tree.leaves(layers)[0].shape[0]), policies, strict=False):
            layer = jax.tree.map(operator.itemgetter(i), layers)
            x = _recomputed(block, policy, prevent_cse=prevent_cse)(x, layer)
        return x

    def body(x: jax.Array, layers: Any) -> tuple[jax.Array, None]:
        return run(x, layers, prevent_cse=unroll > 1 or looped == together), None

    lists = jax.tree.map(lambda a: a[:looped].reshape(-1, together, *a.shape[1:]), state)
    x = jax.lax.scan(body, x, lists, unroll=max(1, unroll // together))[0]
    return run(x, jax.tree.map(lambda a: a[looped:], state), prevent_cse=True)


def _recomputed(block: Any, policy: Remat, *, prevent_cse: bool) -> Any:
    if policy == "none":
        return block
    return jax.checkpoint(block, policy=_POLICIES[policy], prevent_cse=prevent_cse)


def _fetches_ahead(state: Any) -> bool:
    leaves = jax.tree.leaves(state, is_leaf=_is_deferred)
    return any(leaf.ahead for leaf in leaves if _is_deferred(leaf))


def _scan_ahead(
    graph: Any, state: Any, x: jax.Array, operands: tuple[Any, ...], remat: Remat | Sequence[Remat]
) -> jax.Array:
    if remat != "full":
        said = remat if isinstance(remat, str) else ", ".join(remat)
        raise ConfigError(
            f"parallel.zero.prefetch keeps the inputs of layers alone and recomputes the rest, and "
            f"model.remat is {said}: set model.remat: full, or parallel.zero.prefetch: false"
        )

    def block(layer: Any, x: jax.Array, *operands: Any) -> jax.Array:
        return _run(graph, layer, x, operands)

    return scan_ahead(block, whole, state, x, operands)


class Stacked(nnx.Module):
    """A model that is `embed`, a stack of `blocks`, `head`: the parts that a pipeline separates.

    Yours gives `embed(*inputs)`, `head(x)` and the attribute `blocks`, from `stack` or `nnx.vmap`,
    each of which maps `(x, *operands)` to a new x. `remat` and `unroll` are as in `scan_blocks`.

    >>> class Model(Stacked):
    ...     def __init__(self, rngs):
    ...         self.blocks = stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 3, rngs)
    ...     def embed(self, x):
    ...         return x + 1
    ...     def head(self, x):
    ...         return x.sum()
    >>> Model(nnx.Rngs(0))(jnp.zeros((2, 4))).shape
    ()
    """

    blocks: nnx.Module
    remat: Remat | Sequence[Remat] = "none"
    unroll: int = 1

    def operands(self, *inputs: Any, **named: Any) -> tuple[Any, ...]:
        """What every block takes besides x, of what the model is called with."""
        del inputs, named
        return ()

    def trunk(self, x: jax.Array, *inputs: Any) -> jax.Array:
        """All blocks, or those of a pipeline's chunk, in turn."""
        more = self.operands(*inputs)
        return scan_blocks(self.blocks, x, *more, remat=self.remat, unroll=self.unroll)

    def __call__(self, *inputs: Any) -> Any:
        """`head(trunk(embed(*inputs), *inputs))`."""
        model: Any = self
        return model.head(self.trunk(model.embed(*inputs), *inputs))
