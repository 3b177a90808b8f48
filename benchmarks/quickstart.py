"""The bench of the quickstart for a new user: the time of the whole run, and its held-out loss."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.core.report import Figure, Report
from jaxdist.errors import RunError
from jaxdist.experiment import load
from jaxdist.metrics.writer import read_metrics
from jaxdist.runtime.environment import python_module
from jaxdist.types import Json

CONFIG = Path("configs/gpt/quickstart.yaml")
BUDGET_SECONDS = 180.0
TIMEOUT_SECONDS = 1800.0
LOSS_GOAL = "<= 0.95"


def bench(config: Path = CONFIG) -> Report:
    """Run `jaxdist train configs/gpt/quickstart.yaml` from start to end on the real devices.

    Raises:
      RunError: there is no such config in the current directory, or the run fails.
    """
    if not config.is_file():
        raise RunError(f"bench quickstart: no {config} in {Path.cwd()}; run it in a checkout")
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        seconds = train(config, run)
        loss = final_loss(read_metrics(run))
    # The baselines are computed after the run, which must not find its data prepared, nor share
    # the cores.
    name, baseline = best_baseline(load(config)[1].data.build().baselines())
    note = "nats per token on the held-out split"
    return Report(
        "quickstart",
        [
            Figure("whole run", seconds, BUDGET_SECONDS, "<= 1", note="the reference is 3 minutes"),
            Figure(f"held-out loss over {name}", loss, baseline, LOSS_GOAL, "nats", note),
        ],
    )


def train(
    config: Path,
    run: Path,
    timeout_seconds: float = TIMEOUT_SECONDS,
    arguments: Sequence[str] = (),
) -> float:
    """Run `jaxdist train` without caches, with the run directory `run`; return the wall seconds.

    Args:
      arguments: further arguments of the command.

    Raises:
      RunError: the process fails or takes too long.
    """
    given = [str(config), *arguments, f"run.directory={run}"]
    command = python_module("jaxdist.cli", "train", *given)
    environ = plain_environment(os.environ, cache=run.parent / "cache")
    start = time.perf_counter()
    try:
        subprocess.run(
            command, env=environ, check=True, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=timeout_seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"`{' '.join(command)}` took more than {timeout_seconds:g} s; run it by hand"
        ) from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise RunError(
            f"`{' '.join(command)}` failed: exit code {error.returncode}: {last}; run it by hand"
        ) from error
    return time.perf_counter() - start


def plain_environment(environ: Mapping[str, str], *, cache: Path) -> dict[str, str]:
    """Return a new user's environment: without this process's fake devices, and with no caches.

    >>> plain_environment({"XLA_FLAGS": "--x=1", "HOME": "/root"}, cache=Path("/tmp/c"))
    {'HOME': '/root', 'JAXDIST_CACHE': '/tmp/c'}
    """
    ours = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")
    kept = {name: value for name, value in environ.items() if name not in ours}
    return {**kept, "JAXDIST_CACHE": str(cache)}


def final_loss(records: Iterable[Mapping[str, Json]]) -> float:
    """Return the last held-out loss of a run's metrics.

    Raises:
      RunError: the run evaluated nothing.

    >>> final_loss([{"step": 1, "split": "heldout", "loss": 2.0}, {"step": 1, "split": "train"}])
    2.0
    """
    losses = [record["loss"] for record in records if record["split"] == "heldout"]
    if not losses:
        raise RunError("the quickstart wrote no held-out loss: its data needs heldout_fraction > 0")
    return losses[-1]


def best_baseline(baselines: Mapping[str, float]) -> tuple[str, float]:
    """Return the name and the loss of the best baseline, which counts n-grams.

    Raises:
      RunError: the data has no baselines.

    >>> best_baseline({"unigram": 3.0, "trigram": 1.9})
    ('trigram', 1.9)
    """
    if not baselines:
        raise RunError("the quickstart's data gives no baseline to beat: it must be text")
    return min(baselines.items(), key=lambda pair: pair[1])
