"""The cycles that splash attention's kernels take for a block, by the schedule that libtpu prints.

`python -m benchmarks.tpu.splash [FAMILY...]` compiles jax's kernels alone, forward and backward,
for one chip of each family, with the options of `parallel.xla.preset: default`; libtpu writes the
low-level schedule to a directory. A turn of a kernel's loop computes one block of queries by one
block of keys:

- The largest region has the products. It takes as many cycles as it has bundles, or as the matrix
  units need, whichever is more.
- Regions that begin the loop or follow a branch start and await copies, in every turn.
- The other regions clear and write the accumulators, once for each row of blocks, which is
  (n + 1) / 2 turns under a causal mask of n x n blocks.

The resulting share of the peak is copied to `jaxdist/cost/kernels.toml`.
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
from jaxdist.errors import RunError, first_line
from jaxdist.parallel.compiler import preset_options
from jaxdist.runtime.hardware import device
from jaxdist.runtime.topology import topology_devices

BLOCKS = (512, 1024, 2048)
LENGTH, HEADS, WIDTH = 4096, 8, 128
CORES = {"v4": 2, "v5p": 2}
"""The cores of a device (megacore), if more than 1; a kernel's schedule is for one core."""

_LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s+((?:> ?)*)")
_KERNEL = re.compile(r"splash_mqa_(fwd|dq|dkv)\w*\.\d+-\d+-final_bundles\.txt$")


@dataclass(frozen=True)
class Turn:
    """The cycles of one block: the least cycles of its products, and the cycles of the schedule."""

    family: str
    kernel: str
    block: int
    product_cycles: int
    cycles: float

    @property
    def efficiency(self) -> float:
        """The share of the matrix units' peak."""
        return self.product_cycles / self.cycles


def regions(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Return the label and the number of bundles of each region in the loop of a listing."""
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
    # Published peaks are rounded, but matrix units have multiples of 128 x 128 cells.
    return round(flops / 2 / 128**2) * 128**2


def turn(family: str, kernel: str, block: int, listing: str) -> Turn:
    """Return the cycles of a turn, from the listing of a kernel's final bundles."""
    product_cycles = SPLASH[kernel]["products"] * block * block * WIDTH // per_cycle(family)
    parts = sorted(regions(listing.splitlines()), key=lambda part: -part[1])
    each = sum(count for label, count in parts[1:] if label)
    row = sum(count for label, count in parts[1:] if not label)
    turns = (LENGTH // block + 1) / 2
    cycles = max(parts[0][1], product_cycles) + each + row / turns
    return Turn(family, kernel, block, product_cycles, cycles)


def compile_kernels(family: str, block: int) -> list[Turn]:
    """Compile the forward and backward kernels of causal attention for one chip.

    The list is empty: the result is in the files that libtpu writes.
    """
    chip = topology_devices(TOPOLOGIES[family])[:1]
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS)
    sides = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
             "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")  # fmt: skip
    sizes = kernels.BlockSizes(**dict.fromkeys(sides, block))
    attend = kernels.make_splash_mqa_single_device(mask, block_sizes=sizes)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        given: Any = attend(q, k, v)  # the type includes residuals, which are not requested here
        return given.astype(jnp.float32).sum()

    whole = NamedSharding(Mesh(np.array(chip), ("data",)), PartitionSpec())
    query = jax.ShapeDtypeStruct((HEADS, LENGTH, WIDTH), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.bfloat16)
    grad = jax.grad(loss, (0, 1, 2))
    lowered = jax.jit(grad, in_shardings=whole, out_shardings=whole).lower(query, key, key)
    options: Any = preset_options("default", chip[0])  # jax's type stub allows only None
    lowered.compile(compiler_options=options)
    return []


def measure(family: str, block: int) -> list[Turn]:
    """Compile in a new process, since libtpu reads its flags at the start; read the schedules.

    Raises:
      RunError: the process fails or takes too long.
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
    """Print a table, also with blocks that the compiler refuses for lack of vector memory."""
    for family in families or TOPOLOGIES:
        for block in BLOCKS:
            try:
                found = measure(family, block)
            except RunError as error:
                print(f"{family} {block:>10}  refused: {first_line(error)}")
                continue
            for one in found:
                print(
                    f"{one.family} {one.kernel:<4} {one.block:>5}  products "
                    f"{one.product_cycles:>6} cycles, turn {one.cycles:>7.0f}: "
                    f"{one.efficiency:.2f}"
                )


if __name__ == "__main__":
    # Imported by name, since the child process could not find a function of `__main__`.
    importlib.import_module("benchmarks.tpu.splash").main(sys.argv[1:])
