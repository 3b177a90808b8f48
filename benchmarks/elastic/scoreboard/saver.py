"""A process that saves step after step: `python -m ... RUN GENERATION CALL NUMBER`.

The process kills itself at call NUMBER of `os.CALL`, counted from its second save. With CALL "none"
the process does not kill itself. It prints a line for each step whose save is complete.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.heartbeat.fence import RunFence
from jaxdist.types import PyTree

STEPS, SIZE = 200, 20_000
CHUNK_BYTES = 1 << 15


def state_of(step: int) -> PyTree:
    """Return the content of a step's checkpoint, which follows from its number alone."""
    base = jnp.arange(SIZE, dtype=jnp.uint32)
    mixed = base * jnp.uint32(2654435761) + jnp.uint32(step)
    return {"w": mixed, "step": jnp.int32(step), "frozen": base}


def store_of(run: Path, generation: int, say: Callable[[str], None]) -> CheckpointStore:
    """Return the checkpoint store of a generation, and raise the fence to this generation."""
    fence = RunFence(run, generation)
    fence.raise_()
    given = {"keep": 2, "keep_best": False, "chunk_bytes": CHUNK_BYTES, "fence": fence}
    return CheckpointStore(run / "checkpoints", **given, on_event=say)


def main(run: Path, generation: int, call: str, number: int) -> None:
    """Save until this process is killed, its save is refused, or all steps are saved."""
    calls, armed = 0, False
    real = getattr(os, call, None)

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if armed and calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        assert real is not None
        return real(*args, **options)

    if real is not None:
        setattr(os, call, counted)
    with store_of(run, generation, lambda line: None) as store:
        first = max(store.steps(), default=0) + 1
        print("ready", flush=True)
        for step in range(first, first + STEPS):
            calls, armed = 0 if not armed else calls, step > first
            state = jax.block_until_ready(state_of(step))
            store.save(step, state, metadata={"step": step})
            store.wait()
            print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
