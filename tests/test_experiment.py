"""Parts of a config that do not fit each other are refused before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build, explain_config

MLP = {"type": "mlp", "hidden": [16]}
CNN = {"type": "cnn", "channels": [4], "hidden": 16}
GPT = {"type": "gpt", "layers": 1, "embed": 32, "heads": 2}
DIGITS = {"type": "images", "source": "digits"}
TOKENS = {"type": "synthetic", "kind": "tokens", "window": 8}
ADAMW = {"type": "adamw", "learning_rate": 1e-3}


class Examples:
    """Ten examples of both kinds, without the fields named, and labels of a shape."""

    def __init__(self, without: list[str] | None = None, label: tuple[int, ...] = ()) -> None:
        fields = {
            "image": np.zeros((8, 8, 1), np.float32),
            "label": np.zeros(label, np.int32),
            "tokens": np.zeros(9, np.int32),
            "segments": np.zeros(8, np.int32),
        }
        self.fields = {name: x for name, x in fields.items() if name not in (without or [])}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.fields


class Flat(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.numpy.zeros((64, 10)), dims=(None, None))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1) @ self.kernel[...]


def mine(name: str, **settings: Any) -> dict[str, Any]:
    return {"type": "import", "path": f"test_experiment:{name}", **settings}


def examples(**args: Any) -> dict[str, Any]:
    return mine("Examples", args=args, classes=10, vocab_size=16)


def config_of(model: Any, data: Any, **sections: Any) -> ExperimentConfig:
    given = {"model": model, "data": data, "optim": ADAMW, **sections}
    return ExperimentConfig.model_validate({"train": {"steps": 2, "batch_size": 8}, **given})


def built(model: Any, data: Any, **sections: Any) -> Experiment:
    return build(config_of(model, data, **sections), devices=jax.devices()[:1])


NEXT_TOKEN, CLASSIFICATION = {"type": "next_token"}, {"type": "classification"}


@pytest.mark.parametrize(
    ("model", "data", "loss", "message"),
    [
        (MLP, DIGITS, NEXT_TOKEN,
         "loss.type next_token needs tokens [length + 1] and segments [length] in each example, "
         "but the data gives image [8, 8, 1] and label []; use loss.type classification"),
        (mine("Flat"), DIGITS, NEXT_TOKEN, "loss.type next_token needs tokens"),
        ({"type": "bert", "layers": 1, "embed": 8, "heads": 2}, TOKENS, None,
         "but the data gives segments [8] and tokens [9]; use data.masking: {} to hide tokens, or"),
        (GPT, TOKENS, CLASSIFICATION,
         "loss.type classification needs image [any shape] and label [] in each example, but the "
         "data gives segments [8] and tokens [9]; use loss.type next_token"),
        (GPT, examples(), CLASSIFICATION,
         "loss.type classification does not work with model.type gpt; use loss.type next_token"),
        (CNN, examples(), NEXT_TOKEN,
         "loss.type next_token does not work with model.type cnn; use loss.type classification"),
        (GPT, examples(without=["segments", "image", "label"]), None,
         "needs tokens [length + 1] and segments [length] in each example, but the data gives "
         "tokens [9]; use a loss of your own"),
        (MLP, examples(label=(1,)), CLASSIFICATION, "needs image [any shape] and label [] in"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_fit_is_refused(
    model: Any, data: Any, loss: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        built(model, data, loss=loss)
    text = " ".join(str(refused.value).split())
    assert message in text
    assert "loss" in text.split(message)[0]


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
@pytest.mark.parametrize(("model", "data"), [(MLP, DIGITS), (CNN, DIGITS), (GPT, TOKENS)])
def test_every_model_trains_with_narrow_parameters(model: Any, data: Any, narrow: str) -> None:
    program = built(model, data, optim={**ADAMW, "master_weights": narrow}).program
    state, values = jax.eval_shape(program.train, program.state_shapes, program.batch)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {narrow}
    assert values.shape == (len(program.metrics),)


SIGN = {"type": "sign"}
MOMENTUM = {**SIGN, "error_feedback": {"type": "compressed_momentum", "b1": 0.9}}
ONEBIT = {**ADAMW, "type": "onebit_adam", "freeze_step": 3}


@pytest.mark.parametrize(
    ("optim", "compression", "setting", "message"),
    [
        (ADAMW, {**SIGN, "error_feedback": {"type": "momentum"}}, "error_feedback",
         "which itself has momentum 0.9: both the optimizer and the error feedback would apply "
         "momentum to the gradient; set optim: {type: sgd"),
        (ADAMW, MOMENTUM, "error_feedback", "update is linear in its input; set optim"),
        ({**ONEBIT, "b1": 0.8}, {**MOMENTUM, "warmup_steps": 3}, "error_feedback",
         "compressed_momentum, b1 0.9 with optim.type onebit_adam, b1 0.8: both settings are"),
        (ONEBIT, {**SIGN, "warmup_steps": 3}, "error_feedback",
         "compresses the momentum, not the gradient; set error_feedback: {type: compressed_"),
        (ONEBIT, MOMENTUM, "warmup_steps",
         "warmup_steps 0 with optim.freeze_step 3: this optimizer freezes its second moment in"),
        (ADAMW, {"type": "lowrank", "rank": 40}, "",
         "layers/0/kernel float32[64, 16]: rank 40 exceeds the largest rank of a"),
    ],
)  # fmt: skip
def test_an_optimizer_that_does_not_go_with_messages_is_refused(
    optim: Any, compression: Any, setting: str, message: str
) -> None:
    config = config_of(MLP, DIGITS, optim=optim, parallel={"compression": compression})
    with pytest.raises(ConfigError) as refused:
        build(config, devices=jax.devices()[:1])
    text = " ".join(str(refused.value).split())
    assert message in text
    assert ".".join(["parallel.compression", *filter(None, [setting])]) in text.split(message)[0]


LINK = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}


@pytest.mark.parametrize(
    ("slow", "axis", "chosen"),
    [
        (1e5, "data.dcn", "quantize, bits: 4"),
        (1e12, "data.dcn", "whole"),
        (1e5, "data", "quantize"),
    ],
)
def test_auto_chooses_by_the_links(slow: float, axis: str, chosen: str) -> None:
    messages = {"type": "auto", "axis": axis, "fast": LINK,
                "slow": {**LINK, "bytes_per_second": slow}}  # fmt: skip
    mlp = {**MLP, "hidden": [256]}
    config = config_of(mlp, DIGITS, mesh={"data": {"dcn": 2, "ici": 2}},
                       parallel={"compression": messages})  # fmt: skip
    found = build(config, devices=jax.devices()[:4])
    assert found.explained[-1].startswith(f"compression {{type: {chosen}")
    jax.eval_shape(found.program.train, found.program.state_shapes, found.program.batch)


def test_auto_says_what_it_does_not_know() -> None:
    messages = {"type": "auto", "device": "abacus"}
    config = config_of(MLP, DIGITS, mesh={"data": 2}, parallel={"compression": messages})
    with pytest.raises(ConfigError, match=r"parallel\.compression.*does not know the links"):
        build(config, devices=jax.devices()[:2])


@pytest.mark.parametrize("kind", ["onebit_adam", "onebit_lamb"])
def test_onebit_optimizers_train_in_every_form_of_state(kind: str) -> None:
    optim = {**ONEBIT, "type": kind, "bf16_moments": kind == "onebit_adam"}
    messages = {**MOMENTUM, "warmup_steps": 3}
    for zero in ({"stage": 0}, {"stage": 1, "whole_below": 0}):
        config = config_of(MLP, DIGITS, optim=optim, mesh={"data": 2},
                           parallel={"compression": messages, "zero": zero})  # fmt: skip
        program = build(config, devices=jax.devices()[:2]).program
        state, _ = jax.eval_shape(program.train, program.state_shapes, program.batch)
        assert jax.tree.structure(state) == jax.tree.structure(program.state_shapes)


BF16 = {**GPT, "compute_dtype": "bfloat16"}


def test_a_kernel_that_the_devices_do_not_have_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        built({**BF16, "attention": "cudnn"}, TOKENS)
    text = " ".join(str(refused.value).split())
    assert "attention cudnn runs on GPUs, but the mesh has cpu devices; use auto" in text


def test_the_kernel_is_chosen_for_the_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a program for a topology is compiled on a machine with GPUs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "loss" in built(BF16, TOKENS).program.metrics


def test_a_config_for_gpus_is_explained_without_one() -> None:
    model = {**BF16, "attention": "cudnn", "layers": 3}
    found = explain_config(config_of(model, TOKENS, mesh={"stage": 2}, train=MICROBATCHES))
    assert "3 layers in 2 chunks" in found[0]


MICROBATCHES = {"steps": 2, "batch_size": 8, "microbatches": 2}
