"""The layers that the models share, and the scan over a stack of layers.

Dims: B batch, L sequence, D embed, H heads, K kv_heads, d head_dim.

Parameters are created with their logical dims: `Param(value, dims=("embed", "mlp"))`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.errors import ConfigError
from jaxdist.models.ahead import BlockFn, scan_ahead
from jaxdist.models.hints import Hint
from jaxdist.models.remat import Remat, check_names, format_policy, listed, recomputed
from jaxdist.types import Grads, Params, PyTree

ComputeDtype = Literal["float32", "bfloat16"]
Initializer = Callable[..., jax.Array]


MERGED = "merged"
"""The name, for policies of `jax.checkpoint`, of parameters that are computed from other
parameters."""
_LECUN = nnx.initializers.lecun_normal()


class Deferred(ABC):
    """A placeholder, as a pytree, for a parameter that is gathered or computed where it is used.

    With ZeRO 3, for example, a placeholder holds a device's shard, and each layer gathers its
    parameters. The gradient with respect to a `Deferred` is a `Deferred` of the same class.
    """

    @classmethod
    @abstractmethod
    def whole(cls, several: Sequence[Any]) -> list[jax.Array]:
        """Return the parameters of several placeholders, gathered together."""

    @abstractmethod
    def carried(self) -> jax.Array:
        """Return the gradient's array, if the placeholder is in a tree of gradients."""

    def differentiated(self) -> PyTree:
        """Return the part of the placeholder with respect to which a loss is differentiated."""
        return self

    def with_differentiated(self, part: PyTree) -> Any:
        """Return the placeholder in which `part` replaces the part that `differentiated` returns.

        If `part` is the gradient with respect to that part, the result is the gradient with respect
        to the placeholder.
        """
        return part

    @property
    def copied(self) -> bool:
        """Whether `scan_blocks` copies the parameters of a layer to the device in each pass."""
        return False

    @property
    def ahead(self) -> bool:
        """Whether `scan_blocks` gathers the next layer's parameters while a layer computes."""
        return False

    @property
    def merges(self) -> bool:
        """Whether the parameter is computed from other parameters.

        The backward pass recomputes such a parameter, instead of keeping it.
        """
        return False


def whole(tree: PyTree) -> Params:
    """Replace each `Deferred` by its parameter; placeholders of one class are gathered together."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_deferred)
    for kind in dict.fromkeys(type(leaf) for leaf in leaves if _is_deferred(leaf)):
        mine = [i for i, leaf in enumerate(leaves) if type(leaf) is kind]
        for i, leaf in zip(mine, kind.whole([leaves[i] for i in mine]), strict=True):
            leaves[i] = leaf
    return structure.unflatten(leaves)


def carried(tree: Grads) -> Grads:
    """Replace each `Deferred` in a tree of gradients by the array of its gradient."""
    return jax.tree.map(
        lambda leaf: leaf.carried() if _is_deferred(leaf) else leaf, tree, is_leaf=_is_deferred
    )


def gradients_of(
    function: Callable[[Params], tuple[jax.Array, Any]], params: Params
) -> tuple[Grads, Any]:
    """Return the gradients of a function of parameters, and the other results of the function.

    Args:
      function: the function, which returns a pair of the scalar to differentiate and any other
        results.
      params: the parameters, of which some may be a `Deferred`.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_deferred)

    def joined(parts: Sequence[PyTree]) -> PyTree:
        return structure.unflatten(
            leaf.with_differentiated(part) if _is_deferred(leaf) else part
            for leaf, part in zip(leaves, parts, strict=True)
        )

    parts = [leaf.differentiated() if _is_deferred(leaf) else leaf for leaf in leaves]
    grads, more = jax.grad(lambda parts: function(joined(parts)), has_aux=True)(parts)
    return carried(joined(grads)), more


def _is_deferred(node: object) -> bool:
    return isinstance(node, Deferred)


