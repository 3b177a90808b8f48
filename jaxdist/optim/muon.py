"""Muon for matrices, and AdamW for all other parameters.

The source of Muon is Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from pydantic import NonNegativeFloat, PositiveFloat

from jaxdist.config.schema import Config, Count
from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.optim.common import Beta, NamedParams, OptimizerConfig, decay_mask
from jaxdist.optim.layers import StepCount, wide_zeros
from jaxdist.optim.matrices import Matrices, MatrixExchange, matrices_in, plan_matrices
from jaxdist.trees import flatten_with_names, map_with_names
from jaxdist.types import Masks, OptState, Params, Updates

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of the polynomial of a Newton-Schulz step. The polynomial is steep at 0, so that
few steps suffice; the final singular values are between about 0.7 and 1.2 instead of 1."""
UPDATE_RMS = 0.2
"""The usual root mean square of AdamW's updates (Liu et al. 2025, arXiv 2502.16982, section
2.2)."""
ENDS = ("vocab", "classes")
"""The dims that only embeddings and output heads have. AdamW updates parameters with such a dim."""
BATCH = 2**24
"""The largest number of elements that are orthogonalized together. If the matrices have more
elements, they are orthogonalized in several batches, one after another."""

Scale = Literal["match_rms", "spectral"]


def newton_schulz(matrices: jax.Array, steps: int = 5, *, eps: float = 1e-8) -> jax.Array:
    """Replace the singular values of each matrix of `[K, m, n]` by values near 1.

    First X <- X / (||X||_F + eps). Then, `steps` times, A = X X^T and X <- a X + (b A + c A^2) X.
    `COEFFICIENTS` has a, b and c. If m > n, the transposed matrix is used instead, for which X X^T
    is smaller. The function `newton_schulz_flops` returns the cost.

    >>> found = newton_schulz(jnp.array([[[3.0, 0.0], [0.0, -0.5]]]))[0]
    >>> [round(float(x), 2) for x in (found[0, 0], found[1, 1])]
    [0.71, -1.04]
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def newton_schulz_flops(size: tuple[int, int], steps: int = 5) -> float:
    """Return the FLOPs of `newton_schulz` on a matrix of `size` rows and columns.

    With m the shorter side and n the longer side, the number is steps (4 m^2 n + 2 m^3).

    >>> newton_schulz_flops((2, 3), steps=1)
    64.0
    """
    m, n = sorted(size)
    return float(steps * (4 * m * m * n + 2 * m**3))


class MuonState(NamedTuple):
    """The number of steps, and the momentum of each matrix, float32 or wider."""

    count: StepCount
    mu: Updates


@dataclass(frozen=True)
class Orthogonalized:
    """Muon without weight decay and learning rate: the orthogonalized momentum of matrices.

    With the gradient g and the decay b, the momentum is m <- b m + (1 - b) g, and the update is
    scale newton_schulz(m). With Nesterov's momentum, b m / (1 - b^(t + 1)) + (1 - b) g / (1 - b^t)
    replaces m in the update of step t, as in `optax.contrib.muon`.

    Attributes:
      matrices: the matrices in each parameter, by the parameter's name.
      exchange: the exchange of the matrices between devices; the parameters are in the same order
        as in `matrices`.
      config: the settings.
    """

    matrices: Mapping[str, Matrices]
    exchange: MatrixExchange
    config: MuonConfig

    def init(self, params: Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(wide_zeros, params))

    def update(
        self, updates: Updates, state: OptState, params: Params = None
    ) -> tuple[Updates, MuonState]:
        b, count = self.config.momentum, optax.safe_increment(state.count)
        # The momentum is float32 or wider, because a sum in bfloat16 would lose small gradients.
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, state.mu)
        mu = jax.tree.map(lambda m, g: b * m + (1 - b) * g, state.mu, grads)
        ahead = mu
        if self.config.nesterov:
            one = optax.tree.bias_correction(mu, b, optax.safe_increment(count))
            two = optax.tree.bias_correction(grads, b, count)
            ahead = jax.tree.map(lambda m, g: b * m + (1 - b) * g, one, two)
        named, structure = flatten_with_names(ahead), jax.tree.structure(ahead)
        with jax.named_scope("newton_schulz"):
            found = self.exchange.apply(self._rule, [x for _, x in named])
        scaled = [x * self._factor(name) for (name, _), x in zip(named, found, strict=True)]
        moves = jax.tree.map(lambda x, g: x.astype(g.dtype), structure.unflatten(scaled), updates)
        return moves, MuonState(count, mu)

    def _rule(self, matrices: jax.Array) -> jax.Array:
        """Apply `newton_schulz` to batches of matrices, so that the temporaries remain small."""
        at_once = max(1, BATCH // math.prod(matrices.shape[1:]))
        rule = partial(newton_schulz, steps=self.config.ns_steps, eps=self.config.eps)
        if len(matrices) <= at_once:
            return rule(matrices)
        # `lax.map` passes a single matrix, but `newton_schulz` expects a stack of matrices.
        return jax.lax.map(lambda x: rule(x[None])[0], matrices, batch_size=at_once)

    def _factor(self, name: str) -> float:
        rows, columns = self.matrices[name].size
        if self.config.scale == "match_rms":
            return UPDATE_RMS * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, columns / rows))


class MuonAdamW(Config):
    """The settings of AdamW, which updates vectors, embeddings and output heads."""

    params: tuple[str, ...] = ()
    """The patterns for the names of parameters that AdamW updates although they are matrices, for
    example an output head whose dims have no names."""
    rate: PositiveFloat = 1.0
    """The factor on the learning rate of the parameters that AdamW updates."""
    b1: Beta = 0.9
    """The decay of the first moment, which is the running mean of gradients."""
    b2: Beta = 0.95
    """The decay of the second moment, which is the running mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """A small number that is added to the square root of the second moment, so that no update
    divides by zero."""


