"""The bench of imported models: transformers in comparison, loading, generation, and Muon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks import muon
from benchmarks.core.report import Figure, Report
from benchmarks.models.drawn import CONFIGS, apart, given, ours, theirs, write_drawn
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model, synthetic_data
from jaxdist.errors import RunError
from jaxdist.interchange.source import open_source

QUIET = Console(quiet=True)
BOUND = 1e-5
LOADED_GOAL, READ_GOAL = "<= 1", "<= 1.5"


def bench(torch: str | None = None, weights: Path | None = None) -> Report:
    """Compare every family's logits and gradients; check export after import; measure loading.

    Args:
      torch: a Python with torch and transformers; None is this Python.
      weights: a model with real weights, a Hugging Face directory or a GGUF file.
    """
    figures: list[Figure] = []
    python = torch or sys.executable
    with tempfile.TemporaryDirectory() as folder:
        for name in CONFIGS:
            path = Path(folder) / name
            write_drawn(name, path)
            figures += compared(name, path, python)
            figures.append(returned(name, path))
        real = weights or Path(folder) / "llama"
        if weights is not None:
            figures += compared(weights.name, weights, python)
            figures.append(returned(weights.name, weights))
        figures += loaded(real)
        figures += generated(real, python)
    figures += muon.figures()
    return Report("models", figures)


def compared(name: str, path: Path, python: str) -> Iterator[Figure]:
    """Compare the distance of logits and of gradients with the bound."""
    inputs = given(open_source(path))
    try:
        right = theirs(python, path, inputs)
    except RunError as error:
        yield Figure.skipped(f"{name}: logits and gradients", str(error).splitlines()[0][:200])
        return
    for what, distance in apart(ours(path, inputs), right).items():
        note = "largest difference over the largest number, float32; 512 positions of text"
        yield Figure(f"{name}: {what}", distance, BOUND, goal="<= 1", unit="", note=note)


def returned(name: str, path: Path) -> Figure:
    """Import and export a model, and count the tensors that are the same to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder) / "run", Path(folder) / "out"
        import_model(path, run, small(path), console=QUIET)
        export_model(run, out, console=QUIET)
        if path.is_file():  # GGUF has other names, so a second round trip is compared instead
            again = Path(folder) / "again"
            import_model(out, again, small(out), console=QUIET)
            export_model(again, Path(folder) / "last", console=QUIET)
            path, out = out, Path(folder) / "last"
        before, made = open_source(path), open_source(out).tensors
        same, prefix = 0, before.family.prefix
        for key, tensor in before.tensors.items():
            # A model without its head is written with one, and its names with a prefix.
            own = made.get(key, made.get(prefix + key))
            same += own is not None and np.array_equal(tensor.open(), own.open())
        ignored = [key for key in before.tensors if key.endswith(before.family.ignored)]
        left_out = [key for key in ignored if key not in made and prefix + key not in made]
        count = len(before.tensors) - len(left_out)
        return Figure(f"{name}: tensors to the bit", same, count, goal=">= 1", unit="")


def small(path: Path) -> list[str]:
    """Return settings that make the data of an imported run small."""
    data = {**synthetic_data(open_source(path)), "examples": 16, "heldout_examples": 8}
    return [f"data={json.dumps(data | ({'window': 16} if 'window' in data else {}))}"]


def generated(path: Path, python: str) -> Iterator[Figure]:
    """Compare tokens for each second of all cores with those of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        import_model(path, Path(folder) / "run", small(path), console=QUIET)
        command = [sys.executable, "-P", "-m", "benchmarks.models.generated"]
        command += [str(Path(folder) / "run"), python, str(path)]
        env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["no output"]
        yield Figure.skipped("generation", why[0][:200])
        return
    for rows, pairs in json.loads(done.stdout.strip().splitlines()[-1]).items():
        ours, reference = (int(rows) / float(np.median(side)) for side in zip(*pairs, strict=True))
        note = "greedy, float32, without compilation and prompt; processes take turns"
        given = ours, reference
        yield Figure(f"generation, batch {rows}", *given, goal=">= 1", unit="tokens/s", note=note)


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
    note = "seconds of all cores, over reading the files into memory from the page cache"
    given = found["seconds"], found["read"]
    yield Figure("ZeRO 3 on 8: time", *given, goal=READ_GOAL, unit="s", note=note)
    note = "the same, over passing the files through a buffer of 4 MiB, which fills no memory"
    given = found["seconds"], found["through"]
    yield Figure("ZeRO 3 on 8: time beside a pass", *given, goal=READ_GOAL, unit="s", note=note)
