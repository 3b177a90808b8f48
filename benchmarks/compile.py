"""The time to compile the train step: its growth with depth, and the gain of a cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.core.experiments import built, gpt
from benchmarks.core.harness import REPEATS, interleave
from benchmarks.core.report import Figure, Report
from jaxdist.experiment import Experiment
from jaxdist.runtime.compilation_cache import SETTINGS
from jaxdist.types import JsonObject

SHALLOW, DEEP = 4, 64
WARMUP = 1


def bench(repeats: int = REPEATS, shallow: int = SHALLOW, deep: int = DEEP) -> Report:
    """Compare compile times on all devices: 64 layers with 4, and a warm start with a cold one."""
    deeper, shallower = experiment(deep), experiment(shallow)
    with persistent_cache(None):
        depth = interleave(
            partial(compile_step, deeper),
            partial(compile_step, shallower),
            warmup=WARMUP,
            repeats=repeats,
        )
    with tempfile.TemporaryDirectory() as filled:
        starts = interleave(*warm_and_cold(shallower, Path(filled)), warmup=WARMUP, repeats=repeats)
    note = "trace, lower and compile the train step of a gpt"
    return Report(
        "compile",
        [
            Figure.compare(f"{deep} layers over {shallow}", *depth, "<= 1.2", note),
            Figure.compare("warm start over cold", *starts, "<= 0.3", f"{note}; {shallow} layers"),
        ],
    )


def experiment(layers: int) -> Experiment:
    """Build a small gpt with a number of layers on all devices, which split the batch."""
    model = {"layers": layers, "embed": 64, "heads": 4}
    batch_size = len(jax.devices())
    return built(gpt(model, window=32, batch_size=batch_size, mesh={"data": -1}))


def compile_step(experiment: Experiment) -> None:
    """Trace, lower and compile the train step, as at the start of a run."""
    # From the second call on, jax would otherwise find the traced step in memory.
    jax.clear_caches()
    program = experiment.program
    program.train.lower(program.state_shapes, program.batch).compile()


def warm_and_cold(
    experiment: Experiment, filled: Path
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Fill the cache `filled`; return functions that compile with it, and with an empty cache."""

    def warm() -> None:
        with persistent_cache(filled):
            compile_step(experiment)

    def cold() -> None:
        with tempfile.TemporaryDirectory() as empty, persistent_cache(Path(empty)):
            compile_step(experiment)

    warm()
    return warm, cold


@contextmanager
def persistent_cache(directory: Path | None) -> Iterator[None]:
    """Set jax's persistent cache to this directory, or to none; restore the settings at the end."""
    wanted = {**SETTINGS, "jax_compilation_cache_dir": str(directory) if directory else None}
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        _configure(wanted)
        yield
    finally:
        _configure(before)


def _configure(settings: JsonObject) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # jax opens its cache only once. Without a reset, jax would use the previous directory.
    compilation_cache.reset_cache()
