"""Layouts: a mesh with the rules that map logical dims to mesh axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pydantic import Field, field_validator

from jaxdist.config.schema import Config
from jaxdist.cost.context import Order, SequenceSplit, Way
from jaxdist.errors import ShardingError, did_you_mean
from jaxdist.hlo.source.marks import gives, takes
from jaxdist.mesh import AXES, MeshAxis, axis_names, mesh_axis_size
from jaxdist.sharding.collective_matmul import AxisRing
from jaxdist.sharding.experts import (
    EXCHANGES,
    ExchangeName,
    Place,
    choose_exchange,
    most_sent,
)
from jaxdist.trees import flatten_with_names, pattern_of
from jaxdist.types import Dims, Params, PyTree

DEFAULT_RULES: Mapping[str, str | None] = {
    "batch": "data",
    "seq": "context",
    "residual_seq": "context",
    "layers": "stage",
    "features": None,
    "embed": None,
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "vocab": "tensor",
    "channels_in": None,
    "channels_out": "tensor",
    "window": None,
    "classes": None,
    "rows": None,
    "experts": "expert",
}
"""The mesh axis of each logical dim, or None if the dim is not split. The rules in a config's
`sharding.rules` override these rules."""

CONTEXT = MeshAxis.CONTEXT.value
ELLIPSIS = "..."
"""The placeholder for any number of dims that are never split, in the dims of a pattern."""


class ShardingConfig(Config):
    """The mapping of the model's logical dims to mesh axes."""

    rules: dict[str, str | None] = Field(default_factory=dict)
    """The mesh axis of each logical dim, or null if the dim is not split. These rules override the
    default rules. A rule for a dim that no parameter or activation has is an error."""
    params: dict[str, Literal["whole"] | list[str | None]] = Field(default_factory=dict)
    """The dims of parameters for which the model does not name dims, by pattern of names. In a
    pattern such as `blocks/*/kernel`, `*` matches any text, including `/`. The first pattern in the
    order of the file that matches a name is used. A dim `null` is never split, and `...` represents
    any number of such dims, as in `[..., mlp]`. `whole` means that no dim is split. For stacked
    layers, a pattern names the dims of a single layer."""

    collective_matmul: bool = False
    """Whether MLPs (gpt) send chunks of the sequence around the axis of `residual_seq` during their
    matmuls, instead of a gather before the matmuls and a reduction after them."""
    experts: ExchangeName = "auto"
    """The exchange of tokens between devices that have different experts: padded (all-to-all of
    buffers for the worst case), ring (all-gather of all tokens, and reduce-scatter of the results),
    ragged (all-to-all of only the rows with tokens, not on CPU), or auto (the exchange that sends
    the fewest bytes)."""
    context: Way | Literal["auto"] = "auto"
    """The method by which the devices of mesh axis `context` share the attention of a sequence.
    With gather, each device gathers all keys and values. With ring, keys and values rotate. With
    ulysses, devices exchange chunks of the sequence for heads. ring_ulysses and gather_ulysses use
    ulysses in groups of devices, and ring or gather between groups. auto takes the method that
    sends the fewest bytes; on TPU, auto prefers the other methods to ring, for which jaxdist has no
    kernel."""
    context_order: Order | Literal["auto"] = "auto"
    """The order of the positions of a training batch over the devices of axis `context`:
    contiguous, zigzag (each device has an early and a late chunk), striped (each device has every
    n-th position), or auto. With causal attention, zigzag and striped give all devices equal work,
    and auto chooses zigzag or striped if possible."""

    @field_validator("rules")
    @classmethod
    def _known_axes(cls, rules: dict[str, str | None]) -> dict[str, str | None]:
        for dim, axis in rules.items():
            if axis is not None and axis not in AXES:
                raise ValueError(
                    f"rule {dim}: {axis} names no mesh axis: {did_you_mean(axis, AXES)}"
                )
        return rules

    @field_validator("params")
    @classmethod
    def _one_ellipsis(cls, params: dict[str, Any]) -> dict[str, Any]:
        for pattern, dims in params.items():
            if dims.count(ELLIPSIS) > 1:
                raise ValueError(
                    f"pattern {pattern}: {dims} has {ELLIPSIS} more than once: write it once"
                )
        return params


