"""A run that is killed or stopped, and resumed, ends bit for bit like one that never was."""

from __future__ import annotations

import os
import random
import signal
import textwrap
from pathlib import Path

import pytest
from runs import (
    QUICK,
    Jaxdist,
    assert_same_run,
    finish,
    kill_at_step,
    metrics,
    steps,
    wait_for_step,
)

STEPS = 240

# Everything that a resume could lose: batch statistics, dropout's randomness, microbatches' order,
# the optimizer's moments, a schedule, an epoch's end (1,438 digits are 22 batches).
NOISY = textwrap.dedent("""
    import jax
    from flax import nnx

    class Noisy(nnx.Module):
        def __init__(self, rngs):
            dims = {"kernel_metadata": {"dims": (None, None)}, "bias_metadata": {"dims": (None,)}}
            self.inner = nnx.Linear(64, 16, rngs=rngs, **dims)
            self.norm = nnx.BatchNorm(
                16, rngs=rngs, bias_metadata={"dims": (None,)}, scale_metadata={"dims": (None,)}
            )
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.outer = nnx.Linear(16, 10, rngs=rngs, **dims)

        def __call__(self, image):
            hidden = self.norm(self.inner(image.reshape(image.shape[0], -1)))
            return self.outer(self.dropout(jax.nn.relu(hidden)))
""")


def write_config(jaxdist: Jaxdist) -> None:
    (jaxdist.folder / "noisy.py").write_text(NOISY)
    jaxdist.config(
        model={"type": "import", "path": "noisy:Noisy"},
        loss={"type": "classification"},
        optim={"clip_norm": 1.0, "schedule": {"type": "cosine", "warmup_steps": 10}},
        train={"steps": STEPS, "microbatches": 2},
        eval={"every": 30},
        checkpoint={"every": 24},
        mesh={"data": 2, "fake_devices": 2},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Path:
    """A run that nothing disturbed, of a process that has imported all by itself.

    It compiles as the processes do that are compared with it: other options round differently.
    """
    jaxdist = Jaxdist(tmp_path_factory.mktemp("whole"), compiled)
    write_config(jaxdist)
    done = jaxdist.train(fresh=True, xla_flags=QUICK)
    assert done.code == 0, done
    return jaxdist.run


@pytest.fixture
def noisy(jaxdist: Jaxdist) -> Jaxdist:
    write_config(jaxdist)
    return jaxdist


def resume_to_the_end(jaxdist: Jaxdist, whole: Path) -> None:
    done = jaxdist.train("--resume")
    assert done.code == 0, done
    assert f"done   step {STEPS}" in done.out
    assert_same_run(jaxdist.run, whole)


# Always on: kills of a save at random times (test_checkpoint_kill.py), and every signal here.
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.full),
        *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3)),
    ],
)
def test_sigkill_at_random_steps(noisy: Jaxdist, whole: Path, seed: int) -> None:
    kills = sorted(random.Random(seed).sample(range(5, STEPS - 20), 3))
    for step in kills:
        kill_at_step(noisy.start("train", "config.yaml", "--resume"), noisy.run, step)
    resume_to_the_end(noisy, whole)


@pytest.mark.parametrize(
    "number",
    [
        # In this process: test_termination.py.
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_exits_75(noisy: Jaxdist, whole: Path, number: signal.Signals) -> None:
    process = noisy.start("train", "config.yaml")
    wait_for_step(process, noisy.run, 37)
    process.send_signal(number)
    stopped = finish(process)
    assert (stopped.code, stopped.err) == (75, "")
    last = metrics(noisy.run)[-1]["step"]
    assert 37 <= last < STEPS
    assert steps(noisy.run)[-1] == last
    said, *lines = [line for line in stopped.out.splitlines() if number.name in line]
    assert said.startswith(f"{number.name}: the run stops after the step under way and saves a che")
    assert lines == [
        f"{number.name}: stopped after step {last} of {STEPS} and saved a checkpoint; "
        "continue with the same command and --resume"
    ]
    resume_to_the_end(noisy, whole)


@pytest.mark.slow
def test_a_terminal_that_closes_saves(noisy: Jaxdist) -> None:
    """By the hangup; what the run would say then goes nowhere."""
    screen, terminal = os.openpty()
    process = noisy.start("train", "config.yaml", terminal=terminal)
    os.close(terminal)
    with open(screen, "rb", buffering=0) as shown:
        file = noisy.run / "metrics.jsonl"
        while not (file.exists() and file.read_bytes().count(b"\n") >= 37):
            shown.read(4096)  # it is redrawn several times a second
    assert finish(process).code == 75
    last = metrics(noisy.run)[-1]["step"]
    assert 35 <= last < STEPS
    assert steps(noisy.run)[-1] == last
