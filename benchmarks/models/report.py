"""The bench of imported models: transformers in comparison, fine-tuning, generation, and Muon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks import muon
from benchmarks.core.harness import Sample
from benchmarks.core.report import Figure, Report
from benchmarks.models import adopted, muon_plans
from benchmarks.models import tuned as adapters
from benchmarks.models.drawn import CONFIGS, apart, from_exact, given, ours, theirs, write_drawn
from benchmarks.models.generated import ROWS
from benchmarks.models.tuned import DRAWN, QUIET, small
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model
from jaxdist.errors import JaxdistError, RunError, did_you_mean, first_line
from jaxdist.interchange.source import open_source

BOUND = 1e-5
LOADED_GOAL, READ_GOAL = "<= 1", "<= 1.5"


@dataclass(frozen=True)
class Given:
    """The inputs that all parts of this bench share.

    Attributes:
      folder: a folder for models.
      python: a Python with torch, transformers, peft and trl.
      weights: a model with real weights, or None.
    """

    folder: Path
    python: str
    weights: Path | None

    def drawn(self, name: str) -> Path:
        """Return the directory of a family's model with random weights."""
        path = self.folder / name
        if not path.exists():
            write_drawn(name, path)
        return path

    @cached_property
    def real(self) -> Path:
        """The directory of the model with real weights, or of a model with random weights."""
        path = self.drawn("llama") if self.weights is None else self.weights
        # A directory has no quantization, so that reading is compared with loading.
        return as_directory(path, self.folder / "real") if path.is_file() else path

    @property
    def is_decoder(self) -> bool:
        """Whether the model with real weights generates text."""
        return open_source(self.real).family.kind == "gpt"


def family(given: Given, name: str) -> Iterator[Figure]:
    """Compare a family, with random weights, with transformers."""
    yield from compared(name, given.drawn(name), given.python)
    yield returned(name, given.drawn(name))


def real_weights(given: Given) -> Iterator[Figure]:
    """Compare the model with real weights, and its export, with transformers."""
    if given.weights is None:
        return
    yield from compared(given.weights.name, given.weights, given.python)
    yield returned(given.weights.name, given.weights)
    if given.weights.is_file():
        yield from compared("exported", given.real, given.python)


def real_tuning(given: Given) -> Iterator[Figure]:
    """Compare fine-tuning of real weights with peft and trl."""
    if given.weights is not None and given.is_decoder:
        yield from tuned(given.real.name, given.real, given.python)


def generation(given: Given, rows: int) -> Iterator[Figure]:
    """Compare the speed of generation with transformers."""
    if given.is_decoder:
        yield from generated(given.real, given.python, rows)


Cases = Mapping[str, Iterator[Figure]]
"""The figures of each case of a part; each iterator measures its figures when it is read."""
PARTS: Mapping[str, Callable[[Given], Cases]] = {
    "families": lambda given: {name: family(given, name) for name in CONFIGS},
    "weights": lambda given: {"real": real_weights(given)},
    "tuning": lambda given: {
        "random": tuned(DRAWN, given.drawn(DRAWN), given.python),
        "real": real_tuning(given),
    },
    "generation": lambda given: {str(rows): generation(given, rows) for rows in ROWS},
    "loading": lambda given: {"real": loaded(given.real)},
    "muon": lambda given: {"program": muon.figures(), "plans": muon_plans.figures()},
    "adopt": lambda given: {name: adopted.figures(name) for name in adopted.PUBLISHED},
}


