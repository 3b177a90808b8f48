"""Tensor and sequence parallelism in the compiled step: what the tensor axis carries, and numbers.

A block is the `[B, L, D]` of one device's rows, float32. Megatron's bound (Shoeybi et al. 2019,
arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2): two
all-reduces of a block a layer in each direction, one for the embedding, one in the head's gradient.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError, ShardingError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.experiment.flops import model_flops
from jaxdist.hlo import ledger
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.runtime.topology import topology_devices
from jaxdist.sharding import ShardingConfig, make_layout

LAYERS, BATCH, LENGTH, EMBED, VOCAB, DATA, TENSOR = 2, 32, 64, 64, 4096, 2, 4
BLOCK_BYTES = BATCH // DATA * LENGTH * EMBED * 4
LOGITS_BYTES = BATCH // DATA * LENGTH * VOCAB * 4
ALL_REDUCES = 4 * LAYERS + 2
SPLIT: dict[str, str | None] = {"residual_seq": "tensor"}


def experiment(
    rules, reduce=None, *, devices=None, mesh=None, window=LENGTH, zero=0, ring=False, **model
):
    sections = {
        "model": {
            "type": "gpt", "layers": LAYERS, "embed": EMBED, "heads": 4, "vocab_multiple": VOCAB,
            **model,
        },
        "data": {"type": "synthetic", "kind": "tokens", "window": window, "heldout_examples": 0},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"steps": 9, "batch_size": BATCH},
        "parallel": {"reduce": reduce, "zero": {"stage": zero}},
        "sharding": {"rules": rules, "collective_matmul": ring},
        "mesh": mesh or {"data": DATA, "tensor": TENSOR},
    }  # fmt: skip
    return build(validate(Document(sections), ExperimentConfig), devices=devices)


@cache
def compiled(cell):
    """The ledger of a cell, such as "cpu split", and the FLOPs of a device's share of the model."""
    devices = topology_devices("v5e:2x4") if "tpu" in cell else jax.devices()
    reduce = {"type": "xla"} if "manual" in cell else None
    found = experiment(SPLIT if "split" in cell else {}, reduce, devices=devices)
    program = found.program
    step = program.train.lower(program.state_shapes, program.batch).compile()
    flops = model_flops(found.config, devices[0]) / len(devices)
    return ledger(step, program.layout.mesh), flops


def on_tensor_axis(found):
    return [c for c in found.collectives if c.axes is None or "tensor" in c.axes]


CELLS = (
    "cpu",
    "cpu split",
    *(
        pytest.param(cell, marks=[pytest.mark.needs_libtpu, *marks])
        for cell, marks in (
            ("tpu", [pytest.mark.full]),
            ("tpu manual", [pytest.mark.slow]),
            ("tpu split", [pytest.mark.full]),
        )
    ),
)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.every(2)
def test_neither_logits_nor_the_table_are_gathered(cell, devices):
    found, ideal_flops = compiled(cell)
    collectives = on_tensor_axis(found)
    # XLA:CPU puts three of a block into one all-reduce.
    assert max(c.payload_bytes for c in collectives) <= 3 * BLOCK_BYTES < LOGITS_BYTES / 20
    assert found.flops_high / ideal_flops == pytest.approx(1, abs=0.03)


@pytest.mark.full
@pytest.mark.needs_libtpu
@pytest.mark.parametrize("cell", ["tpu", pytest.param("tpu manual", marks=pytest.mark.slow)])
def test_the_tensor_axis_carries_what_the_bound_says(cell):
    found, _ = compiled(cell)
    # XLA:TPU makes some all-reduces a float32 reduce-scatter and the all-gather of what the next
    # matmul reads, which is bfloat16 where that matmul rounds to it: which ones varies.
    reduced = sum(
        c.payload_bytes * c.times_high for c in on_tensor_axis(found) if c.kind != "all-gather"
    )
    assert reduced == pytest.approx(BLOCK_BYTES * ALL_REDUCES, rel=0.03)
    bound = 2 * (TENSOR - 1) / TENSOR * BLOCK_BYTES * ALL_REDUCES
    assert 0.75 * bound <= found.sent_bytes("tensor") <= 1.02 * bound