class MuonConfig(OptimizerConfig):
    """Muon, which orthogonalizes the momentum of matrices, and AdamW for all other parameters."""

    type: Literal["muon"]
    """The name that selects this optimizer in a config."""
    momentum: Beta = 0.95
    """The decay of the momentum, which is the running mean of gradients."""
    nesterov: bool = True
    """Whether to use Nesterov's momentum, which looks one step ahead."""
    ns_steps: Count = 5
    """The number of Newton-Schulz steps, which bring the singular values near 1. More steps are
    more exact and cost more matmuls."""
    eps: PositiveFloat = 1e-8
    """A small number that is added to the norm of a matrix, by which the matrix is divided before
    the Newton-Schulz steps."""
    weight_decay: NonNegativeFloat = 0.0
    """The decoupled weight decay, which is multiplied by the learning rate. Biases and norm scales
    do not decay."""
    scale: Scale = "match_rms"
    """The size of the updates of matrices. `match_rms` gives these updates the root mean square of
    AdamW's updates, so that all parameters share a learning rate. `spectral` multiplies the updates
    by sqrt(max(1, outputs / inputs)), which needs another learning rate than AdamW (set
    adamw.rate).
    """
    split_heads: bool = False
    """Whether to treat each head of the query, key and value projections as a separate matrix."""
    adamw: MuonAdamW = MuonAdamW()
    """The settings of AdamW, which updates vectors, embeddings and output heads."""

    @property
    def whole_matrices(self) -> bool:
        return True

    def matrices(self, tree: NamedParams) -> dict[str, Matrices]:
        """Return the matrices in each parameter that Muon updates, by the parameter's name."""
        found: dict[str, Matrices] = {}
        for name, leaf in flatten_with_names(tree.params):
            dims = tree.dims[name]
            of = matrices_in(leaf.shape, dims, split_heads=self.split_heads)
            apart = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.adamw.params)
            if of is not None and not apart and not {*dims} & {*ENDS}:
                found[name] = of
        return found

    def exchange(self, tree: NamedParams) -> MatrixExchange:
        """Return the exchange of the matrices between the devices that hold parts of them."""
        found = self.matrices(tree)
        cost = partial(newton_schulz_flops, steps=self.ns_steps)
        shares = None if tree.shares is None else dict(flatten_with_names(tree.shares))
        mesh = None if shares is None else next(iter(shares.values())).mesh
        specs = [PartitionSpec() if shares is None else shares[name].spec for name in found]
        return plan_matrices(list(found.values()), specs, mesh, cost)

    def explain(self, tree: NamedParams) -> tuple[str, ...]:
        """Return a line with the parameters of Muon, and a line with the parameters of AdamW.

        Raises:
          ConfigError: no parameter is a matrix; a pattern of `adamw.params` matches no matrix.
        """
        found = self.matrices(tree)
        every = self.model_copy(update={"adamw": MuonAdamW()}).matrices(tree)
        for pattern in self.adamw.params:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in every):
                raise ConfigError(
                    f"optim.adamw.params: {pattern!r} matches no matrix that Muon would "
                    f"update: {did_you_mean(pattern, every)}"
                )
        if not found:
            raise ConfigError(
                "muon has no matrix to update: all parameters are vectors, embeddings or heads, "
                "or in optim.adamw.params; use {type: adamw}"
            )
        shown = [
            f"{name} ({of.count} of {of.size[0]} x {of.size[1]})" for name, of in found.items()
        ]
        others = [name for name, _ in flatten_with_names(tree.params) if name not in found]
        return (
            f"muon updates matrices: {', '.join(shown)}",
            f"adamw updates the others: {', '.join(others) or 'none'}",
        )

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Build the update rule from a learning-rate schedule, for the parameters of `tree`."""
        found = self.matrices(tree)
        labels = map_with_names(lambda name, _: "muon" if name in found else "adamw", tree.params)
        decays = dict(flatten_with_names(decay_mask(tree.params, tree.dims)))

        # A mask must have the structure of the tree that it masks. The mask is a function of this
        # tree, because `optax.partition` hides the leaves of Muon from AdamW.
        def mask(params: Params) -> Masks:
            return map_with_names(lambda name, _: decays[name], params)

        adamw = self.adamw
        rule = Orthogonalized(found, self.exchange(tree), self)
        return optax.partition(
            {
                "muon": optax.chain(
                    optax.GradientTransformation(rule.init, rule.update),
                    optax.add_decayed_weights(self.weight_decay),
                    optax.scale_by_learning_rate(rate),
                ),
                "adamw": optax.chain(
                    optax.scale_by_adam(adamw.b1, adamw.b2, adamw.eps),
                    optax.add_decayed_weights(self.weight_decay, mask),
                    optax.scale_by_learning_rate(lambda step: adamw.rate * rate(step)),
                ),
            },
            labels,
        )
