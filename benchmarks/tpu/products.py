"""Estimate how fast each TPU family multiplies matrices, one compiled product at a time.

`python -m benchmarks.tpu.products [FAMILY...]` compiles bfloat16 products of `ROWS` x k by k x n
for one chip, with libtpu's default limit of vector memory and with the limit of
`parallel.xla.preset: default`. By the compiler's own estimates, each product reaches a share of
the chip's peak, which is written to `jaxdist/cost/products.json`. The planner reads that table;
nothing in it is fitted to a whole step or to a published run.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.core import child
from benchmarks.tpu.kernels import predicted_seconds
from jaxdist.cost.products import OWN_LIMIT, SCOPED, TABLE
from jaxdist.parallel.compiler import SCOPED_VMEM, preset_options
from jaxdist.runtime.hardware import device
from jaxdist.runtime.topology import topology_devices

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
ROWS = 8192
LENGTHS = (1024, 4096, 8192, 28672)
"""The sizes of the contracted dim, and of the columns, of products."""


@dataclass(frozen=True)
class Product:
    """A matrix product, and the share of the peak that it reaches.

    Attributes:
      table: `SCOPED` or `OWN_LIMIT`, the limit of vector memory.
      contracted: the size of the contracted dim.
      columns: the number of columns.
      share: the share of the chip's peak, from 0 to 1.
    """

    table: str
    contracted: int
    columns: int
    share: float


def compiled_products(family: str) -> list[Product]:
    """Compile every product of the table for one family."""
    chip, known = topology_devices(TOPOLOGIES[family])[:1], device(family)
    mesh = Mesh(np.array(chip), ("data",))
    preset = preset_options("default", chip[0])
    without = {name: value for name, value in preset.items() if name != SCOPED_VMEM}
    asked = {OWN_LIMIT: without} | ({SCOPED: preset} if preset != without else {})
    found = []
    for (table, options), k, n in itertools.product(asked.items(), LENGTHS, LENGTHS):
        left = jax.ShapeDtypeStruct((ROWS, k), jnp.bfloat16)
        right = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
        seconds = predicted_seconds(jnp.matmul, mesh, left, right, options=options)
        least = 2 * ROWS * k * n / known.flops_per_second["bfloat16"]
        found.append(Product(table, k, n, round(least / seconds, 3)))
    return found


def main(families: Sequence[str]) -> None:
    """Write the shares of these families into the table; other families keep their rows."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for family in families or TOPOLOGIES:
        rows = child.apart(compiled_products, "compiling products for {}")(family)
        found = table[family] = {}
        for row in rows:
            found.setdefault(row.table, []).append([row.contracted, row.columns, row.share])
        TABLE.write_text(_text(table))
        for name, lines in found.items():
            print(family, name, *(f"{k}x{n}: {share:.0%}" for k, n, share in lines))


def _text(table: dict[str, dict[str, list[list[float]]]]) -> str:
    """Format the table as JSON with a line for each row, which keeps diffs readable."""
    families = []
    for family, tables in sorted(table.items()):
        parts = []
        for name, rows in sorted(tables.items()):
            lines = ",\n".join(f"      {json.dumps(row)}" for row in rows)
            parts.append(f'    "{name}": [\n{lines}\n    ]')
        families.append(f'  "{family}": {{\n' + ",\n".join(parts) + "\n  }")
    return "{\n" + ",\n".join(families) + "\n}\n"


if __name__ == "__main__":
    # Imported by name, since the child process could not find a function of `__main__`.
    importlib.import_module("benchmarks.tpu.products").main(sys.argv[1:])