def param(
    rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], dims: tuple[str | None, ...]
) -> nnx.Param:
    """Create a float32 parameter with logical dims.

    Args:
      init: a function from (random key, shape, dtype) to the initial value.
    """
    assert len(shape) == len(dims), (shape, dims)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), dims=dims)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply `x [..., D] @ kernel [D, ...]` in x's dtype.

    The rows of x are flattened first. Otherwise the gradient of the kernel would be a product that
    contracts two dims. XLA on CPU takes twice the time for this product.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = rows @ kernel.astype(x.dtype).reshape(kernel.shape[0], -1)
    return out.reshape(*x.shape[:-1], *kernel.shape[1:])


def biased(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """Add a bias to the last dims of y; return y if the bias is None."""
    if bias is None:
        return y
    return y + bias[...].astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


class RMSNorm(nnx.Module):
    """The RMS norm, x / rms(x) * scale, in float32 (Zhang, Sennrich, arXiv 1910.07467)."""

    def __init__(
        self,
        size: int,
        rngs: nnx.Rngs,
        *,
        epsilon: float = 1e-6,
        dim: str = "embed",
        offset: float = 0.0,
    ):
        init = nnx.initializers.constant(1.0 - offset)
        self.scale = param(rngs, init, (size,), (dim,))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize x `[..., D]`, keeping its shape and dtype."""
        # In bfloat16, the mean of the squares would keep only two to three digits.
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.epsilon)
        # The scale gets as many dims as x, since users may set jax_numpy_rank_promotion to "raise".
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.offset:
            scale = scale + self.offset
        return (wide * inverse * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """The layer norm, (x - mean) / deviation * scale + bias, in float32 (Ba, arXiv 1607.06450)."""

    def __init__(self, size: int, rngs: nnx.Rngs, *, epsilon: float = 1e-5, dim: str = "embed"):
        self.scale = param(rngs, nnx.initializers.ones, (size,), (dim,))
        self.bias = param(rngs, nnx.initializers.zeros, (size,), (dim,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize x `[..., D]`, keeping its shape and dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, -1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.epsilon)
        scale, bias = (p[...].reshape((1,) * (x.ndim - 1) + (-1,)) for p in (self.scale, self.bias))
        return (wide * inverse * scale + bias).astype(x.dtype)


class Linear(nnx.Module):
    """A linear layer, x @ kernel + bias, with named dims."""

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
        """Return the layer's outputs `[..., out]` for inputs x `[..., in]`."""
        bias = self.bias[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return matmul(x, self.kernel[...]) + bias


class DenseTower(nnx.Module):
    """Linear layers with ReLU between them.

    For tensor parallelism, layers alternate: a layer that splits its outputs is followed by a layer
    that splits its inputs.
    """

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs, hint: Hint):
        hidden = [("mlp", "embed")[i % 2] for i in range(len(sizes) - 2)]
        names = ["features", *hidden, "classes"]
        init = nnx.initializers.he_normal()
        self.layers = nnx.List(
            Linear((sizes[i], sizes[i + 1]), (names[i], names[i + 1]), rngs, init=init)
            for i in range(len(sizes) - 1)
        )
        self.names, self.hint = tuple(hidden), hint

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs `[B, out]` of the layers for inputs x `[B, in]`."""
        for layer, name in zip(list(self.layers)[:-1], self.names, strict=True):
            x = self.hint(jax.nn.relu(layer(x)), "batch", name)
        return self.layers[-1](x)


def dims_of(variable: nnx.Variable) -> tuple[str | None, ...] | None:
    """Return a parameter's logical dims, or None if the parameter names no dims.

    The dims are the metadata `dims` of the parameter, or else the sharding metadata of flax.
    """
    metadata = variable.get_metadata()
    for key in ("dims", "out_sharding", "sharding_names", "sharding"):
        found = metadata.get(key)
        if found is not None:
            return tuple(found)
    return None


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Make `count` modules, and stack their arrays along a leading dim "layers" for `scan_blocks`.

    Args:
      make: a function that builds a module of any kind. If the module does not name its dims, the
        config can name them in sharding.params.
      count: the number of layers.
    """
    graphs: list[nnx.GraphDef] = []

    def arrays(key: jax.Array) -> nnx.State:
        # `vmap` can return only arrays, so the traced function appends the structure to a list
        # outside.
        graph, state = nnx.split(make(nnx.Rngs(key)))
        graphs.append(graph)
        return state

    stacked = jax.vmap(arrays)(jax.random.split(rngs.params(), count))
    module = nnx.merge(graphs[0], stacked)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            dims = dims_of(node)
            node.set_metadata(dims=None if dims is None else ("layers", *dims), scanned=True)
    return module


def scan_blocks(
    stacked: nnx.Module,
    x: PyTree,
    *operands: PyTree,
    remat: Remat | Sequence[Remat] = "none",
    unroll: int = 1,
) -> Any:
    """Run the blocks of a stack in order, in a compiled loop, and return the last x.

    Args:
      stacked: a module made by `stack` or `nnx.vmap`; each block maps `(x, *operands)` to a new x.
      x: an array, or a pytree of floating-point arrays.
      operands: the arguments of a block after x, which are the same for every block.
      remat: the policy that selects what the backward pass recomputes; see `jaxdist.models.remat`.
        A list has a policy for each of several successive blocks, which form one loop iteration; it
        is repeated over the layers. The activations of an iteration are in memory together.
      unroll: the number of blocks in a loop iteration, at most all blocks. With a list of policies
        the number is rounded down to a multiple of the list's length.

    Raises:
      ConfigError: parameters are fetched ahead and `remat` is not "full"; parameters are copied
        from the host and `remat` would keep the copies; `remat` keeps a name that the blocks do not
        define; a block changes its own state.
    """
    graph, state = nnx.split(stacked)
    deferred = [*filter(_is_deferred, jax.tree.leaves(state, is_leaf=_is_deferred))]
    if any(leaf.ahead for leaf in deferred):
        return _scan_ahead(graph, state, x, operands, remat)

    if any(leaf.copied for leaf in deferred):
        _check_copied(remat, unroll)
    unroll = min(unroll, jax.tree.leaves(state)[0].shape[0])

    def block(x: PyTree, layer: Params) -> Any:
        return _run(graph, whole(layer), x, operands)

    if any(leaf.merges for leaf in deferred):
        # Without this policy, the backward pass would keep the merged kernels of all layers.
        keep = jax.checkpoint_policies.save_anything_except_these_names(MERGED)
        block = jax.checkpoint(block, policy=keep, prevent_cse=unroll > 1)
    check_names(remat, lambda x, state: block(x, _first(state)), x, state)
    policy, *more = listed(remat)
    if more:
        return _scan_lists(block, (policy, *more), state, x, unroll)
    # A loop separates the forward from the backward pass; in an unrolled loop, common
    # subexpression elimination (CSE) would undo remat.
    run = recomputed(block, policy, prevent_cse=unroll > 1)
    return jax.lax.scan(lambda x, layer: (run(x, layer), None), x, state, unroll=unroll)[0]


def _first(state: nnx.State) -> Params:
    return jax.tree.map(operator.itemgetter(0), state)


def _run(graph: nnx.GraphDef, layer: Params, x: PyTree, operands: tuple[PyTree, ...]) -> Any:
    """Run a block, and refuse a block that changed its state (except random streams)."""
    block: Any = nnx.merge(graph, layer)
    given = _kept(block)
    y = block(x, *operands)
    # Values are unknown while the block is traced, but a variable that was set holds another
    # object.
    changed = [
        name
        for name, leaves in _kept(block).items()
        if name in given and any(a is not b for a, b in zip(leaves, given[name], strict=True))
    ]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} of a stack of {type(block).__name__} changed in the forward "
            "pass, but a scan over layers keeps no such state. Use a norm without running "
            "statistics, or keep the blocks in an nnx.List and call them one by one"
        )
    return y