def bench(
    torch: str | None = None, weights: Path | None = None, part: Sequence[str] = ()
) -> Report:
    """Run the named parts, or all; `families:gpt2` is the case gpt2 of the part families.

    Args:
      torch: a Python with torch, transformers, peft and trl; None means this Python.
      weights: a model with real weights, a Hugging Face directory or a GGUF file.
      part: the names of parts, or of cases of parts.

    Raises:
      JaxdistError: no part or no case has this name.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Given(Path(folder), torch or sys.executable, weights)
        chosen = [one for name in part or PARTS for one in _chosen(name, given)]
        return Report("models", [figure for case in chosen for figure in case])


def _chosen(name: str, given: Given) -> Iterable[Iterator[Figure]]:
    """Return the cases of a part, or the one case that is named after a colon."""
    part, _, case = name.partition(":")
    if part not in PARTS:
        raise JaxdistError(f"bench models has no part {part!r}: {did_you_mean(part, PARTS)}")
    cases = PARTS[part](given)
    if case and case not in cases:
        raise JaxdistError(f"part {part} has no case {case!r}: {did_you_mean(case, cases)}")
    return [cases[case]] if case else [*cases.values()]


def compared(name: str, path: Path, python: str) -> Iterator[Figure]:
    """Compare the distance of logits and of gradients with the bound."""
    inputs = given(open_source(path))
    try:
        right = theirs(python, path, inputs)
    except RunError as error:
        yield Figure.skipped(f"{name}: logits and gradients", first_line(error)[:200])
        return
    found = ours(path, inputs)
    for what, distance in apart(found, right).items():
        note = "largest difference over the largest number, float32; 512 positions of text"
        yield Figure(f"{name}: {what}", distance, BOUND, goal="<= 1", unit="", note=note)
    for what, (own, other) in from_exact(found, right).items():
        note = "float32, distance from transformers in float64; the reference is transformers'"
        yield Figure(f"{name}: {what} from float64", own, other, unit="", note=note)


def as_directory(path: Path, folder: Path) -> Path:
    """Write a model as a Hugging Face directory, and return it."""
    run, out = folder / "run", folder / path.name
    import_model(path, run, small(path), console=QUIET)
    export_model(run, out, dtype="float32", console=QUIET)
    return out


def tuned(name: str, path: Path, python: str) -> Iterator[Figure]:
    """Compare adapters and preference optimization with peft and trl."""
    with tempfile.TemporaryDirectory() as held:
        found, size = adapters.ours(path, Path(held) / "adapters")
        note = "rank 8, AdamW in float32; the counts of steps left out"
        given = f"{name}: state of an adapter's element", size, 8
        yield Figure(*given, goal="<= 1", unit="bytes", note=note)
        adapters.export_tuned(path, Path(held) / "adapters")
        try:
            right = adapters.theirs(python, path, Path(held) / "adapters")
        except RunError as error:
            yield Figure.skipped(f"{name}: beside peft and trl", str(error)[-200:])
            return
    for what, distance in adapters.apart(found, right).items():
        note = "largest relative difference, float32; of gradients over the largest"
        yield Figure(f"{name}: {what}", distance, BOUND, goal="<= 1", unit="", note=note)
    for what, (own, other) in adapters.from_exact(found, right).items():
        note = "preferences in float32, distance from trl in float64; the reference is trl's"
        yield Figure(f"{name}: {what} from float64", own, other, unit="", note=note)


def returned(name: str, path: Path) -> Figure:
    """Import and export a model, and count the tensors that are bit-identical afterwards."""
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
        ignored = [key for key in before.tensors if key.endswith(tuple(before.family.ignored))]
        left_out = [key for key in ignored if key not in made and prefix + key not in made]
        count = len(before.tensors) - len(left_out)
        return Figure(f"{name}: tensors to the bit", same, count, goal=">= 1", unit="")


def generated(path: Path, python: str, rows: int) -> Iterator[Figure]:
    """Compare the generated tokens per second with transformers."""
    with tempfile.TemporaryDirectory() as folder:
        import_model(path, Path(folder) / "run", small(path), console=QUIET)
        command = [sys.executable, "-P", "-m", "benchmarks.models.generated"]
        command += [str(Path(folder) / "run"), python, str(path), str(rows)]
        env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["no output"]
        yield Figure.skipped("generation", why[0][:200])
        return
    timed = json.loads(done.stdout.strip().splitlines()[-1])
    clock, cores, their_clock, their_cores = rows / np.array(timed).T
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
    note = "seconds by the clock, over reading the files into memory; from the disk, both"
    given = found["cold"], found["cold_read"]
    yield Figure("ZeRO 3 on 8: time from the disk", *given, goal=READ_GOAL, unit="s", note=note)
