"""Layers that do not divide over the chunks: how they are cut, and equal numbers."""

from functools import cache, partial

import jax
import pytest
from pipeline_configs import TOKENS, config_of, drawn, experiment, same, trained

from jaxdist.experiment import explain_config
from jaxdist.hlo import ledger
from jaxdist.trees import tree_bytes

slow = partial(pytest.param, marks=pytest.mark.slow)


@cache
def alone(**model):
    """The state that one device draws, and what it comes to."""
    made = experiment({"data": 1}, model=model)
    begun = drawn(made)
    return begun, trained(made, begun)


def layers_of(made):
    """By chunk."""
    assert made.program.compute is not None
    return made.program.compute.cut.layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline", "model"),
    [
        slow({"data": 2, "stage": 4}, {"schedule": {"type": "zb_h1"}}, {}),
        slow({"stage": 2}, {"schedule": {"type": "v_min"}, "activations": "stash"}, {}),
        ({"stage": 2, "tensor": 2}, {"layers": [5, 1], "ahead": True}, {}),
        # Uneven over the chunks, but not over the stages, on three axes.
        ({"data": 2, "stage": 2, "tensor": 2}, {"schedule": {"type": "zb_v"}}, {}),
        slow(
            {"stage": 2},
            {"layers": [2, 1, 1, 2], "schedule": {"type": "interleaved", "chunks": 2}},
            {"remat": "full"},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_uneven_chunks_equal_one_device(mesh, pipeline, model, devices):
    begun, expected = alone(**model)
    same(trained(experiment(mesh, pipeline, model=model), begun), expected)


@pytest.mark.slow
def test_both_passes_of_a_chunk_know_the_same_residuals(devices):
    """Traced twice, jax kept rotary tables that are equal once each, or once together."""
    model = {"layers": 3, "remat": ["full", "none"]}
    for activations in ("stash", "recompute"):
        pipeline = {"schedule": {"type": "zb_h1"}, "activations": activations}
        program = experiment({"stage": 2, "tensor": 2}, pipeline, model=model).program
        state, _ = jax.eval_shape(program.train, program.state_shapes, program.batch)
        assert jax.tree.structure(state) == jax.tree.structure(program.state_shapes)


@pytest.mark.full
def test_a_cut_is_explained_and_what_it_stores_is_told(devices):
    made = experiment({"stage": 4})
    assert explain_config(config_of({"stage": 4})) == made.explained
    first, header, *rows, slowest, exact = made.explained
    assert first.startswith("pipeline 1f1b: 6 layers in 4 chunks, balanced (time: % of all")
    assert header.split() == ["chunk", "stage", "layers", "time"]
    assert [row.split()[3] for row in rows] == ["(1)", "(2)", "(2)", "(1)"]
    assert sum(float(row.split()[-1]) for row in rows) == pytest.approx(100, abs=0.1)
    assert slowest.startswith("slowest: chunk 1, ")
    assert exact == "no other division into chunks has a faster slowest chunk"
    blocks = made.program.model.params["blocks"]
    (notice,) = made.notices
    assert notice.startswith("6 layers do not divide by 4 stages, so each stage stores all layers")
    assert f"{tree_bytes(blocks) / 1e6:.4g} MB of parameters, but computes" in notice
    for leaf in jax.tree.leaves(made.program.state_shapes.params["blocks"]):
        assert leaf.sharding.shard_shape(leaf.shape) == leaf.shape


def test_a_heavy_head_makes_the_last_chunk_shorter(devices):
    for vocabulary, layers in ((64, (3, 2)), (1024, (4, 1))):
        data = {**TOKENS, "vocab_size": vocabulary}
        made = experiment({"stage": 2}, data=data, model={"layers": 5})
        assert layers_of(made) == layers


def test_layers_as_given_are_explained_beside_the_balanced_cut(devices):
    first = experiment({"stage": 2}, {"layers": [5, 1]}).explained[0]
    assert (
        "6 layers in 2 chunks, as given; the balanced counts 3, 3 would give a slowest chunk of 5"
        in first
    )
    (even,) = experiment({"stage": 2}).explained
    assert even == "pipeline 1f1b: 6 layers in 2 chunks, 3 in each"
    interleaved = {"schedule": {"type": "interleaved", "chunks": 2}}
    uneven = experiment({"stage": 2}, interleaved)
    # 6 layers in 4 chunks, but they divide by the stages: the state stays split.
    assert (layers_of(uneven), uneven.notices) == ((1, 2, 2, 1), ())


@pytest.mark.slow
def test_stages_send_activations_and_gather_what_they_found_for_whole_layers(devices):
    made = experiment({"stage": 4})
    program = made.program
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    sent = ledger(compiled, program.layout.mesh).collectives
    blocks = tree_bytes(program.model.params["blocks"])
    rest = tree_bytes(program.model.params) - blocks
    bytes_of = {
        kind: sum(c.payload_bytes for c in sent if c.kind == kind)
        for kind in ("collective-permute", "all-gather", "all-reduce")
    }
    activations = 16 // 4 * 8 * 32 * 4
    assert bytes_of["collective-permute"] == 2 * activations
    # Four chunks of two layers each, one of them padding in two.
    assert bytes_of["all-gather"] == blocks * 8 / 6
    assert bytes_of["all-reduce"] < 1.1 * rest + 4096
    assert {c.kind for c in sent} == {*bytes_of}


@pytest.mark.parametrize(
    ("mesh", "data", "explained"),
    [
        ({"data": 4}, TOKENS, ()),
        ({"stage": 2}, TOKENS, ("pipeline 1f1b: 6 layers in 2 chunks, 3 in each",)),
        ({"stage": 2}, {"type": "text", "files": "none.txt"},
         ("the pipeline is unknown before the data and the model are read",)),
    ],
)  # fmt: skip
def test_a_config_explains_its_pipeline_where_data_is_at_hand(mesh, data, explained):
    assert explain_config(config_of(mesh, data=data)) == explained
