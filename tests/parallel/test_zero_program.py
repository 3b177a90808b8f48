"""What ZeRO does to the compiled step: bytes, collectives and memory, from the ledger."""

import json
from functools import partial

import jax
import pytest

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import ledger, program_memory
from jaxdist.trees import tree_bytes

full = partial(pytest.param, marks=pytest.mark.full)
slow = partial(pytest.param, marks=pytest.mark.slow)

DEVICES = 8
STATE_BYTES = {0: 12, 1: 4 + 8 / DEVICES, 2: 4 + 8 / DEVICES, 3: 12 / DEVICES}
"""Of float32 parameters and AdamW's moments, a parameter."""


def program_of(
    stage,
    reduce,
    *,
    remat="full",
    layers=4,
    window=16,
    microbatches=1,
    mesh=None,
    zero=None,
    devices=None,
    **parallel,
):
    sections = {
        "model": {"type": "gpt", "layers": layers, "embed": 256, "heads": 8, "remat": remat},
        "data": {"type": "synthetic", "kind": "tokens", "window": window, "heldout_examples": 0},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 9, "batch_size": 8 * microbatches, "microbatches": microbatches},
        "parallel": {
            "reduce": reduce,
            "zero": {"stage": stage, **(zero or {})},
            **parallel,
        },
        "mesh": mesh or {"data": DEVICES},
    }
    return build(validate(Document(sections), ExperimentConfig), devices=devices).program


def compiled_anew(*args, **settings):
    program = program_of(*args, **settings)
    step = program.train.lower(program.state_shapes, program.batch).compile()
    return ledger(step, program.layout.mesh), tree_bytes(program.model.params)


COMPILED = {}


def compiled(*args, **settings):
    """What one test has compiled others read too."""
    key = json.dumps([args, settings], sort_keys=True, default=str)
    if key not in COMPILED:
        COMPILED[key] = compiled_anew(*args, **settings)
    return COMPILED[key]


LAYERS = {"type": "xla", "bucket_bytes": 2**18}
"""Which sends a layer of this small model at a time, as all do where layers are large."""


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
@pytest.mark.full
def test_the_explicit_form_sends_what_the_bound_says(stage, devices):
    """Two passes over the parameters, three in stage 3 (arXiv 1910.02054, section 7)."""
    found, model_bytes = compiled(stage, {"type": "xla"})
    passes = 3 if stage == 3 else 2
    assert found.sent_bytes("data") == pytest.approx(
        passes * (DEVICES - 1) / DEVICES * model_bytes, rel=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [slow(None), {"type": "xla"}], ids=["auto", "manual"])
def test_elementwise_remat_keeps_no_gathered_parameters(reduce, devices):
    whole, some = (compiled(3, reduce, remat=remat)[0] for remat in ("none", "elementwise"))
    assert some.memory.temp_bytes <= whole.memory.temp_bytes
    assert some.sent_bytes("data") == whole.sent_bytes("data")


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
@pytest.mark.parametrize("reduce", [None, {"type": "xla"}], ids=["auto", "manual"])
@pytest.mark.every(2)
def test_the_state_is_split(stage, reduce, devices):
    found, model_bytes = compiled(stage, reduce)
    per_parameter = found.memory.argument_bytes / (model_bytes / 4)
    assert per_parameter == pytest.approx(STATE_BYTES[stage], rel=0.01)


@pytest.mark.full
def test_a_whole_gradient_exists_in_stage_1_only(devices):
    """Temporaries shrink by most of a gradient, 4 bytes a parameter."""
    (first, model_bytes), (second, _) = (compiled(stage, LAYERS) for stage in (1, 2))
    saved = first.memory.temp_bytes - second.memory.temp_bytes
    assert saved > 0.8 * (DEVICES - 1) / DEVICES * model_bytes


@pytest.mark.full
@pytest.mark.parametrize("stage", [slow(0), 1])
def test_a_gradient_is_reduced_in_place(stage, devices):
    """Beside it there are a layer (a fourth of this model) twice, and tensors that are no stack."""
    found, model_bytes = compiled(stage, LAYERS)
    assert found.memory.temp_bytes < 1.6 * model_bytes


@pytest.mark.slow
def test_microbatches_wait_for_the_last_one_to_be_reduced_in_stage_1_alone(devices):
    once, _ = compiled(1, {"type": "xla"}, microbatches=3)
    each, _ = compiled(2, {"type": "xla"}, microbatches=3)
    # One scatter and one gather, against three scatters and one gather.
    assert each.sent_bytes("data") / once.sent_bytes("data") == pytest.approx(4 / 2, rel=0.01)


@pytest.mark.full
def test_layers_are_gathered_one_at_a_time(devices):
    found, model_bytes = compiled(3, {"type": "xla"})
    largest = max(c.payload_bytes for c in found.collectives if c.kind == "all-gather")
    assert largest < model_bytes / 4


@pytest.mark.parametrize("stage", [slow(2), 3])
@pytest.mark.full
def test_what_a_layer_sends_is_one_message_a_step_of_the_ring(stage, devices):
    """Not one for each of its seven kernels; twice the embedding, and the norms' all-reduce."""
    found, _ = compiled(stage, {"type": "ring"})
    permutes = sum(c.times_high for c in found.collectives if c.kind == "collective-permute")
    assert permutes == (4 * stage + 2 + 2) * (DEVICES - 1)
    assert numbers_of(found) == 3  # the loss, its weight, the gradient's norm