def _kept(block: nnx.Module) -> dict[str, list[jax.Array]]:
    """Return the arrays of a block's state by name, except the arrays of random streams."""
    flat = nnx.to_flat_state(nnx.state(block, nnx.Not(nnx.RngState)))
    return {"/".join(map(str, path)): jax.tree.leaves(variable) for path, variable in flat}


def _scan_lists(
    block: BlockFn, policies: Sequence[Remat], state: nnx.State, x: PyTree, unroll: int
) -> Any:
    """Run a loop with a block per policy in each iteration, and then run the remaining blocks."""
    together = len(policies)
    count = jax.tree.leaves(state)[0].shape[0]
    looped = count - count % together

    def run(x: PyTree, layers: Params, *, prevent_cse: bool) -> Any:
        # After the loop, fewer blocks than policies may remain, and `zip` stops at the last block.
        for i, policy in zip(range(jax.tree.leaves(layers)[0].shape[0]), policies, strict=False):
            layer = jax.tree.map(operator.itemgetter(i), layers)
            x = recomputed(block, policy, prevent_cse=prevent_cse)(x, layer)
        return x

    def body(x: PyTree, layers: Params) -> tuple[Any, None]:
        # XLA removes a loop of a single iteration. Outside of a loop, XLA's common subexpression
        # elimination would undo remat.
        return run(x, layers, prevent_cse=unroll > 1 or looped == together), None

    lists = jax.tree.map(lambda a: a[:looped].reshape(-1, together, *a.shape[1:]), state)
    x = jax.lax.scan(body, x, lists, unroll=max(1, unroll // together))[0]
    # The remaining blocks are outside of the loop, where XLA's common subexpression elimination
    # would undo remat.
    return run(x, jax.tree.map(lambda a: a[looped:], state), prevent_cse=True)


def _check_copied(remat: Remat | Sequence[Remat], unroll: int) -> None:
    policies = listed(remat)
    if unroll > 1:
        keeps, instead = f"model.scan_unroll {unroll}", "set model.scan_unroll: 1"
    elif len(policies) > 1 or any(one in ("none", "elementwise") for one in policies):
        keeps, instead = f"model.remat {format_policy(remat)}", "set model.remat: full"
    else:
        return
    raise ConfigError(
        "parallel.zero.offload_parameters copies one layer at a time from the host's memory, but "
        f"{keeps} has several layers on the device at once: {instead}, or choose parameters "
        "outside of the blocks"
    )


def _scan_ahead(
    graph: nnx.GraphDef,
    state: nnx.State,
    x: PyTree,
    operands: tuple[PyTree, ...],
    remat: Remat | Sequence[Remat],
) -> Any:
    if remat != "full":
        raise ConfigError(
            "parallel.zero.prefetch saves only the inputs of layers and recomputes the rest, "
            f"but model.remat is {format_policy(remat)}: set model.remat: full, or "
            "parallel.zero.prefetch: false"
        )

    def block(layer: Params, x: PyTree, *operands: PyTree) -> Any:
        return _run(graph, layer, x, operands)

    return scan_ahead(block, whole, state, x, operands)


class Stacked(nnx.Module):
    """A model of three parts, which a pipeline separates: `embed`, a stack `blocks`, and `head`.

    A subclass has `embed(*inputs)`, `head(x)` and the attribute `blocks`, made by `stack` or
    `nnx.vmap`; each block maps `(x, *operands)` to a new x. `remat` and `unroll` are passed to
    `scan_blocks`.

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

    def operands(self, *inputs: PyTree, **named: PyTree) -> tuple[PyTree, ...]:
        """Return the arguments of every block after x, computed from the model's inputs."""
        del inputs, named
        return ()

    def trunk(self, x: jax.Array, *inputs: PyTree) -> jax.Array:
        """Run all blocks of this module in order; in a pipeline, these are the blocks of a chunk.

        Args:
          x: the result of `embed`.
          inputs: the inputs of the model, from which `operands` are computed.
        """
        more = self.operands(*inputs)
        return scan_blocks(self.blocks, x, *more, remat=self.remat, unroll=self.unroll)

    def hidden(self, *inputs: PyTree) -> jax.Array:
        """Return the input of the head: `trunk(embed(*inputs), *inputs)`."""
        model: Any = self
        return self.trunk(model.embed(*inputs), *inputs)

    def __call__(self, *inputs: PyTree) -> PyTree:
        """Return `head(hidden(*inputs))`."""
        model: Any = self
        return model.head(self.hidden(*inputs))
