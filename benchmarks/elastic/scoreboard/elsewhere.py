"""R18 and R29, on the devices of one process: batches that follow the mesh, and flipped bits."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.elastic.scoreboard.row import Row, of
from jaxdist.checkpoint.snapshots import Snapshots, load_snapshot
from jaxdist.config import Document, validate
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.mesh import Device
from jaxdist.train.replicas import replicas_of
from jaxdist.train.rescale import Sizes, extended
from jaxdist.train.state import TrainState

ROWS, EPOCHS, RATE = 60, 2, 0.01
"""The rows of a device, the epochs, and the learning rate on a mesh of four devices."""
WORKERS = (4, 3, 5, 2)
BAND = 0.1
"""The largest allowed excess of the mean loss of the last steps over a run of one size."""


def experiment_of(devices: int, seed: int, sizes: Sizes) -> Experiment:
    """Build an MLP on digits whose batch is proportional to the number of devices."""
    full = ROWS * WORKERS[0]
    scale = {"batch_size": full, "learning_rate": RATE, "rule": "linear"}
    told = {
        "model": {"type": "mlp", "hidden": [32]},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "adamw", "scale_from": scale, "schedule": {"type": "cosine"}},
        "train": {"epochs": 2.0 * EPOCHS, "batch_size": ROWS * devices, "rescaled_from": full},
        "elastic": {"batch": "rescale"},
        "mesh": {"data": devices},
        "seed": seed,
    }
    config = validate(Document(told), ExperimentConfig)
    return build(config, devices=jax.devices()[:devices], sizes=sizes)


def trained(changes: Sequence[tuple[int, int]], seed: int) -> tuple[list[int], bool, float]:
    """Train on changing numbers of devices.

    Args:
      changes: numbers of devices, and of steps on them; the last train to the end of the run.
      seed: the seed of the run.

    Returns:
      The used examples in order, whether each learning rate obeyed the rule, and the last loss.
    """
    full = ROWS * WORKERS[0]
    used: list[int] = []
    losses: list[float] = []
    kept, step, state, rates = None, 0, None, True
    with tempfile.TemporaryDirectory() as name:
        for at, (devices, count) in enumerate(changes):
            sizes = extended(kept, step, ROWS * devices, full)
            kept = [[*one] for one in sizes]
            experiment = experiment_of(devices, seed, sizes)
            (stage,), program = experiment.stages, experiment.stages[0].program
            state = _moved(state, experiment, Path(name), step)
            last = stage.last_step if at == len(changes) - 1 else step + count
            base, total = len(used), full * _steps(experiment)
            with stage.loader.batches(step - stage.first_step) as batches:
                for index in range(step, last):
                    state, values = program.train(state, next(batches))
                    found = dict(zip(program.metrics, np.asarray(values).tolist(), strict=True))
                    losses.append(found["loss"])
                    done = (base + (index - step) * ROWS * devices) / total
                    wanted = RATE * devices / WORKERS[0] * 0.5 * (1 + np.cos(np.pi * min(done, 1)))
                    rates = rates and bool(np.isclose(found["learning_rate"], wanted, rtol=1e-4))
                    used += stage.loader.indices(index - stage.first_step).tolist()
            step = last
    return used, rates, float(np.mean(losses[-5:]))


def _steps(experiment: Experiment) -> int:
    """Return the number of steps of a run of one size."""
    train = experiment.config.train
    assert train.epochs is not None
    return round(train.epochs * len(experiment.dataset.train) / train.full_batch_size)


def _moved(state: TrainState | None, experiment: Experiment, folder: Path, step: int) -> TrainState:
    """Return the state on another mesh, through a snapshot; without a state, the initial state."""
    if state is None:
        return experiment.program.init()
    with Snapshots(folder, 0, 1, print) as snapshots:
        snapshots.take(step, state, {})
    return load_snapshot(folder, step, experiment.program.state_shapes)[0]


def changed_workers(trials: int, seed: int) -> Row:
    """Try R18: 4, 3, 5, 2 workers for random numbers of steps, with their batches and rates."""
    rng = random.Random(seed)
    exact, ruled, within = 0, 0, 0
    for trial in range(trials):
        changes = [(devices, rng.randint(2, 6)) for devices in WORKERS]
        used, rates, loss = trained(changes, trial)
        _, _, plain = trained([(WORKERS[0], 0)], trial)
        count = len(set(used))
        epochs = [used[at : at + count] for at in range(0, len(used) - count + 1, count)]
        exact += all(len(set(epoch)) == count for epoch in epochs) and len(epochs) >= EPOCHS
        ruled += rates
        within += loss <= plain * (1 + BAND) + 0.02
    words = (
        f"each example once an epoch {of(exact, trials)}; the rate by the rule "
        f"{of(ruled, trials)}; the loss within {BAND:.0%} of a run of 4's {of(within, trials)}"
    )
    return Row(words, exact == ruled == within == trials)


def flipped_bits(trials: int, seed: int) -> Row:
    """Try R29: flip a random bit of a random replica, which the next digests must find."""
    rng, devices = random.Random(seed), jax.devices()
    experiment = experiment_of(len(devices), 0, ())
    replicas, state = replicas_of(experiment.program), experiment.program.init()
    quiet = not replicas.differences(np.asarray(replicas.digests(state)))
    named = 0
    for _ in range(trials):
        leaves, structure = jax.tree.flatten(state)
        at, device = rng.randrange(len(leaves)), rng.choice(devices)
        leaves[at] = with_bit_flipped(leaves[at], rng, device)
        other = jax.tree.unflatten(structure, leaves)
        found = replicas.differences(np.asarray(replicas.digests(other)))
        named += [one.odd for one in found] == [(device,)]
    words = f"found at the next comparison, the device named {of(named, trials)}"
    return Row(words, quiet and named == trials)


def with_bit_flipped(leaf: jax.Array, rng: random.Random, device: Device) -> jax.Array:
    """Return a copy of a leaf with a random bit flipped in the shard of one device."""
    parts = {shard.device: np.array(shard.data) for shard in leaf.addressable_shards}
    octets = parts[device].reshape(-1).view(np.uint8)
    octets[rng.randrange(octets.size)] ^= np.uint8(1 << rng.randrange(8))
    arrays = [jax.device_put(part, holder) for holder, part in parts.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)
