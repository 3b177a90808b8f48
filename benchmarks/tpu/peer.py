"""The predicted time of another framework's program, compiled for the same chips.

`python -m benchmarks.tpu.peer DUMP TOPOLOGY AXIS=SIZE...` reads a dump of XLA
(`--xla_dump_to=DUMP --xla_dump_hlo_as_text=true`), such as the dump of MaxText's
ahead-of-time compilation (`maxtext.trainers.pre_train.train_compile`, `compile_xla_flags`), and
prints the predicted time. The devices are assumed to be in the topology's order, which makes no
difference where collectives span all chips.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from jaxdist.columns import table
from jaxdist.cost.step_time import StepTime, step_time
from jaxdist.errors import RunError
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.parse import parse
from jaxdist.inspect.times import dearest, parts_of, show_seconds
from jaxdist.runtime.topology import topology_devices

WRITTEN = "*after_codegen.txt"


def predicted(dump: Path, topology: str, axes: dict[str, int]) -> StepTime:
    """Return the predicted time of the largest program in a dump.

    Raises:
      RunError: the dump has no program.
    """
    files = sorted(dump.glob(WRITTEN), key=lambda path: path.stat().st_size)
    if not files:
        raise RunError(f"{dump} holds no {WRITTEN}: dump with --xla_dump_hlo_as_text=true")
    module = parse(files[-1].read_text())
    layout = MeshLayout(axes, tuple(range(module.devices)))
    return step_time(module, layout, topology_devices(topology))


def main(dump: str, topology: str, *axes: str) -> None:
    """Print the parts of the predicted time, and the operations that take most of it."""
    sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in axes)}
    found = predicted(Path(dump), topology, sizes)
    console = Console()
    made = table("Predicted step of each device", "", "seconds", "share")
    for name, seconds in {**parts_of(found), "step": found.seconds}.items():
        made.add_row(name, show_seconds(seconds), f"{seconds / found.seconds:.1%}")
    for source in dearest(found):
        share = f"{source.seconds / found.seconds:.1%}"
        made.add_row(source.name[-48:], show_seconds(source.seconds), share)
    console.print(made)
    for what in sorted({entry.what for entry in found.entries if entry.basis == "assumed"}):
        console.print(f"assumed: {what}", style="dim")


if __name__ == "__main__":
    main(*sys.argv[1:])
