"""A model of one's own filled from files by a table, checked leaf by leaf."""

import numpy as np
import pytest
from rich.console import Console

from jaxdist.commands.evaluate import open_run
from jaxdist.commands.import_model import import_with_table
from jaxdist.config import plain_yaml
from jaxdist.errors import JaxdistError
from jaxdist.interchange import safetensors
from jaxdist.trees import flatten_with_names

QUIET = Console(quiet=True)
IMAGES = {"type": "synthetic", "kind": "images", "height": 2, "width": 2, "channels": 1}
CONFIG = {
    "model": {"type": "import", "path": "interchange_models:net"},
    "data": {**IMAGES, "classes": 3, "examples": 16, "heldout_examples": 8},
    "loss": {"type": "classification"},
    "optim": {"type": "sgd", "learning_rate": 0.1},
    "train": {"steps": 1, "batch_size": 8},
}
TABLE = {
    "rename": {
        "params/layer*/kernel": "trunk.*.weight",
        "params/layer*/bias": "trunk.*.bias",
        "params/head/kernel": "head.weight",
        "params/norm/scale": "bn.weight",
        "params/norm/bias": "bn.bias",
        "buffers/buffers/batch_stats/norm/mean": "bn.running_mean",
        "buffers/buffers/batch_stats/norm/var": "bn.running_var",
    },
    "transpose": {"params/layer*/kernel": [1, 0], "params/head/kernel": "o i -> i o"},
    "ignore": ["*.num_batches_tracked"],
}


def tensors():
    rng = np.random.default_rng(0)
    shapes = {"trunk.0.weight": (6, 4), "trunk.1.weight": (6, 6), "head.weight": (3, 6)}
    shapes |= {"trunk.0.bias": (6,), "trunk.1.bias": (6,)}
    shapes |= {f"bn.{name}": (4,) for name in ("weight", "bias", "running_mean", "running_var")}
    held = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    return {**held, "bn.num_batches_tracked": np.array(7, np.int64)}


def imported(tmp_path, table=TABLE, held=None):
    held = tensors() if held is None else held
    entries = [(name, value.shape, value.dtype) for name, value in held.items()]
    safetensors.write(tmp_path / "own.safetensors", entries, held.__getitem__)
    config, file = tmp_path / "own.yaml", tmp_path / "table.yaml"
    config.write_text(plain_yaml(CONFIG))
    file.write_text(plain_yaml({"import": table}))
    given = tmp_path / "own.safetensors", tmp_path / "run", config, file
    return import_with_table(*given, console=QUIET)


def test_a_model_of_ones_own_is_filled_with_its_statistics(tmp_path, devices):
    made = imported(tmp_path)
    assert (made["parameters"], made["tensors"]) == (24 + 36 + 18 + 12 + 16, 10)
    _, restored = open_run(tmp_path / "run", ["mesh.data=8"], step=None, console=QUIET)
    found = {n: np.asarray(v) for n, v in flatten_with_names(restored.state.params)}
    found |= {n: np.asarray(v) for n, v in flatten_with_names(restored.state.buffers)}
    held = tensors()
    right = {
        "params/layer0/kernel": held["trunk.0.weight"].T,
        "params/layer1/kernel": held["trunk.1.weight"].T,
        "params/head/kernel": held["head.weight"].T,
        "params/layer1/bias": held["trunk.1.bias"],
        "buffers/batch_stats/norm/var": held["bn.running_var"],
    }
    for name, value in right.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def without(key, name):
    return {**TABLE, key: {k: v for k, v in TABLE[key].items() if k != name}}


BAD = [
    (without("rename", "params/head/kernel"), r"params.head.kernel\[3, 6\]: no such tensor, for"),
    (
        without("transpose", "params/head/kernel"),
        r"head.weight: has shape \[3, 6\], .* takes \[6, 3\]",
    ),
    ({**TABLE, "ignore": []}, r"bn.num_batches_tracked\[\]: this tensor fills no parameter"),
    ({**TABLE, "ignore": ["x*"]}, r"'x\*' matches no tensor; choose from"),
    (
        {**TABLE, "rename": {**TABLE["rename"], "params/tail": "x"}},
        r"'params/tail' matches no parameter; choose from buffers/",
    ),
    (
        {**TABLE, "rename": {"params/layer1/bias": "trunk.0.bias", **TABLE["rename"]}},
        r"trunk.0.bias: fills both params/layer1/bias and params/layer0/bias|layer0/bias and",
    ),
    ({**TABLE, "transpose": {"params/head/kernel": [1, 2]}}, r"\[1, 2\] is not an order"),
    ({**TABLE, "transpose": {"params/head/kernel": "(o i"}}, r"an unmatched parenthesis"),
    (
        {**TABLE, "transpose": {**TABLE["transpose"], "params/*/bias": [1, 0]}},
        r"'params/\*/bias' orders 2 dims, but a tensor of params/.*/bias has 1: use a pattern",
    ),
]


@pytest.mark.parametrize(("table", "words"), BAD)
def test_a_table_that_does_not_fit_is_one_message(table, words, tmp_path, devices):
    with pytest.raises(JaxdistError, match=words):
        imported(tmp_path, table)
    assert not (tmp_path / "run").exists()


def test_tensors_without_a_fraction_are_refused(tmp_path, devices):
    held = {**tensors(), "head.weight": np.zeros((3, 6), np.int32)}
    with pytest.raises(
        JaxdistError, match=r"head.weight: has dtype int32, but .* takes floating-point numbers"
    ):
        imported(tmp_path, held=held)
