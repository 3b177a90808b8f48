"""The bench of the shipped jobs, in parts that can run alone.

    jaxdist bench jobs --part cnn --torch PYTHON
    jaxdist bench jobs --part targets:mlp/digits

The parts that train read their targets from the first lines of the configs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.core.report import Figure, Report
from benchmarks.jobs.steps import ONE, RESNET, VIT, steps
from benchmarks.jobs.targets import TIMEOUT_SECONDS, one_target, reached, targets
from benchmarks.quickstart import plain_environment
from jaxdist.data.source import take
from jaxdist.data.text.dataset import TextConfig
from jaxdist.data.text.masking import MaskingConfig
from jaxdist.errors import JaxdistError, RunError, did_you_mean
from jaxdist.experiment import build, load
from jaxdist.inspect.program import inspect_step, open_subject
from jaxdist.runtime.environment import python_module
from jaxdist.runtime.rendezvous import free_port

CNN, STEPS, BATCH, SEEDS = Path("configs/cnn/fashion.yaml"), 300, 128, (0, 1, 2)
PROGRAMS: Mapping[str, tuple[Path, Sequence[str]]] = {
    "ResNet-18": (RESNET, [ONE, "model.width=64"]),
    "BERT-small": (Path("configs/bert/small.yaml"), [ONE]),
    "ViT-small": (RESNET, [ONE, VIT]),
}


def bench(torch: str | None = None, part: Sequence[str] = ()) -> Report:
    """Run the named parts, or all.

    Args:
      torch: a Python with torch, for the parts `cnn` and `steps`; None means this Python.
      part: the names of parts, or of one config of the targets, such as `targets:mlp/digits`.

    Raises:
      JaxdistError: no part or config has this name, or a run fails.
    """
    chosen = [_part(name, torch) for name in part or PARTS]
    return Report("jobs", [figure for figures in chosen for figure in figures])


def _part(name: str, torch: str | None) -> Iterator[Figure]:
    part, _, config = name.partition(":")
    if part not in PARTS:
        raise JaxdistError(f"bench jobs has no part {part!r}: {did_you_mean(part, PARTS)}")
    if config and part != "targets":
        raise JaxdistError(f"bench jobs: only part targets has single configs, not {part}: {name}")
    return one_target(config) if config else PARTS[part](torch)


def cnn(torch: str | None) -> Iterator[Figure]:
    """Compare the accuracy of two processes of jaxdist with two processes of torch."""
    name = "the CNN in two processes: distance of accuracies"
    program = [torch or sys.executable, str(Path(__file__).parent / "peer_cnn.py")]
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images.npz")
        given = [f"{folder}/images.npz", str(STEPS), str(BATCH), *map(str, SEEDS)]
        done = subprocess.run(
            [*program, *given], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    if done.returncode:
        yield Figure.skipped(name, (done.stderr.strip().splitlines() or ["no output"])[-1][:200])
        return
    theirs = [float(line) for line in done.stdout.split()]
    ours = [two_processes(seed) for seed in SEEDS]
    apart = abs(statistics.mean(ours) - statistics.mean(theirs))
    spread = max(max(found) - min(found) for found in (ours, theirs))
    shown = ["/".join(f"{one:.4f}" for one in found) for found in (ours, theirs)]
    note = f"held-out accuracy of seeds {SEEDS}: {shown[0]}, torch {shown[1]}; the reference is the"
    yield Figure(name, apart, spread, "<= 1", "", f"{note} larger range of seeds")


def write_images(path: Path) -> None:
    """Write the images of the CNN's config as an npz archive."""
    dataset = load(CNN)[1].data.build()
    assert dataset.heldout is not None
    splits = {"train": dataset.train, "test": dataset.heldout}
    rows = {name: take(split, np.arange(len(split))) for name, split in splits.items()}
    fields = {"x": "image", "y": "label"}
    held = {f"{x}_{name}": rows[name][field] for x, field in fields.items() for name in rows}
    np.savez(path, **held)  # pyright: ignore[reportArgumentType]


def two_processes(seed: int) -> float:
    """Train the CNN by two commands that meet at a port; return the held-out accuracy.

    Raises:
      RunError: a process fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, port = Path(folder) / "run", free_port()
        environ = plain_environment(os.environ, cache=Path(folder) / "cache")
        environ.pop("JAXDIST_CACHE")  # which may hold Fashion-MNIST
        given = [str(CNN), f"seed={seed}", f"run.directory={run}", "--num-processes", "2"]
        command = python_module(
            "jaxdist.cli", "train", *given, "--coordinator", f"localhost:{port}"
        )
        children = [
            subprocess.Popen(
                [*command, "--process-id", str(index)],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        try:
            said = [child.communicate(timeout=TIMEOUT_SECONDS)[1] for child in children]
        except subprocess.TimeoutExpired as error:
            raise RunError(
                f"two processes of {CNN} took more than {TIMEOUT_SECONDS:g} s"
            ) from error
        finally:
            for child in children:
                child.kill()
                child.communicate()
        for child, err in zip(children, said, strict=True):
            if child.returncode:
                raise RunError(f"a process of {CNN} failed: {err.strip()[-500:]}")
        return reached(run, "accuracy")


def flops(_: str | None) -> Iterator[Figure]:
    """Compare the FLOPs of compiled steps with the FLOPs of models and optimizers."""
    for name, (path, overrides) in PROGRAMS.items():
        found = inspect_step(open_subject(path, overrides, jax.devices()[:1]))
        given = found.ledger.flops_high, found.ideal_flops
        yield Figure(f"{name}: FLOPs", *given, "<= 1.03", "", "compiled for one device, over ideal")


def augmentation(_: str | None) -> Iterator[Figure]:
    """Compare the CPU seconds of a step with, and without, random changes of its images."""
    overrides = ["model.width=64", "train.batch_size=16", ONE]
    scaled = "data.transform={type: scale, mean: 73.0, std: 90.0}"
    document, config = load(RESNET, overrides)
    experiment = build(config, document, devices=jax.devices()[:1])
    document, config = load(RESNET, [*overrides, scaled])
    plain = build(config, document, devices=jax.devices()[:1]).loader
    changed, batch = experiment.loader, experiment.loader.batch(0)
    pairs = [(seconds(changed.batch, n), seconds(plain.batch, n)) for n in range(200)]
    added = statistics.median(ours - reference for ours, reference in pairs)
    state, steps = experiment.program.init(), []
    for _index in range(4):
        begun = time.process_time()
        state, metrics = experiment.program.train(state, batch)
        metrics.block_until_ready()
        steps.append(time.process_time() - begun)
    step = statistics.median(steps[1:])
    note = "ResNet-18, batches of 16; the changes are the median of 200 batches"
    yield Figure("augmentation", step + added, step, "<= 1.02", "s", note)


def seconds(read: Callable[[int], object], step: int) -> float:
    """Return the CPU seconds of the batch of a step."""
    begun = time.process_time()
    read(step)
    return time.process_time() - begun


def packing(_: str | None) -> Iterator[Figure]:
    """Compare the inputs of packed windows with their inputs that are not padding."""
    config = TextConfig(packing="documents", window=512, masking=MaskingConfig())
    packed: Any = config.build().train
    padding: float = packed.source.padding
    note = "inputs of windows of 512 bytes of Python's standard library, over those without padding"
    yield Figure("packing", 1.0, 1 - padding, "<= 1.02", "", note)


PARTS: Mapping[str, Callable[[str | None], Iterator[Figure]]] = {
    "cnn": cnn,
    "flops": flops,
    "augmentation": augmentation,
    "packing": packing,
    "steps": steps,
    "targets": targets,
}
