"""The ledger of a compiled program: its communication, computation and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxdist.errors import first_line
from jaxdist.hlo.account import account
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.parse import LedgerError, Module, parse
from jaxdist.hlo.records import Ledger, Memory

_WRITTEN = ("*after_codegen.txt", "*after_optimizations.txt")
"""The patterns of the names of text files that XLA dumps. The first pattern is for the text after
code generation, which has time estimates."""
NO_MEMORY = Memory(0, 0, 0, 0, 0, 0)
"""The memory of a program of which only the text is known."""


def ledger(compiled: jax.stages.Compiled, mesh: Mesh, text: str | Module | None = None) -> Ledger:
    """Return the ledger of a compiled program: what a run communicates, computes and stores.

    Args:
      compiled: the program, as `jax.jit(f).lower(...).compile()` returns it. The program may be for
        CPU, GPU or TPU, or be compiled ahead of time.
      mesh: the mesh that the program was compiled for.
      text: the program's text from `compile_with_text`, or the parsed text. If None, XLA prints the
        text of `compiled`.

    Raises:
      LedgerError: the program runs on devices that are not the mesh's devices, or XLA cannot print
        the program.
    """
    return ledger_of_text(
        program_text(compiled) if text is None else text,
        dict(mesh.shape),
        order=device_order(compiled, mesh),
        memory=program_memory(compiled),
    )


def compile_with_text(
    lowered: jax.stages.Lowered, options: Mapping[str, bool | int | float | str] | None = None
) -> tuple[jax.stages.Compiled, str]:
    """Compile a program for TPU, and return the program and its text.

    The text is XLA's dump during compilation, since `program_text` does not work for every program.
    `program_text` makes XLA read a serialized program, which fails on asynchronous collectives of
    several arrays (with a message on standard error).

    Args:
      lowered: the program, as `jax.jit(f).lower(...)` returns it.
      options: compiler options, in addition to the options of the `jax.jit`, or None without such
        options.

    Raises:
      LedgerError: the compiler dumps no text, and XLA cannot print the program (`program_text`).
    """
    with TemporaryDirectory() as directory:
        # The values may be numbers although the types of jax allow only text, hence `Any`.
        told: dict[str, Any] = {
            **(options or {}),
            "xla_dump_to": directory,
            "xla_dump_hlo_as_text": True,
        }
        compiled = lowered.compile(told)
        for pattern in _WRITTEN:
            # XLA also dumps small helper programs. The program itself has the longest text.
            if written := [path.read_text() for path in Path(directory).glob(pattern)]:
                return compiled, max(written, key=len)
    return compiled, program_text(compiled)


def program_text(compiled: jax.stages.Compiled) -> str:
    """Return the text of a compiled program.

    Raises:
      LedgerError: XLA cannot print the program. This happens for large programs for TPU that have
        asynchronous collectives of several arrays.
    """
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        held = program_memory(compiled).peak_bytes / 1e9
        raise LedgerError(
            f"XLA compiled the program, which needs {held:.3g} GB on a device, but cannot print "
            f"the program ({first_line(error)}), so its bytes and FLOPs are unknown. "
            "Compile for fewer devices, or let XLA place the collectives (parallel.reduce: null)"
        ) from error
    assert text is not None, "XLA's programs have a text"
    return text


def program_memory(compiled: jax.stages.Compiled) -> Memory:
    """Return the memory of a compiled program on a device.

    Unlike `program_text`, this function works for every program.
    """
    stats: Any = compiled.memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    reserved = held + stats.temp_size_in_bytes
    on_host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    on_host += stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        # XLA:CPU leaves temporaries out of its peak. XLA:TPU includes the host's memory in its
        # peak, and also memory that none of the fields above counts.
        peak_bytes=max(stats.peak_memory_in_bytes - on_host, reserved),
        host_bytes=on_host,
    )


def ledger_of_text(
    text: str | Module,
    axes: Mapping[str, int],
    *,
    order: tuple[int, ...] | None = None,
    memory: Memory = NO_MEMORY,
) -> Ledger:
    """Return the ledger of a program, given its text.

    Args:
      text: the compiled program as HLO text, or the parsed text.
      axes: the size of each mesh axis, in mesh order.
      order: the index in the flattened mesh of each device of the program's device assignment, or
        None if the mesh and the device assignment have the same order.
      memory: the bytes on a device, which the text does not state.

    Raises:
      LedgerError: the text is not a compiled program, or the program has another number of devices
        than the mesh.
    """
    module = parse(text) if isinstance(text, str) else text
    order = order or tuple(range(module.devices))
    layout = MeshLayout(dict(axes), order)
    if layout.size(tuple(axes)) != module.devices:
        shape = ", ".join(f"{axis}: {size}" for axis, size in axes.items())
        raise LedgerError(
            f"the program runs on {module.devices} devices, but the mesh {{{shape}}} has "
            f"{layout.size(tuple(axes))}: pass the mesh that the program was compiled for"
        )
    totals = account(module, layout)
    return Ledger(
        collectives=totals.collectives,
        flops_low=float(totals.flops[0]),
        flops_high=float(totals.flops[1]),
        memory=memory,
        devices=module.devices,
        axes=dict(axes),
        unknown_loops=totals.unknown_loops,
    )


def device_order(compiled: jax.stages.Compiled, mesh: Mesh) -> tuple[int, ...] | None:
    """Return the index in the flattened mesh of each device of a program.

    The result is None if no argument or result of the program states its devices.

    Raises:
      LedgerError: the program runs on devices that are not the mesh's devices.
    """
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = list(mesh.devices.flat)
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            assigned = list(sharding.mesh.devices.flat)
            if set(assigned) != set(devices):
                raise LedgerError(
                    f"the program runs on devices {_ids(assigned)}, but the mesh has "
                    f"{_ids(devices)}: pass the mesh that the program was compiled for"
                )
            places = {device: place for place, device in enumerate(devices)}
            return tuple(places[device] for device in assigned)
    return None


def _ids(devices: list[Any]) -> list[int]:
    return [device.id for device in devices]
