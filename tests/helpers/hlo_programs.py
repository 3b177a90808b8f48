"""Small programs whose ledgers are tested, and short forms of ledgers."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.hlo import Ledger, ledger


@dataclasses.dataclass(frozen=True)
class Program:
    mesh: Mesh

    def array(self, *dims, spec=None, dtype=jnp.float32):
        """Return the shape of an argument, which is replicated if `spec` is None."""
        sharding = NamedSharding(self.mesh, P() if spec is None else spec)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def compile(self, function, *arguments):
        """Compile a function of global arrays."""
        return jax.jit(function).lower(*arguments).compile()

    def compile_local(self, function, *arguments, out=None):
        """Compile a function of each device's own arrays; its results are replicated by default."""
        specs = tuple(argument.sharding.spec for argument in arguments)
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=P() if out is None else out,
            check_vma=False,
        )
        return self.compile(mapped, *arguments)

    def ledger(self, function, *arguments, out=None) -> Ledger:
        """Return the ledger of a function of each device's own arrays."""
        return ledger(self.compile_local(function, *arguments, out=out), self.mesh)


def ring(size):
    return [(i, (i + 1) % size) for i in range(size)]


def traffic(found: Ledger):
    """Return the bytes that a device sends in one run, by (kind, axes) of the collective."""
    total = Counter()
    for one in found.collectives:
        total[one.kind, one.axes] += one.times_high * one.sent_bytes
    return dict(total)


def only(found: Ledger):
    (one,) = found.collectives
    return one
