"""The bench of imported models: a comparison with transformers, and the cost of loading."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.core.report import Figure, Report
from benchmarks.models.drawn import CONFIGS, apart, ours, theirs, tokens, write_drawn
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model
from jaxdist.errors import RunError
from jaxdist.interchange.source import open_source

BOUND = 1e-5
LOADED_GOAL, READ_GOAL = "<= 1", "<= 1.5"
SMALL = ["data={type: synthetic, kind: tokens, window: 16, examples: 16, vocab_size: %d}"]


def bench(torch: str | None = None, weights: Path | None = None) -> Report:
    """Compare every family's logits and gradients; check export after import; measure loading.

    Args:
      torch: a Python with torch and transformers; None is this Python.
      weights: a model with real weights, a Hugging Face directory or a GGUF file.
    """
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in CONFIGS:
            path = Path(folder) / name
            write_drawn(name, path)
            figures += compared(name, path, tokens(), torch or sys.executable)
            figures.append(returned(name, path))
        if weights is not None:
            vocab = open_source(weights).vocab_size
            text = np.random.default_rng(0).integers(0, vocab, (1, 512), np.int32)
            if weights.is_dir():
                figures += compared(weights.name, weights, text, torch or sys.executable)
            figures.append(returned(weights.name, weights))
        figures += loaded(Path(folder) / "llama" if weights is None else weights)
    return Report("models", figures)


def compared(name: str, path: Path, text: np.ndarray, python: str) -> Iterator[Figure]:
    """Compare the distance of logits and of gradients with the bound."""
    try:
        right = theirs(python, path, text)
    except RunError as error:
        yield Figure.skipped(f"{name}: logits and gradients", str(error).splitlines()[0][:200])
        return
    for what, distance in apart(ours(path, text), right).items():
        note = "largest difference over the largest number, 512 positions, float32"
        yield Figure(f"{name}: {what}", distance, BOUND, goal="<= 1", unit="", note=note)


def returned(name: str, path: Path) -> Figure:
    """Import and export a model, and count the tensors that are the same to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder) / "run", Path(folder) / "out"
        settings = [SMALL[0] % open_source(path).vocab_size]
        import_model(path, run, settings, console=Console(quiet=True))
        export_model(run, out, console=Console(quiet=True))
        if path.is_file():  # GGUF has other names, so a second round trip is compared instead
            again = Path(folder) / "again"
            import_model(out, again, settings, console=Console(quiet=True))
            export_model(again, Path(folder) / "last", console=Console(quiet=True))
            path, out = out, Path(folder) / "last"
        given, made = (open_source(one).tensors for one in (path, out))
        same = sum(np.array_equal(t.open(), made[n].open()) for n, t in given.items() if n in made)
        return Figure(f"{name}: tensors to the bit", same, len(given), goal=">= 1", unit="")


def loaded(path: Path) -> Iterator[Figure]:
    """Measure loading onto {data: 8} with ZeRO 3, in a new process."""
    command = [sys.executable, "-P", "-m", "benchmarks.models.loaded", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"loading {path} failed: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    note = "peak of resident memory beyond the shards, over the largest tensor in float32"
    given = max(found["excess"], 0), found["largest"]
    yield Figure("ZeRO 3 on 8: memory", *given, goal=LOADED_GOAL, unit="bytes", note=note)
    note = "loading, over reading the files from the page cache"
    given = found["seconds"], found["read"]
    yield Figure("ZeRO 3 on 8: time", *given, goal=READ_GOAL, unit="s", note=note)