@dataclass(frozen=True)
class Layout:
    """A mesh with the rules that map logical dims to mesh axes.

    The call `layout(x, *dims)` constrains an activation inside a jitted function. A layout is
    hashable, so that a model that is an argument of `jax.jit` may contain it.

    Attributes:
      mesh: the mesh of devices.
      rules: the pairs of a logical dim and a mesh axis or None.
      collective_matmul: the setting of `ShardingConfig` with the same name.
      experts: the setting of `ShardingConfig` with the same name.
      shared: the method by which the devices of axis `context` share a sequence, or None if no
        method is chosen yet or no axis splits sequences.
    """

    mesh: Mesh
    rules: tuple[tuple[str, str | None], ...] = field(default=tuple(DEFAULT_RULES.items()))
    collective_matmul: bool = False
    experts: ExchangeName = "auto"
    shared: SequenceSplit | None = None

    def axis_of(self, dim: str | None) -> str | None:
        """Return the axis to which a rule maps a logical dim, or None if the dim is not split.

        The mesh may lack this axis. For the dim None the result is None.

        Raises:
          ShardingError: no rule names the dim.
        """
        if dim is None:
            return None
        rules = dict(self.rules)
        if dim not in rules:
            raise ShardingError(
                f"no sharding rule for dim {dim!r}: {did_you_mean(dim, [*rules])}; "
                f"add sharding.rules.{dim}: <mesh axis or null>"
            )
        return rules[dim]

    def spec(self, dims: Sequence[str | None]) -> PartitionSpec:
        """Return the partition spec of a tensor with these logical dims.

        If the tensor has a dim of experts, the axis of experts splits no other dim of the tensor.
        """
        taken = self.names_of("experts") if "experts" in dims else ()
        entries: list[Any] = []
        for dim in dims:
            names = self.names_of(dim)
            if taken and dim != "experts":
                names = tuple(name for name in names if name not in taken)
            entries.append(names[0] if len(names) == 1 else (names or None))
        return PartitionSpec(*entries)

    def names_of(self, dim: str | None) -> tuple[str, ...]:
        """Return the names of the mesh axes that split a logical dim.

        The axis across the slowest network comes first.

        An axis that is split over two networks has two names. Axis expert also splits the batch:
        it further divides each part that the axis of the batch makes, because devices that have
        different experts have different tokens. The axis of `seq` splits the dim `residual_seq`
        too.
        """
        axis = self.axis_of(dim)
        names = axis_names(self.mesh, axis) if axis is not None else ()
        # If context parallelism and sequence parallelism are combined, the axis of `seq` splits the
        # sequence into parts, and the axis of `residual_seq` splits each part further.
        if dim == "residual_seq" and (seq := self.axis_of("seq")) not in (None, axis):
            names = *axis_names(self.mesh, seq), *names
        if dim == "batch" and axis not in (None, MeshAxis.EXPERT):
            names += axis_names(self.mesh, MeshAxis.EXPERT)
        return names

    def sharding(self, dims: Sequence[str | None]) -> NamedSharding:
        """Return the sharding of a tensor with these logical dims."""
        return NamedSharding(self.mesh, self.spec(dims))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of a value that has a replica on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes of the rule for the batch, without the axis that also splits experts."""
        axis = self.axis_of("batch")
        return axis_names(self.mesh, axis) if axis else ()

    @property
    def data_size(self) -> int:
        """The number of parts into which the batch is split."""
        return self.parts("batch")

    def parts(self, dim: str | None) -> int:
        """Return the number of parts into which the mesh splits a logical dim."""
        return self._size(self.names_of(dim))

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the names of the mesh axes that split a logical dim, or () if it is not split."""
        return self.names_of(dim) if self.parts(dim) > 1 else ()

    @property
    def split(self) -> SequenceSplit | None:
        """The method by which the devices of axis `context` share a sequence.

        The value is `shared`, unless `shared` is None. In that case the value is a default method,
        or None if the axis does not split sequences.
        """
        if self.shared is not None or self.axis_of("seq") != CONTEXT or self.parts("seq") == 1:
            return self.shared
        return SequenceSplit(axis_names(self.mesh, CONTEXT), self.parts("seq"))

    @property
    def ring(self) -> AxisRing | None:
        """The ring for collective matmuls, or None if matmuls do not overlap with collectives."""
        axis = self.axis_of("residual_seq") if self.collective_matmul else None
        return AxisRing(axis) if axis and mesh_axis_size(self.mesh, axis) > 1 else None

    def __call__(self, x: jax.Array, *dims: str | None, was: Dims | None = None) -> jax.Array:
        """Constrain the sharding of an activation, inside a jitted function.

        If several dims are mapped to the same axis, the axis splits only the first of these dims.
        Inside a `jax.shard_map` manual axes are ignored, because `x` is then a single device's
        part.

        Args:
          x: the activation to constrain.
          dims: the logical dims of `x`.
          was: the logical dims that determined the sharding of `x` before this call, or None to
            ignore that sharding. With `was`, `x` is first constrained to the old sharding, so that
            the gradient of `x` gets the old sharding. If the old and the new sharding are equal,
            `x` is returned unchanged.

        Raises:
          ShardingError: the number of dims of `x` differs from the number of names, or the number
            of parts of a dim other than the batch does not divide its length.
        """
        if len(dims) != x.ndim:
            shown = f"activation {x.shape} has {x.ndim} dims"
            raise ShardingError(f"{shown}, but {len(dims)} are named: {dims}")
        if was is not None:
            if self.spec(was) == self.spec(dims):
                return x
            x = self(x, *was)
        mesh = jax.sharding.get_abstract_mesh()
        entries = self._entries(x, dims, mesh.manual_axes)
        if mesh.manual_axes and was is None and not any(entries):
            return x
        inside = mesh if mesh.manual_axes else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(inside, PartitionSpec(*entries)))

    def _entries(
        self, x: jax.Array, dims: Dims, manual: Iterable[str]
    ) -> list[tuple[str, ...] | None]:
        """Return the auto axes that split each dim of an activation, or None for an unsplit dim."""
        taken = set(manual)
        entries: list[tuple[str, ...] | None] = []
        for dim, length, entry in zip(dims, x.shape, self.spec(dims), strict=True):
            names = entry if isinstance(entry, tuple) else (entry,)
            free = tuple(name for name in names if name is not None and name not in taken)
            taken.update(free)
            entries.append(free or None)
            parts = self._size(free)
            # XLA may pad the rows of a batch. For every other dim, padding is an error, because it
            # would waste work and bytes.
            if dim != "batch" and length % parts:
                shown = f"activation {dims} {x.shape}"
                raise ShardingError(_indivisible(shown, dim, length, self.axis_of(dim), parts))
        return entries

    def _size(self, axes: Iterable[str] | None) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes or ())

    def on_blocks(
        self,
        function: Callable[..., jax.Array],
        *dims: Dims,
        axes: Sequence[str] | None = None,
    ) -> Callable[..., jax.Array]:
        """Return a function that calls `function` on each device's blocks of arrays.

        Without `axes`, the function runs in a `jax.shard_map` over all axes that are not manual
        already. Axes that split no dim are manual too, because XLA would have to partition the
        function over every axis that is not manual. The result has the sharding of the first array.
        If the number of rows of a batch is not a multiple of its number of parts, the rows are
        replicated.

        Args:
          function: the function of the blocks.
          dims: the logical dims of each array.
          axes: the axes to make manual, so that XLA partitions the function over the other axes, or
            None to make all axes manual.
        """

        def run(*arrays: jax.Array) -> jax.Array:
            mesh = jax.sharding.get_abstract_mesh()
            free = {*(axes or self.mesh.axis_names)} - {*mesh.manual_axes}
            if not free or self.mesh.size == 1:
                return function(*arrays)
            others = {*self.mesh.axis_names} - free
            specs = [self._block(x, of, others) for x, of in zip(arrays, dims, strict=True)]
            # Inside another `jax.shard_map`, jax takes the mesh from the context.
            return jax.shard_map(
                function,
                mesh=None if mesh.manual_axes else self.mesh,
                axis_names=free,
                in_specs=tuple(specs),
                out_specs=specs[0],
                check_vma=False,
            )(*arrays)

        return run

    def over_experts(
        self,
        compute: Callable[..., jax.Array],
        x_BLD: jax.Array,
        ids_BLk: jax.Array,
        weights_BLk: jax.Array,
        *kernels: tuple[Dims, jax.Array],
        capacity: int | None,
    ) -> jax.Array:
        """Return the weighted sums of the experts' results for each token.

        Each device computes the experts that it has. The method implements the method of
        `jaxdist.models.hints.Hint` with the same name. Another axis may split the hidden width of
        the kernels; the results are then summed over that axis.

        Args:
          compute: the function that computes a device's experts. Its arguments are the three
            arguments of a `jaxdist.sharding.experts.Local`, and the device's kernels.
          x_BLD: the tokens.
          ids_BLk: the indices of each token's experts.
          weights_BLk: the weights of each token's experts.
          kernels: the logical dims of each kernel, and the kernel.
          capacity: the maximum number of tokens of a sequence for each expert, or None without a
            limit.
        """
        axes = self.names_of("experts")
        inside, tensor = self._size(axes), self.names_of("mlp")
        tensor = tensor if self._size(tensor) > 1 else ()
        platform = self.mesh.devices.flat[0].platform
        of_tokens: dict[str, int | None] = {
            axis: dim for dim, of in enumerate(("batch", "seq")) for axis in self.axes(of)
        }
        of_kernels = {axis: 0 if axis in axes else None for axis in of_tokens}

        def run(x_blD: jax.Array, *arrays: jax.Array) -> jax.Array:
            given = (takes(x, of_tokens) for x in (x_blD, *arrays[:2]))
            x_TD, ids_Tk, weights_Tk = (x.reshape(-1, x.shape[-1]) for x in given)
            own = [takes(kernel, of_kernels) for kernel in arrays[2:]]

            def local(*tokens: jax.Array) -> jax.Array:
                return compute(*tokens, *own)

            tokens, here = len(x_TD), own[0].shape[0]
            if inside == 1:
                y_TD = local(x_TD, ids_Tk, weights_Tk)
            else:
                most = most_sent(tokens, len(x_blD), capacity, here)
                given = self.experts, tokens, most, inside, ids_Tk.shape[1], platform
                exchange = EXCHANGES[choose_exchange(*given)]
                y_TD = exchange(Place(axes, here, most), local, x_TD, ids_Tk, weights_Tk)
            y_blD = gives(y_TD.reshape(x_blD.shape), of_tokens)
            return jax.lax.psum(y_blD, tensor) if tensor else y_blD

        # Every device needs whole features of the tokens and of the kernels, even if a rule splits
        # the parameters along their features.
        tokens = ("batch", "seq", None)
        split = (tuple(d if d in ("experts", "mlp") else None for d in of) for of, _ in kernels)
        dims = tokens, tokens, tokens, *split
        on_blocks = self.on_blocks(run, *dims)
        return on_blocks(x_BLD, ids_BLk, weights_BLk, *(kernel for _, kernel in kernels))

    def _block(self, x: jax.Array, dims: Dims, manual: Iterable[str]) -> PartitionSpec:
        entries = self._entries(x, dims, manual)
        sizes = zip(x.shape, entries, strict=True)
        return PartitionSpec(*(e if n % self._size(e) == 0 else None for n, e in sizes))

    def problem(self, name: str, shape: Sequence[int], dims: Dims, count: int = 1) -> str | None:
        """Return why a parameter with these logical dims cannot be sharded, or None if it can.

        Args:
          name: the name of the parameter, or the pattern of the names of several parameters.
          shape: the shape of the parameter.
          dims: the logical dims of the parameter.
          count: the number of parameters with this pattern, shape and dims.
        """
        shown = f"parameter {name} {tuple(shape)}" + (f", {count} of them" if count > 1 else "")
        if len(dims) != len(shape):
            return f"{shown} has {len(shape)} dims, but {len(dims)} are named: {dims}"
        taken: dict[str, str] = {}
        for dim, length in zip(dims, shape, strict=True):
            try:
                axis = self.axis_of(dim)
            except ShardingError as error:
                return f"{shown}: {error}"
            parts = self.parts(dim)
            if axis is None or parts == 1:
                continue
            if taken.get(axis) == "experts":
                continue  # `spec` has no entry for this dim, so no axis splits the dim.
            if axis in taken:
                return (
                    f"{shown}: dims {taken[axis]!r} and {dim!r} are both mapped to mesh axis "
                    f"{axis!r}; set sharding.rules.{dim}: null"
                )
            taken[axis] = str(dim)
            if length % parts:
                return _indivisible(shown, dim, length, axis, parts)
        return None


