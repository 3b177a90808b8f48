"""How many cycles splash attention's kernels take for a block, by the schedule that libtpu prints.

`python -m benchmarks.tpu.splash [FAMILY...]` compiles jax's kernels alone, forward and backward,
for one chip of each family, with the options of `parallel.xla.preset: default` and the low-level
schedule written to a directory. A turn of a kernel's loop computes one block of queries by one of
keys:

- its largest region holds the products: it takes its bundles, or the cycles of the matrix units;
- regions that begin the loop or follow a branch start and await copies: in every turn;
- the rest clears and writes the accumulators: once for each row of blocks, which is (n + 1) / 2
  turns under a causal mask of n x n blocks.

The share of the peak that follows stands in `jaxdist.cost.kernels`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.core import child
from benchmarks.tpu.products import TOPOLOGIES
from jaxdist.cost.kernels import SPLASH
from jaxdist.errors import RunError
from jaxdist.parallel.compiler import preset_options
from jaxdist.runtime.hardware import device
from jaxdist.runtime.topology import topology_devices

BLOCKS = (512, 1024, 2048)
LENGTH, HEADS, WIDTH = 4096, 8, 128
CORES = {"v4": 2, "v5p": 2}
"""Cores of a device (megacore), where they are more than one; a kernel's schedule is of one."""

_LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s+((?:> ?)*)")
_KERNEL = re.compile(r"splash_mqa_(fwd|dq|dkv)\w*\.\d+-\d+-final_bundles\.txt$")


@dataclass(frozen=True)
class Turn:
    """Cycles of one block: what its products need, and what the schedule gives them."""

    family: str
    kernel: str
    block: int
    product_cycles: int
    cycles: float

    @property
    def efficiency(self) -> float:
        """Share of the matrix units' peak."""
        return self.product_cycles / self.cycles


def regions(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Label and bundles of each region in the loop of a listing."""
    found: list[tuple[str, int]] = []
    label, depth, count = "", 0, 0
    for line in lines:
        matched = _LINE.match(line)
        if matched is None:
            continue
        here = matched[2].count(">")
        if matched[1] or here != depth:
            found += [(label, count)] * bool(depth)
            label, depth, count = matched[1] or "", here, 0
        count += 1
    return found + [(label, count)] * bool(depth)


def per_cycle(family: str) -> int:
    """Return the multiply-adds of one core's matrix units in a cycle.

    >>> per_cycle("v5p") == 4 * 128 * 128, per_cycle("v6e") == 4 * 256 * 256
    (True, True)
    """
    known = device(family)
    assert known.clock_hz is not None, family
    flops = known.flops_per_second["bfloat16"] / known.clock_hz / CORES.get(family, 1)
    # Published peaks are rounded; units come in squares of 128.
    return round(flops / 2 / 128**2) * 128**2


def turn(family: str, kernel: str, block: int, listing: str) -> Turn:
    """The cycles of a turn, from the final bundles of a kernel."""
    product_cycles = SPLASH[kernel].products * block * block * WIDTH // per_cycle(family)
    parts = sorted(regions(listing.splitlines()), key=lambda part: -part[1])
    each = sum(count for label, count in parts[1:] if label)
    row = sum(count for label, count in parts[1:] if not label)
    turns = (LENGTH // block + 1) / 2
    cycles = max(parts[0][1], product_cycles) + each + row / turns
    return Turn(family, kernel, block, product_cycles, cycles)


def compile_kernels(family: str, block: int) -> list[Turn]:
    """Compile forward and backward of causal attention on one chip."""
    chip = topology_devices(TOPOLOGIES[family])[:1]
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS)
    sides = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
             "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")  # fmt: skip
    sizes = kernels.BlockSizes(**dict.fromkeys(sides, block))
    attend = kernels.make_splash_mqa_single_device(mask, block_sizes=sizes)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        given: Any = attend(q, k, v)  # its type also has residuals, which are not asked for
        return given.astype(jnp.float32).sum()

    whole = NamedSharding(Mesh(np.array(chip), ("data",)), PartitionSpec())
    query = jax.ShapeDtypeStruct((HEADS, LENGTH, WIDTH), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.bfloat16)
    grad = jax.grad(loss, (0, 1, 2))
    lowered = jax.jit(grad, in_shardings=whole, out_shardings=whole).lower(query, key, key)
    options: Any = preset_options("default", chip[0])  # jax's stub has None alone
    lowered.compile(compiler_options=options)
    return []


def measure(family: str, block: int) -> list[Turn]:
    """Compile in a process of its own, which reads its flags as it starts, and read what it wrote.

    Raises:
      RunError: it fails or takes too long.
    """
    with TemporaryDirectory() as directory:
        flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        environ = child.compiling_on(None) | {"LIBTPU_INIT_ARGS": flags}
        child.call(
            compile_kernels, family, block, what="compiling splash attention", environ=environ
        )
        return [
            turn(family, found[1], block, (Path(directory) / name).read_text(errors="replace"))
            for name in sorted(os.listdir(directory))
            if (found := _KERNEL.search(name))
        ]


def main(families: Sequence[str]) -> None:
    """Print a table; blocks for which there is not enough vector memory have a line too."""
    for family in families or TOPOLOGIES:
        for block in BLOCKS:
            try:
                found = measure(family, block)
            except RunError as error:
                print(f"{family} {block:>10}  refused: {str(error).splitlines()[0]}")
                continue
            for one in found:
                print(
                    f"{one.family} {one.kernel:<4} {one.block:>5}  products "
                    f"{one.product_cycles:>6} cycles, turn {one.cycles:>7.0f}: "
                    f"{one.efficiency:.2f}"
                )


if __name__ == "__main__":
    # Under its own name, by which the child process finds `compile_kernels`.
    importlib.import_module("benchmarks.tpu.splash").main(sys.argv[1:])