def numbers_of(found):
    """How many tensors all-reduces of XLA's own take."""
    return sum(c.times_high * len(c.dtypes) for c in found.collectives if c.kind == "all-reduce")


@pytest.mark.slow
def test_between_processes_of_cpus_few_messages_are_sent(monkeypatch, devices):
    """Gloo sends each tensor of a collective by itself: gradients are one; sums are permuted."""
    several, _ = compiled(0, {"type": "xla"})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    jax.clear_caches()
    packed, _ = compiled_anew(0, {"type": "xla"})
    assert packed.sent_bytes("data") == pytest.approx(several.sent_bytes("data"), rel=1e-4)
    assert numbers_of(packed) == 1 < numbers_of(several)


def dtypes(found, *kinds):
    """On the wire of the larger collectives of these kinds."""
    larger = [c for c in found.collectives if c.kind in kinds and c.payload_bytes > 2**16]
    return {dtype for c in larger for dtype in c.dtypes}


@pytest.mark.parametrize("stage", [slow(0), slow(1), full(2), slow(3)])
@pytest.mark.slow
def test_gradients_travel_in_the_dtype_asked_for(stage, tpu_devices):
    """On the TPU program, since XLA:CPU widens bfloat16 reductions."""
    found, _ = compiled(stage, {"type": "xla"}, reduce_dtype="bfloat16", devices=tpu_devices)
    assert dtypes(found, "reduce-scatter", "all-reduce") == {"bf16"}


@pytest.mark.full
def test_parameters_are_gathered_in_the_dtype_asked_for(tpu_devices):
    found, _ = compiled(3, {"type": "xla"}, zero={"gather_dtype": "bfloat16"}, devices=tpu_devices)
    assert dtypes(found, "all-gather") == {"bf16"}
    assert dtypes(found, "reduce-scatter", "all-reduce") == {"bf16"}


@pytest.mark.parametrize(
    ("stage", "algorithm"),
    [
        slow(1, "xla"),
        slow(2, "ring"),
        full(3, "xla"),
        slow(1, "ring"),
        slow(2, "xla"),
        slow(3, "ring"),
    ],
)
@pytest.mark.slow
def test_a_tensor_axis_goes_on_splitting_what_travels(stage, algorithm, devices):
    """Each device sends its own half of the model, and nothing of it over the tensor axis."""
    found, model_bytes = compiled(stage, {"type": algorithm}, mesh={"data": 4, "tensor": 2})
    passes = 3 if stage == 3 else 2
    assert found.sent_bytes("data") == pytest.approx(passes * 3 / 4 * model_bytes / 2, rel=0.04)
    gathered = [c for c in found.collectives if c.axes == ("tensor",) and c.kind == "all-gather"]
    assert sum(c.times_high * c.payload_bytes for c in gathered) < 0.02 * model_bytes


@pytest.mark.parametrize("stage", [slow(2), 3])
@pytest.mark.full
def test_a_named_axis_of_size_1_splits_nothing_of_what_travels(stage, devices):
    program = program_of(stage, {"type": "ring"}, mesh={"data": 4, "stage": 1, "tensor": 2})
    state, _ = jax.eval_shape(program.train, program.state_shapes, program.batch)
    assert jax.tree.structure(state) == jax.tree.structure(program.state_shapes)


@pytest.mark.slow
def test_layers_fetched_ahead_send_the_same_and_cost_a_layer(devices):
    (found, model_bytes), (plain, _) = (
        compiled(3, {"type": "xla"}, remat="full", zero={"prefetch": ahead})
        for ahead in (True, False)
    )
    assert found.sent_bytes("data") == pytest.approx(plain.sent_bytes("data"), rel=1e-3)
    assert found.flops_high == pytest.approx(plain.flops_high, rel=1e-3)
    # A fourth of the model is a layer: one in use, one that comes, and their copies in the loop.
    more = found.memory.temp_bytes - plain.memory.temp_bytes
    assert 0 < more < 0.8 * model_bytes


@pytest.mark.parametrize(("remat", "said"), [("dots", "dots"), (["full", "none"], "full, none")])
def test_layers_fetched_ahead_are_recomputed(devices, remat, said):
    with pytest.raises(ConfigError, match=rf"remat is {said}: set model\.remat: full, or para"):
        compiled(3, {"type": "xla"}, remat=remat, zero={"prefetch": True})


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "reduce"), [(0, None), (2, LAYERS), (3, LAYERS), (3, None)])
def test_what_some_blocks_keep_lies_between_what_none_and_all_keep(stage, reduce, devices):
    none, some, full = (
        compiled(stage, reduce, remat=remat, layers=8, window=256)[0]
        for remat in ("none", ["full", "none"], "full")
    )
    assert none.memory.temp_bytes > some.memory.temp_bytes > full.memory.temp_bytes
    assert 2 * some.flops_high == pytest.approx(none.flops_high + full.flops_high, rel=1e-3)
    assert 2 * some.sent_bytes("data") == pytest.approx(
        none.sent_bytes("data") + full.sent_bytes("data"), rel=1e-3
    )


@pytest.mark.full
def test_no_device_ever_holds_the_whole_model(devices):
    """Not even while it is initialised: three arrays a parameter, and of one in the making."""
    program = program_of(3, None)
    found = program_memory(jax.jit(program.init).lower().compile())
    model_bytes = tree_bytes(program.model.params)
    assert found.output_bytes / model_bytes == pytest.approx(3 / DEVICES, rel=0.01)
    assert found.temp_bytes < 2 / DEVICES * model_bytes