def _indivisible(shown: str, dim: str | None, length: int, axis: str | None, parts: int) -> str:
    divisors = (size for size in range(1, 2 * parts) if length % size == 0)
    near = sorted(sorted(divisors, key=lambda size: abs(size - parts))[:3])
    return (
        f"{shown}: dim {dim!r} of length {length} does not divide over mesh axis {axis!r} of size "
        f"{parts} (remainder {length % parts}); use a size of {axis!r} that divides {length} "
        f"({', '.join(map(str, near))}), or set sharding.rules.{dim}: null"
    )


def make_layout(config: ShardingConfig, mesh: Mesh) -> Layout:
    """Return the layout of a mesh with the default rules and the rules of a config.

    Raises:
      ShardingError: the config requests collective matmuls, but no single mesh axis can be their
        ring; or the axis of the experts does not split the batch.
    """
    rules = {**DEFAULT_RULES, **config.rules}
    axis = rules["residual_seq"]
    shown = axis if axis is not None and axis_names(mesh, axis) else "none"
    if config.collective_matmul and (axis is None or rules["mlp"] != axis):
        raise ShardingError(
            "sharding.collective_matmul needs the dims residual_seq and mlp on the same mesh "
            f"axis, but residual_seq is mapped to {shown}, and mlp to {rules['mlp'] or 'none'}: "
            "set sharding.rules: {residual_seq: tensor}, or sharding.collective_matmul: false"
        )
    if config.collective_matmul and axis is not None and len(axis_names(mesh, axis)) > 1:
        raise ShardingError(
            "sharding.collective_matmul needs a ring of devices in a single network, but axis "
            f"{axis} spans two networks: set mesh.{axis} to a single size, or set "
            "sharding.collective_matmul: false"
        )
    layout = Layout(mesh, tuple(rules.items()), config.collective_matmul, config.experts)
    if not {*layout.names_of("experts")} <= {*layout.names_of("batch")}:
        raise ShardingError(
            f"sharding.rules.experts: {rules['experts']} splits experts among devices with the "
            "same tokens: set sharding.rules.experts: expert, an axis that also splits the batch"
        )
    return layout


def param_shardings(layout: Layout, params: Params, dims: Mapping[str, Dims]) -> PyTree:
    """Return the sharding of each parameter, a tree like the parameters.

    Args:
      layout: the mesh, and the rules for logical dims.
      params: the parameters, or their shapes.
      dims: the logical dims of each parameter, by name.

    Raises:
      ShardingError: some parameters cannot be sharded. The message has a line for each group of
        parameters with the same pattern of names, shape and dims.
    """
    named = flatten_with_names(params)
    alike: dict[tuple[str, tuple[int, ...], Dims], list[str]] = {}
    for name, leaf in named:
        alike.setdefault((pattern_of(name), leaf.shape, dims[name]), []).append(name)
    problems = [
        layout.problem(names[0] if len(names) == 1 else pattern, shape, found, len(names))
        for (pattern, shape, found), names in alike.items()
    ]
    if any(problems):
        raise ShardingError("\n".join(p for p in problems if p))
    return jax.tree.unflatten(
        jax.tree.structure(params), [layout.sharding(dims[name]) for name, _ in named]
    )
