"""SIGKILL at any moment of a save: what is committed restores bit for bit, nothing torn is taken.

The child saves steps whose content follows from the step number, so that the parent can compute
what each must hold. A step is *acknowledged* when the child saw `wait` return.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.checkpoint.store import CheckpointStore

CHILD = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path

    from jaxdist.runtime import environment
    environment.prepare(fake_devices=2)
    import jax, jax.numpy as jnp
    from jaxdist.checkpoint.store import CheckpointStore

    directory, call, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    calls = 0

    def counted(real):
        def wrapper(*args, **options):
            global calls
            calls += 1
            if armed and calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return wrapper

    armed = False
    if call != "none":
        setattr(os, call, counted(getattr(os, call)))
    store = CheckpointStore(
        directory, keep=2, keep_best=False, chunk_bytes=1 << 15, on_event=lambda line: None
    )
    first = max(store.steps(), default=0) + 1
    print("ready", flush=True)
    for step in range(first, first + 200):
        # One step is saved with room to spare before the faults begin.
        if step > first:
            calls, armed = (calls, True) if armed else (0, True)
        base = jnp.arange(20_000, dtype=jnp.uint32)
        state = {"w": base * jnp.uint32(2654435761) + jnp.uint32(step), "step": jnp.int32(step)}
        state["frozen"] = base  # in files of its own, to which later steps have links
        store.save(step, state, metadata={"step": step})
        store.wait()
        print(step, flush=True)
""")


def expected(step: int) -> np.ndarray:
    return np.arange(20_000, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(step)


def start(directory: Path, call: str = "none", kill_at: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(directory), call, str(kill_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check(directory: Path, acknowledged: int) -> int:
    """Every committed step holds what it must; the newest is not older than the acknowledged."""
    events: list[str] = []
    target: Any = {
        "w": jax.ShapeDtypeStruct((20_000,), jnp.uint32, sharding=jnp.ones(1).sharding),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=jnp.ones(1).sharding),
        "frozen": jax.ShapeDtypeStruct((20_000,), jnp.uint32, sharding=jnp.ones(1).sharding),
    }
    with CheckpointStore(directory, keep=2, keep_best=False, on_event=events.append) as store:
        names = sorted(path.name for path in directory.iterdir())
        assert names == [f"step_{step:08d}" for step in store.steps()]
        for step in store.steps():
            restored = store.restore(target, step=step)
            assert restored.metadata == {"step": step}
            assert int(restored.state["step"]) == step
            np.testing.assert_array_equal(np.asarray(restored.state["w"]), expected(step))
            np.testing.assert_array_equal(np.asarray(restored.state["frozen"]), np.arange(20_000))
        newest = store.restore(target).step
    assert newest in (acknowledged, acknowledged + 1)
    assert all("removed the files of an interrupted" in event for event in events), events
    return newest


def last_acknowledged(output: str, before: int) -> int:
    numbers = [int(line) for line in output.split() if line.isdigit()]
    return max(numbers, default=before)


@pytest.mark.slow
def test_sigkill_at_random_times(tmp_path: Path) -> None:
    rng = random.Random(0)
    newest = 0
    for _ in range(4):
        child = start(tmp_path)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        if newest == 0:
            assert child.stdout.readline() == "1\n"
            newest = 1
        time.sleep(rng.uniform(0.0, 0.6))
        child.kill()
        output, _ = child.communicate(timeout=60)
        newest = check(tmp_path, last_acknowledged(output, newest))


full = partial(pytest.param, marks=pytest.mark.full)


# A save of this state makes about 15 fsync and 5 rename calls from Python, its pruning included.
@pytest.mark.parametrize(
    ("call", "kill_at"),
    [
        ("fsync", 6),
        ("rename", 2),
        ("link", 2),
        *[full("fsync", k) for k in (1, 13)],
        *[full("rename", k) for k in (1, 3)],
        full("unlink", 2),
    ],
)
@pytest.mark.every(3)
def test_sigkill_at_a_system_call(tmp_path: Path, call: str, kill_at: int) -> None:
    child = start(tmp_path, call, kill_at)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    check(tmp_path, last_acknowledged(output, 0))


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "link", "unlink", "rmdir"])
@pytest.mark.parametrize("kill_at", range(1, 40))
def test_sigkill_at_every_system_call(tmp_path: Path, call: str, kill_at: int) -> None:
    test_sigkill_at_a_system_call(tmp_path, call, kill_at)
