"""Replicas of every plan's state are equal to the bit, and what is compared of each is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flips import with_bit_flipped

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.mesh import Device
from jaxdist.train.replicas import replicas_of
from jaxdist.train.state import TrainState
from jaxdist.trees import flatten_with_names

SECTIONS = {
    "model": {"type": "mlp", "hidden": [16]},
    "data": {
        "type": "synthetic", "kind": "images", "height": 4, "width": 4, "channels": 1,
        "classes": 6, "examples": 256, "heldout_examples": 0,
    },
    "optim": {"type": "adamw", "learning_rate": 0.01, "clip_norm": 1.0},
    "train": {"steps": 3, "batch_size": 16},
}  # fmt: skip
WHOLE, TENSOR = {"data": 8}, {"data": 4, "tensor": 2}
RING = {"type": "ring"}


def plan(mesh: dict[str, int], reduce: Any, stage: int, **marks: bool) -> Any:
    name = f"{'-'.join(mesh)}-{reduce['type'] if reduce else 'auto'}-zero{stage}"
    return pytest.param(
        mesh, reduce, stage, id=name, marks=[getattr(pytest.mark, m) for m in marks]
    )


PLANS = [
    plan(WHOLE, None, 0, full=True),
    plan(WHOLE, None, 1),
    plan(WHOLE, None, 2, slow=True),
    plan(WHOLE, None, 3, slow=True),
    plan(TENSOR, None, 0, full=True),
    plan(TENSOR, None, 1, slow=True),
    plan(WHOLE, RING, 0, full=True),
    plan(WHOLE, RING, 1, slow=True),
    plan(WHOLE, RING, 2, full=True),
    plan(TENSOR, RING, 0, full=True),
    plan(TENSOR, RING, 3),
]


@pytest.mark.parametrize(("mesh", "reduce", "stage"), PLANS)
@pytest.mark.every(2)
def test_no_plan_gives_a_false_alarm_and_a_flip_is_found_while_it_lasts(
    mesh, reduce, stage, devices
):
    parallel = {"reduce": reduce, "zero": {"stage": stage, "whole_below": 0}}
    config = {**SECTIONS, "mesh": mesh, "parallel": parallel}
    made = build(validate(Document(config), ExperimentConfig), devices=devices)
    replicas, state = replicas_of(made.program), made.program.init()
    with made.loader.batches() as batches:
        for step in range(3):
            state, _ = made.program.train(state, next(batches))
            digests = np.asarray(replicas.digests(state))
            assert replicas.differences(digests) == (), step
        if stage < 3:
            state, odd = flipped(state, devices[5]), (devices[5],)
            found = replicas.differences(np.asarray(replicas.digests(state)))
            assert [(one.leaf, one.odd) for one in found] == [("params/layers/0/kernel", odd)]
            # With ZeRO 1 and 2 the next step gathers parameters anew from shards.
            state, _ = made.program.train(state, next(batches))
            left = replicas.differences(np.asarray(replicas.digests(state)))
            assert [one.odd for one in left][:1] == ([] if stage else [odd])
    coverage = replicas.coverage
    assert (coverage.held_bytes, coverage.compared_bytes) == counted(state)


def flipped(state: TrainState, device: Device) -> TrainState:
    """The state with one bit of one device's replica of the first kernel changed."""
    leaves, structure = jax.tree.flatten(state.params)
    assert leaves[1].ndim == 2
    leaves[1] = with_bit_flipped(leaves[1], 20, device)
    return replace(state, params=jax.tree.unflatten(structure, leaves))


def counted(state: TrainState) -> tuple[int, int]:
    """Bytes that the first device holds, and those of them that another one holds too."""
    held = compared = 0
    for _, leaf in flatten_with_names(state):
        first, *_ = leaf.addressable_shards
        holders = Counter(str(shard.index) for shard in leaf.addressable_shards)
        held += first.data.nbytes
        compared += first.data.nbytes * (holders[str(first.index)] > 1)
    return held, compared
