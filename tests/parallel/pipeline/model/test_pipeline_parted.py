"""Models of unlike parts on stages: how they are cut, and the same numbers as on one device."""

from functools import cache

import pytest
from pipeline_configs import drawn, experiment, same, trained

from jaxdist.errors import ConfigError
from jaxdist.hlo import ledger
from jaxdist.trees import tree_bytes

CNN = {"type": "cnn", "channels": [4, 8], "hidden": 24}
DIGITS = {"type": "images", "source": "digits"}


def cnn(mesh, pipeline=None, **options):
    return experiment(mesh, pipeline, model=CNN, data=DIGITS, **options)


def tied(mesh, pipeline=None, **args):
    model = {"type": "import", "path": "pipeline_parts:Tied", "args": args}
    loss = {"type": "classification"}
    return experiment(mesh, pipeline, model=model, data=DIGITS, loss=loss)


@cache
def alone():
    """The state that one device draws, and what it comes to."""
    made = cnn({"data": 1})
    begun = drawn(made)
    return begun, trained(made, begun)


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        pytest.param({"stage": 2}, {}, marks=pytest.mark.slow),
        # The schedule: tests/parallel/pipeline/executor.
        pytest.param({"stage": 4}, {"schedule": {"type": "zb_h1"}}, marks=pytest.mark.slow),
        ({"data": 2, "stage": 2}, {"layers": [1, 3], "activations": "stash"}),
    ],
    ids=str,
)
@pytest.mark.full
def test_unlike_parts_on_stages_equal_one_device(mesh, pipeline, devices):
    begun, expected = alone()
    same(trained(cnn(mesh, pipeline), begun), expected)


@pytest.mark.full
def test_a_parameter_of_two_chunks_sums_what_both_find(devices):
    cut = {"layers": [2, 2], "schedule": {"type": "gpipe"}}
    one = tied({"data": 1})
    begun = drawn(one)
    same(trained(tied({"stage": 2}, cut), begun), trained(one, begun))


def test_parts_are_cut_by_cost_and_what_they_store_is_told(devices):
    made = cnn({"stage": 2})
    first, _, *rows, slowest, _ = made.explained
    assert first.startswith("pipeline 1f1b: 4 parts in 2 chunks, balanced (time: % of all")
    # The second convolution, of 4 channels to 8 on a fourth of the pixels, costs most.
    assert [row.split()[2:4] for row in rows] == [["0-0", "(1)"], ["1-3", "(3)"]]
    assert slowest.startswith("slowest: chunk 1, ")
    told = f"each stage stores all parameters ({tree_bytes(made.program.model.params) / 1e6:.4g} MB"
    assert any(told in notice for notice in made.notices)


def test_stages_send_the_largest_boundary_and_gather_vectors(devices):
    program = cnn({"stage": 2}).program
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    sent = {}
    for collective in ledger(compiled, program.layout.mesh).collectives:
        sent.setdefault(collective.kind, []).append(collective.payload_bytes)
    # 4 rows of a microbatch; 4 x 4 pixels of 4 channels go from the first chunk to the second.
    assert set(sent.pop("collective-permute")) == {4 * 64 * 4}
    # The second chunk's: convolution, hidden layer, output.
    largest = (3 * 3 * 4 * 8 + 8) + (2 * 2 * 8 * 24 + 24) + (24 * 10 + 10)
    assert sent.pop("all-gather") == [2 * largest * 4]
    assert sum(sent.pop("all-reduce")) < 64
    assert not sent


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: cnn({"stage": 8}), r"4 parts cannot fill 8 chunks .*use 8 parts or more, or a "),
        (lambda: cnn({"stage": 2}, {"layers": [4]}),
         r"layers \[4\] are 1 counts that add up to 4, for 2 chunks .* and 4 parts"),
        (lambda: cnn({"stage": 2, "tensor": 2}),
         r": mesh\.tensor 2 cannot be .* mesh\.stage for a model with `parts.* to mesh\.data"),
        (lambda: tied({"stage": 2}, table="bfloat16"), "parameters .* bfloat16 and float32: use"),
        (lambda: tied({"stage": 2}, {"layers": [3, 1]}, fault="dtype"),
         "activations between chunks .* bfloat16 and float32: use a single dtype"),
        (lambda: tied({"stage": 2}, fault="rows"), r"part 2 of the model gave .* \[1, 16\] for 16"),
        (lambda: tied({"stage": 2}, fault="tuple"), r"part 2 of the model gave tuple \[\] for 16"),
        (lambda: tied({"stage": 2}, fault="buffers"), "Tied keeps buffers .* leave out mesh.stage"),
    ],
)  # fmt: skip
def test_what_parts_cannot_be_is_refused(made, message, devices):
    with pytest.raises(ConfigError, match=message):
        made()
