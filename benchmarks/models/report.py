"""The bench of imported models: transformers in comparison, fine-tuning, generation, and Muon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import muon
from benchmarks.core.harness import Sample
from benchmarks.core.report import Figure, Report
from benchmarks.models import tuned as tuning
from benchmarks.models.drawn import CONFIGS, apart, given, ours, theirs, write_drawn
from benchmarks.models.tuned import DRAWN, QUIET, small
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model
from jaxdist.errors import RunError, first_line
from jaxdist.interchange.source import open_source

BOUND = 1e-5
LOADED_GOAL, READ_GOAL = "<= 1", "<= 1.5"


def bench(torch: str | None = None, weights: Path | None = None) -> Report:
    """Compare every family's logits and gradients; check export after import; measure loading.

    Fine-tuning is compared with peft and trl, and generation with transformers.

    Args:
      torch: a Python with torch, transformers, peft and trl; None means this Python.
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
        figures += tuned(DRAWN, Path(folder) / DRAWN, python)
        real = Path(folder) / "llama"
        if weights is not None:
            figures += compared(weights.name, weights, python)
            figures.append(returned(weights.name, weights))
            real = weights
        if real.is_file():  # Without quantization, so that reading is compared with loading.
            real = as_directory(real, Path(folder))
            figures += compared("exported", real, python)
        if open_source(real).family.kind == "gpt":
            figures += tuned(real.name, real, python) if weights is not None else ()
            figures += generated(real, python)
        figures += loaded(real)
    figures += muon.figures()
    return Report("models", figures)


def compared(name: str, path: Path, python: str) -> Iterator[Figure]:
    """Compare the distance of logits and of gradients with the bound."""
    inputs = given(open_source(path))
    try:
        right = theirs(python, path, inputs)
    except RunError as error:
        yield Figure.skipped(f"{name}: logits and gradients", first_line(error)[:200])
        return
    for what, distance in apart(ours(path, inputs), right).items():
        note = "largest difference over the largest number, float32; 512 positions of text"
        yield Figure(f"{name}: {what}", distance, BOUND, goal="<= 1", unit="", note=note)


def as_directory(path: Path, folder: Path) -> Path:
    """Write a model as a Hugging Face directory, and return it."""
    run, out = folder / "run", folder / path.name
    import_model(path, run, small(path), console=QUIET)
    export_model(run, out, dtype="float32", console=QUIET)
    return out


def tuned(name: str, path: Path, python: str) -> Iterator[Figure]:
    """Compare adapters and preference optimization with peft and trl."""
    with tempfile.TemporaryDirectory() as held:
        found, size = tuning.ours(path, Path(held) / "adapters")
        note = "rank 8, AdamW in float32; the counts of steps left out"
        given = f"{name}: state of an adapter's element", size, 8
        yield Figure(*given, goal="<= 1", unit="bytes", note=note)
        tuning.export_tuned(path, Path(held) / "adapters")
        try:
            right = tuning.theirs(python, path, Path(held) / "adapters")
        except RunError as error:
            yield Figure.skipped(f"{name}: beside peft and trl", str(error)[-200:])
            return
    for what, distance in tuning.apart(found, right).items():
        note = "largest relative difference, float32; of gradients over the largest"
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


def generated(path: Path, python: str) -> Iterator[Figure]:
    """Compare tokens for each second with those of transformers."""
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
    for rows, timed in json.loads(done.stdout.strip().splitlines()[-1]).items():
        clock, cores, their_clock, their_cores = int(rows) / np.array(timed).T
        note = f"greedy, float32, without the prompt; median of {len(timed)}; processes take turns"
        name, goal = f"generation, batch {rows}", {"goal": ">= 1", "unit": "tokens/s"}
        yield Figure.compare(name, Sample((*clock,)), Sample((*their_clock,)), **goal, note=note)
        given = float(np.median(cores)), float(np.median(their_cores))
        yield Figure(f"{name}, a second of a core", *given, unit="tokens/s", note=note)


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
