"""ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): what each data-parallel replica need not keep.

Replicas hold equal optimizer states, gradients and parameters. Stage 1 splits the optimizer state
over them, stage 2 the gradients too, stage 3 the parameters too. Which dim of a tensor is split is
decided here, from shapes alone; the rest of the framework only ever sees partition specs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.mesh import ICI, axis_names
from jaxdist.sharding import Dims, Layout
from jaxdist.trees import flatten_with_names

Stage = Literal[0, 1, 2, 3]


class ZeroConfig(Config):
    """Splitting of the training state over the devices that share the batch."""

    stage: Stage = 0
    """0 keeps all of it everywhere; 1 splits optimizer state, 2 gradients, 3 parameters as well."""
    scope: Literal["all", "ici"] = "all"
    """Over the whole data axis, or inside its fast network only, copied across the slow one."""
    whole_below: Annotated[int, Field(ge=0)] = 2048
    """Tensors of fewer elements stay whole: split, they save little and cost a message each."""
    gather_dtype: Literal["bfloat16"] | None = None
    """Dtype in which stage 3 gathers parameters and the model sees them; null is their own."""
    prefetch: bool = False
    """Stage 3 gathers a layer while the one before computes: one more layer is held."""


@dataclass(frozen=True)
class Zero:
    """Where each parameter's state is split.

    Attributes:
      axes: mesh axes over which it is, slowest first.
      dims: by name, the dim of each parameter that is split; None stays whole.
      gather_dtype: of gathered parameters; None is their own.
      prefetch: whether a layer is gathered while the one before computes.
      uneven: shapes of larger parameters that stay whole, by name, since no dim divides.
    """

    mesh: Mesh
    stage: Stage
    axes: tuple[str, ...]
    dims: Mapping[str, int | None]
    gather_dtype: str | None = None
    prefetch: bool = False
    uneven: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def dims_of(self, tree: Any) -> list[int | None]:
        """The split dim of each leaf of a tree like the parameters, in order."""
        return [self.dims[name] for name, _ in flatten_with_names(tree)]

    def map(self, function: Callable[[Any, int | None], Any], tree: Any) -> Any:
        """A tree like the parameters with each leaf `function` of it and of its split dim."""
        leaves, structure = jax.tree.flatten(tree)
        found = [function(*pair) for pair in zip(leaves, self.dims_of(tree), strict=True)]
        return jax.tree.unflatten(structure, found)

    def specs(self, specs: Any) -> Any:
        """A tree of the parameters' specs with each one's dim split over `axes` too."""
        return self.map(self._split, specs)

    def shardings(self, shardings: Any) -> Any:
        """The same of shardings."""

        def split(sharding: NamedSharding, dim: int | None) -> NamedSharding:
            return NamedSharding(self.mesh, self._split(sharding.spec, dim))

        return self.map(split, shardings)

    def _split(self, spec: PartitionSpec, dim: int | None) -> PartitionSpec:
        if dim is None:
            return spec
        entries = [_names(entry) for entry in spec]
        entries += [()] * (dim + 1 - len(entries))
        entries[dim] = (*entries[dim], *self.axes)
        return PartitionSpec(*(_entry(names) for names in entries))


def plan_zero(
    config: ZeroConfig, layout: Layout, params: Any, dims: Mapping[str, Dims]
) -> Zero | None:
    """What the config's stage splits, and along which dims; None for stage 0.

    Args:
      params: the parameters, or their shapes.
      dims: logical dims of each parameter, by name.

    Raises:
      ConfigError: there is no data axis, or none of two networks for scope ici; a rule already
        splits a parameter over it.
    """
    if config.stage == 0:
        return None
    axes = _axes(config, layout)
    parts = math.prod(layout.mesh.shape[axis] for axis in axes)
    chosen: dict[str, int | None] = {}
    uneven: dict[str, tuple[int, ...]] = {}
    for name, leaf in flatten_with_names(params):
        spec = layout.spec(dims[name])
        taken = {axis for entry in spec for axis in _names(entry)}
        if taken & set(axes):
            raise ConfigError(
                f"zero: a sharding rule already splits parameter {name} {tuple(leaf.shape)} as "
                f"{spec} over {', '.join(axes)}; take the rule back (sharding.rules) or set "
                "zero.stage: 0"
            )
        small = math.prod(leaf.shape) < config.whole_below
        chosen[name] = None if small else split_dim(leaf.shape, dims[name], spec, layout, parts)
        if chosen[name] is None and not small:
            uneven[name] = tuple(leaf.shape)
    return Zero(
        layout.mesh, config.stage, axes, chosen, config.gather_dtype, config.prefetch, uneven
    )


def split_dim(
    shape: Sequence[int], dims: Dims, spec: PartitionSpec, layout: Layout, parts: int
) -> int | None:
    """The dim to split into `parts`: the longest that divides, rather one that is still whole.

    The dim of stacked layers comes last: a layer's parameters are gathered one layer at a time,
    and so each device must hold a part of every layer.
    """

    def preference(dim: int) -> tuple[bool, bool, int, int]:
        return dims[dim] != "layers", not _names(entries[dim]), local[dim], -dim

    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    local = [
        length // math.prod(layout.mesh.shape[axis] for axis in _names(entry))
        for length, entry in zip(shape, entries, strict=True)
    ]
    fitting = [dim for dim in range(len(shape)) if local[dim] and local[dim] % parts == 0]
    return max(fitting, key=preference, default=None)


def _axes(config: ZeroConfig, layout: Layout) -> tuple[str, ...]:
    axis = layout.axis_of("batch")
    names = axis_names(layout.mesh, axis) if axis else ()
    mesh = dict(layout.mesh.shape)
    if not names:
        raise ConfigError(
            f"zero.stage {config.stage} splits the training state over the axis of the batch, and "
            f"the mesh {mesh} has none; set mesh.data, or zero.stage: 0"
        )
    if config.scope == "all":
        return names
    fast = tuple(name for name in names if name.endswith(ICI))
    if not fast:
        raise ConfigError(
            f"zero.scope: ici needs a data axis over two networks, and the mesh is {mesh}; set "
            "mesh.data: {dcn: D, ici: I}, or zero.scope: all"
        )
    return fast


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a partition spec."""
    return entry if isinstance(entry, tuple) else (() if entry is None else (entry,))


def _entry(names: tuple[str, ...]) -> Any:
    return names[0] if len(names) == 1 else (names or None)
