"""Mesh axes `context` and `expert`: a config trains as on one device, and bad input is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.trees import flatten_with_names

BASE = {
    "model": {
        "type": "gpt", "layers": 1, "embed": 16, "heads": 4, "kv_heads": 2, "mlp": 16,
        "vocab_multiple": 8, "isolate_documents": True,
    },
    "data": {
        "type": "synthetic", "kind": "tokens", "vocab_size": 13, "window": 16, "examples": 8,
        "heldout_examples": 4,
    },
    "optim": {"type": "sgd", "learning_rate": 0.1},
    "train": {"steps": 1, "batch_size": 4},
}  # fmt: skip
EXPERTS = {
    "count": 4, "top_k": 2, "capacity_factor": 0.8, "balance_loss": 0.1, "z_loss": 0.01,
    "bias_rate": 0.01,
}  # fmt: skip
STAGED = {
    "model__experts": EXPERTS, "model__layers": 2, "train__microbatches": 2,
    "sharding__experts": "padded",
}  # fmt: skip


def experiment(mesh, **changes):
    sections = {name: dict(values) for name, values in BASE.items()} | {"mesh": mesh}
    for path, value in changes.items():
        section, name = path.split("__")
        sections.setdefault(section, {})[name] = value
    count = int(np.prod(list(mesh.values())))
    config = validate(Document(sections), ExperimentConfig)
    return build(config, devices=jax.devices()[:count])


def numbers(found):
    """Loss, loss of evaluation and each gradient."""
    program, state = found.program, found.program.init()
    biases = jax.tree.map(lambda b: jax.random.normal(jax.random.key(1), b.shape), state.buffers)
    state = replace(state, buffers=biases)
    step = program.gradients(state, found.loader.batch(0))
    batch = next(found.heldout.evaluation_batches())
    sums = program.evaluate(state.params, state.buffers, batch)
    means = {"loss": step.sums["loss"], "evaluation": sums["loss"]}
    stack = getattr(program.compute, "stack", None)
    grads = {
        # Stages store layers in an order of their own.
        name: np.asarray(stack.restore(leaf) if stack and name.startswith("blocks/") else leaf)
        for name, leaf in flatten_with_names(step.grads)
    }
    return {name: np.asarray(m.total / m.weight) for name, m in means.items()} | grads


# The settings of the slow rows are in the others and in the draws of `.ci/run`, in other pairs.
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        *(
            pytest.param(mesh, changes, marks=pytest.mark.slow)
            for mesh, changes in (
                ({"data": 2, "context": 2}, {"sharding__context": "ring"}),
                ({"expert": 2, "stage": 2}, STAGED),
                ({"expert": 2, "stage": 2, "tensor": 2}, STAGED),
                ({"data": 2, "context": 2, "stage": 2}, {
                    "sharding__context": "gather", "model__layers": 2, "train__microbatches": 2,
                    "parallel__reduce": {"type": "ring"}, "parallel__zero": {"stage": 1},
                }),
                # The settings of plans with axis tensor and axis context.
                ({"context": 2, "tensor": 2}, {
                    "sharding__rules": {"residual_seq": "tensor", "embed": "context"},
                    "model__remat": "full",
                }),
                ({"data": 2, "context": 4}, {}),
                ({"data": 2, "context": 2, "tensor": 2}, {
                    "sharding__context": "ring", "sharding__context_order": "striped",
                    "sharding__rules": {"residual_seq": "tensor"}, "model__positions": 16,
                    "parallel__reduce": {"type": "ring"},
                    "parallel__zero": {"stage": 3, "whole_below": 0},
                }),
                ({"data": 2, "context": 4}, {
                    "model__attention_window": 5, "train__microbatches": 2, "model__remat": "full",
                    "loss__type": "next_token", "loss__chunks": 2,
                }),
                ({"expert": 4}, {
                    "sharding__rules": {"embed": "expert"}, "model__experts": EXPERTS,
                }),
                ({"context": 4, "data": 2}, {"sharding__context": "ring_ulysses"}),
                ({"data": 2, "context": 2, "tensor": 2}, {
                    "sharding__context": "gather", "sharding__context_order": "zigzag",
                }),
                ({"context": 4, "stage": 2}, {
                    "sharding__context": "gather_ulysses", "model__layers": 2,
                    "train__microbatches": 2,
                }),
                ({"expert": 2, "stage": 2}, {
                    **STAGED, "model__layers": 8,
                    "model__experts": {**EXPERTS, "every": 2, "router": "sigmoid"},
                    "parallel__pipeline": {"schedule": {"type": "interleaved", "chunks": 2}},
                }),
                ({"context": 2, "expert": 2, "stage": 2}, {
                    **STAGED, "sharding__context": "gather", "sharding__context_order": "zigzag",
                }),
                ({"context": 2, "expert": 2, "data": 2}, {
                    "sharding__context": "ring", "model__experts": EXPERTS,
                    "parallel__zero": {"stage": 3, "whole_below": 0},
                    "loss__type": "next_token", "loss__chunks": 2,
                }),
            )
        ),
        *(
            pytest.param(mesh, changes, marks=pytest.mark.full)
            for mesh, changes in (
                # The settings of plans with axes tensor and context in stages, where XLA on CPU
                # cannot split sequences further over axis tensor.
                ({"stage": 2, "context": 2, "tensor": 2}, {
                    "model__layers": 2, "train__microbatches": 2, "model__remat": "full",
                }),
                # Devices with different experts share the other parameters.
                ({"data": 2, "expert": 2}, {
                    "sharding__rules": {"embed": "expert"}, "model__remat": "full",
                    "model__experts": {**EXPERTS, "shared": 1}, "train__microbatches": 1,
                    "parallel__zero": {"stage": 3, "whole_below": 0},
                }),
                ({"data": 2, "expert": 2, "stage": 2}, {
                    "model__experts": {**EXPERTS, "capacity_factor": None, "shared": 1},
                    "model__layers": 3, "sharding__experts": "ring", "train__batch_size": 8,
                    "train__microbatches": 2, "parallel__zero": {"stage": 1},
                    "parallel__pipeline": {"activations": "stash"},
                }),
                ({"context": 4, "expert": 2}, {
                    "sharding__context": "ring", "sharding__context_order": "striped",
                    "sharding__experts": "padded", "train__microbatches": 2,
                    "model__experts": {**EXPERTS, "capacity_factor": None, "shared": 1},
                }),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.full
def test_a_config_trains_as_on_one_device(mesh, changes):
    alone = {
        name: value
        for name, value in changes.items()
        if name == "train__batch_size" or (name.startswith("model__") and name != "model__remat")
    }
    one, many = numbers(experiment({"data": 1}, **alone)), numbers(experiment(mesh, **changes))
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        pytest.param({"context": 4, "data": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"context": 2, "tensor": 2},
            {"sharding": {"rules": {"residual_seq": "tensor"}}},
            marks=pytest.mark.slow,
        ),
        # Before logits and targets were compared, XLA aborted here at a gather.
        pytest.param(
            {"tensor": 2, "context": 2, "data": 2},
            {"parallel": {"reduce": {"type": "tree"}}},
            marks=pytest.mark.full,
        ),
    ],
)
def test_predicted_positions_need_not_divide_as_sequences_do(mesh, sections):
    """BERT's head sees 6 of 16 positions."""
    model = {"type": "bert", "layers": 1, "embed": 16, "heads": 4, "mlp": 16, "positions": 16}
    data = {**BASE["data"], "masking": {"rate": 0.4}}
    plain = {**BASE, "model": {**model, "vocab_multiple": 8}, "data": data}

    def found(mesh, **more):
        count = int(np.prod(list(mesh.values())))
        config = validate(Document({**plain, **more, "mesh": mesh}), ExperimentConfig)
        return numbers(build(config, devices=jax.devices()[:count]))

    one, many = found({"data": 1}), found(mesh, **sections)
    for name, value in one.items():
        # The gradient of a key's bias is zero, but for rounding.
        most = 1e-5 * np.abs(value).max() + 1e-8
        np.testing.assert_allclose(many[name], value, atol=most, err_msg=name)


