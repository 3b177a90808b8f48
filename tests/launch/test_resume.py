"""A run that is killed or stopped, and resumed, ends bit for bit like one that never was."""

from __future__ import annotations

import random
import signal
import textwrap

import pytest
from runs import Jaxdist, assert_same_run, finish, kill_at_step, metrics, steps, wait_for_step

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


@pytest.fixture
def noisy(jaxdist: Jaxdist) -> Jaxdist:
    (jaxdist.folder / "noisy.py").write_text(NOISY)
    jaxdist.config(
        model={"type": "import", "path": "noisy:Noisy"},
        loss={"type": "classification"},
        optim={"clip_norm": 1.0, "schedule": {"type": "cosine", "warmup_steps": 10}},
        train={"steps": STEPS, "batch_size": 64, "microbatches": 2, "log_every": 1},
        eval={"every": 30, "batches": 2},
        checkpoint={"every": 10, "keep": 2},
        mesh={"data": 2, "fake_devices": 2},
    )
    return jaxdist


def resume_to_the_end(jaxdist: Jaxdist) -> None:
    """Compare what a last --resume leaves with a run of the same config that nothing disturbed."""
    done = jaxdist.train("--resume")
    assert done.code == 0, done
    assert f"step {STEPS}" in done.out
    whole = jaxdist.train("run.directory=runs/whole")
    assert whole.code == 0, whole
    assert_same_run(jaxdist.run, jaxdist.folder / "runs/whole")


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
def test_sigkill_at_random_steps(noisy: Jaxdist, seed: int) -> None:
    kills = sorted(random.Random(seed).sample(range(5, STEPS - 20), 4))
    for step in kills:
        kill_at_step(noisy.start("train", "config.yaml", "--resume"), noisy.run, step)
    resume_to_the_end(noisy)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_0(noisy: Jaxdist, number: signal.Signals) -> None:
    process = noisy.start("train", "config.yaml")
    wait_for_step(process, noisy.run, 37)
    process.send_signal(number)
    stopped = finish(process)
    assert (stopped.code, stopped.err) == (0, "")
    last = metrics(noisy.run)[-1]["step"]
    assert 37 <= last < STEPS
    assert steps(noisy.run)[-1] == last
    lines = [line for line in stopped.out.splitlines() if number.name in line]
    assert lines == [
        f"{number.name}: stopped after step {last} of {STEPS} and saved a checkpoint; "
        "continue with the same command and --resume"
    ]
    resume_to_the_end(noisy)