@pytest.mark.full
@pytest.mark.needs_libtpu
def test_a_split_sequence_turns_all_reduces_into_their_halves():
    whole, split = (compiled(cell)[0] for cell in ("tpu", "tpu split"))
    large = [c for c in on_tensor_axis(split) if c.payload_bytes >= BLOCK_BYTES / 4]
    assert {c.kind for c in large} == {"reduce-scatter", "all-gather"}
    for kind in ("reduce-scatter", "all-gather"):
        assert sum(c.times_high for c in large if c.kind == kind) == ALL_REDUCES
        assert not any(c.kind == kind for c in on_tensor_axis(whole))
    assert split.sent_bytes("tensor") <= 1.01 * whole.sent_bytes("tensor")


@pytest.mark.full
def test_a_split_sequence_holds_less(devices):
    whole, split = (compiled(cell)[0].memory for cell in ("cpu", "cpu split"))
    assert split.temp_bytes < 0.95 * whole.temp_bytes


def losses_and_params(mesh, rules=SPLIT, steps=3, **settings):
    count = np.prod([*mesh.values()])
    found = experiment(
        rules, mesh=mesh, devices=jax.devices()[:count], window=16, vocab_multiple=8, **settings
    )
    state, losses = found.program.init(), []
    with found.loader.batches() as batches:
        for batch in itertools.islice(batches, steps):
            state, metrics = found.program.train(state, batch)
            losses.append(float(metrics[0]))
    return losses, jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def alone():
    return losses_and_params({"data": 1}, {})


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        # Without a reduction of ours: tests/equivalence.
        pytest.param({"data": 2, "tensor": 4}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"tensor": 4, "data": 2},
            {"reduce": {"type": "ring"}, "remat": "dots"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": 4, "tensor": 2},
            {"reduce": {"type": "xla"}, "zero": 3, "remat": "minimal"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"data": 2, "tensor": 4},
            {"ring": True, "zero": 3, "remat": "minimal"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": 4, "tensor": 2},
            {"ring": True, "reduce": {"type": "ring"}, "zero": 2, "remat": "full"},
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
@pytest.mark.full
def test_a_split_sequence_equals_one_device(mesh, settings, alone):
    losses, params = losses_and_params(mesh, **settings)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
    same = partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(same, params, alone[1])
    # The steps have moved the parameters by hundreds of times what they may differ by.
    assert np.abs(params["norm"]["scale"] - 1).max() > 5e-4


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"(?s)\(32, 30, 64\).*'residual_seq' of length\s+30 .*'tensor'\s+of\s+size\s+4 "
        r".*remainder\s+2.*residual_seq:\s+null",
    ):
        experiment(SPLIT, window=30)


def test_an_activation_names_as_many_dims_as_it_has():
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=2, tensor=4)))
    with pytest.raises(ShardingError, match=r"\(2, 8, 4\) has 3 dims, but 2 .*\('batch', 'seq'\)"):
        layout(jnp.ones((2, 8, 4)), "batch", "seq")


def test_a_move_between_layouts_that_are_alike_says_nothing():
    mesh = build_mesh(MeshConfig(data=2, tensor=4))
    x = jnp.ones((2, 8, 4))
    dims, was = ("batch", "seq", "embed"), ("batch", "residual_seq", "embed")
    assert make_layout(ShardingConfig(), mesh)(x, *dims, was=was) is x
    moved = make_layout(ShardingConfig(rules=SPLIT), mesh)(x, *was, was=dims)
    assert moved.sharding == NamedSharding(mesh, PartitionSpec("data", "tensor", None))