@pytest.mark.full
def test_the_choice_is_explained():
    found = experiment({"context": 2}, model__kv_heads=1)
    (line,) = (one for one in found.explained if one.startswith("context"))
    assert line.startswith(
        "context: attention by ring over 2 devices, zigzag order; bytes that a device rec"
    )
    assert found.layout.split.order == "zigzag"
    windowed = experiment({"context": 2}, model__kv_heads=1, model__attention_window=3)
    assert windowed.layout.split.order == "contiguous"
    odd = experiment({"context": 2}, model__kv_heads=1, data__window=18)
    assert odd.layout.split.order == "striped"


def test_a_caller_that_compiles_at_once_needs_no_trace(monkeypatch):
    traces = []
    monkeypatch.setattr("jaxdist.experiment.program._trace", lambda *given: traces.append(given))
    config = validate(Document({**BASE, "mesh": {"data": 1}}), ExperimentConfig)
    for traced in (True, False):
        build(config, devices=jax.devices()[:1], traced=traced)
    assert len(traces) == 1


def test_settings_without_effect_are_reported():
    found = experiment({"data": 1}, sharding__context="ring", sharding__context_order="zigzag")
    told = "\n".join(found.notices)
    assert "sharding.context ring has no effect" in told
    assert "sharding.context_order zigzag has no effect" in told


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        ({"context": 4}, {"data__window": 18},
         r"context 4 does not divide sequences of 18 positions: use mesh\.context 3 or 6, or "
         r"data\.window 16 or 20"),
        ({"context": 4}, {"sharding__context": "ulysses"},
         r"context ulysses exchanges heads among 4 .* the 2 kv_heads of a device: use at most 2"),
        ({"context": 3}, {"sharding__context": "ring_ulysses", "data__window": 18},
         r"context ring_ulysses divides the axis .* but mesh\.context 3 cannot"),
        ({"context": 2}, {"sharding__context_order": "zigzag", "data__window": 18,
                          "sharding__context": "ring"},
         r"zigzag divides sequences into 4 blocks, but 18 positions .* data\.window 16 or 20"),
        ({"context": 2}, {"sharding__context_order": "striped", "model__attention_window": 4},
         r"context_order striped with model\.attention_window 4: with a window"),
        ({"context": 2}, {"sharding__context_order": "zigzag", "sharding__context": "ulysses"},
         r"order zigzag with sharding\.context ulysses: with ulysses each device has"),
        ({"context": 2}, {"sharding__context": "ring", "model__attention": "plain"},
         r"context ring with model\.attention plain: .*; set model\.attention: auto, or"),
        ({"context": 4}, {"model__attention": "plain"},
         r"context auto exchanges heads among 4 devices"),
        ({"context": 2, "stage": 2}, {"train__microbatches": 2, "model__layers": 2,
                                      "sharding__context": "ring"},
         r"context of 2 with mesh .* ring: keys that rotate .*; set sharding\.context: auto"),
        ({"expert": 2, "stage": 2}, {**STAGED, "sharding__rules": {"embed": "expert"}},
         r"rules\.embed expert with mesh .* splits the activations .*; remove that rule, or leave"),
        ({"context": 2}, {"sharding__context": "ring", "model__attention": "splash"},
         r"context ring with model\.attention splash: a ring computes .*context: auto"),
        ({"context": 2, "tensor": 2}, {"sharding__collective_matmul": True,
                                       "sharding__rules": {"residual_seq": "tensor"}},
         r"mesh\.context of 2 with sharding\.collective_matmul true: .*collective_matmul: false"),
        ({"context": 2, "tensor": 2}, {"sharding__rules": {"kv_heads": None}},
         r"each key head is on the device of its queries"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(mesh, changes, message):
    with pytest.raises(ConfigError, match=message):
        experiment(mesh, **changes)


def test_a_model_without_sequences_is_refused():
    sections = {
        **BASE, "mesh": {"context": 2}, "model": {"type": "mlp", "hidden": [8]},
        "data": {"type": "synthetic", "kind": "images"},
    }  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"context of 2 with model\.type mlp: .* remove mesh\.con"
    ):
        build(validate(Document(sections), ExperimentConfig), devices=jax.devices()[:2])
