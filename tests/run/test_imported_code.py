"""The user's own model, loss, data and optimizer: what they do wrong is said with its place."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chosen import quick
from runs import DIGITS, Jaxdist

from jaxdist.errors import ConfigError, DataError
from jaxdist.experiment import Experiment, build, load

MINE = """\
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 10, rngs=rngs)
    def __call__(self, x):
        return self.linear(x.reshape(x.shape[0], -1))
class ModelWithoutReshape(Model):
    def __call__(self, x):
        return self.linear(x)  # LINE
class ModelOfOther(Model):
    def __init__(self, rngs):
        raise KeyError("no weights")  # LINE
def model_number(rngs):
    return 3

def loss(module, batch):
    logits = module(batch["image"] / 255.0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
def loss_of_other(module, batch):
    return batch["target"].mean()  # LINE
def loss_on_host(module, batch):
    return float(loss(module, batch))  # LINE
def loss_not_reduced(module, batch):
    return module(batch["image"] / 255.0)
def loss_nothing(module, batch):
    pass
def loss_misnamed(module, batch):
    return {"nll": loss(module, batch)}

def optimizer(rate):
    return optax.sgd(rate)
def optimizer_stops(rate):
    raise ValueError("bad momentum")  # LINE
def optimizer_number(rate):
    return 3
def optimizer_init_stops(rate):
    return optax.GradientTransformation(
        lambda p: p["nothing"], lambda g, s, p=None: (g, s)  # LINE
    )
def optimizer_update_stops(rate):
    def update(g, s, p=None):
        return g["nothing"], s  # LINE
    return optax.GradientTransformation(lambda p: (), update)

class Data:
    def __init__(self, length=100):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, i):
        return {"image": np.zeros((8, 8, 1), np.float32), "label": np.int32(i % 10)}
class DataBroken(Data):
    def __getitem__(self, i):
        raise OSError("a broken sector")  # LINE
class DataBrokenLater(Data):
    def __getitem__(self, i):
        if i == 50:
            raise OSError("a broken sector")  # LINE
        return super().__getitem__(i)
class DataLabel(Data):
    def __init__(self, place):
        super().__init__()
        self.place = place
    def __getitem__(self, i):
        return {**super().__getitem__(i), "label": np.int32(12 if i == self.place else 3)}
def pair(place):
    return Data(), DataLabel(place)
def data_number():
    return 3
"""
DIMS = {"params": {"linear/kernel": [None, None], "linear/bias": [None]}}


def own(name: str, **settings: Any) -> dict[str, Any]:
    return {"type": "import", "path": f"mine:{name}", **settings}


def model(name: str) -> dict[str, Any]:
    return {"model": own(name), "loss": {"type": "classification"}, "sharding": DIMS}


def loss(name: str, **settings: Any) -> dict[str, Any]:
    return {"loss": own(name, **settings)}


def optimizer(name: str, **settings: Any) -> dict[str, Any]:
    return {"optim": own(name, learning_rate=1e-3, **settings)}


def data(name: str, **settings: Any) -> dict[str, Any]:
    return {"data": own(name, classes=10, **settings)}


def line_of(name: str) -> int:
    """The first line marked LINE after `name` is defined."""
    lines = MINE.splitlines()
    start = next(i for i, text in enumerate(lines) if re.search(rf"(class|def) {name}\b", text))
    return next(i for i, text in enumerate(lines, 1) if i > start and "# LINE" in text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def build_with(folder: Path, changes: dict[str, Any]) -> Experiment:
    (folder / "config.yaml").write_text(json.dumps({**DIGITS, **changes}))
    document, config = load(folder / "config.yaml")
    return build(config, document)


RAISES = [
    (model("ModelWithoutReshape"), "model.path mine:{} raised TypeError: dot_general requires"),
    (model("ModelOfOther"), "(rngs=<Rngs>) raised KeyError: 'no weights'"),
    (loss("loss_of_other"), "loss.path mine:{} raised KeyError: 'target'"),
    (loss("loss_on_host"), "loss.path mine:{} raised ConcretizationTypeError: Abstract tracer"),
    (optimizer("optimizer_stops"), "optim.path mine:{} raised ValueError: bad momentum"),
    (optimizer("optimizer_init_stops"), "optim.path mine:{} raised KeyError: 'nothing'"),
    (optimizer("optimizer_update_stops"), "optim.path mine:{} raised KeyError: 'nothing'"),
    (data("DataBroken"), "example 0 raised OSError: a broken sector"),
]


@pytest.mark.parametrize(("changes", "message"), RAISES)
def test_what_it_raises_is_told_with_its_line(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    name = next(iter(changes.values()))["path"].removeprefix("mine:")
    with pytest.raises(ConfigError) as caught:
        build_with(folder, changes)
    text = str(caught.value)
    assert message.format(name) in text
    assert f"({folder / 'mine.py'}:{line_of(name)})" in text


LBFGS = {"type": "import", "path": "optax:lbfgs", "learning_rate": 1e-3}
WRONG = [
    (
        model("model_number"),
        "model.path mine:model_number returned int, but must return a flax.nnx.Module",
    ),
    (model("Mode"), "'mine' has no attribute 'Mode'; did you mean 'Model'?"),
    ({**model("Model"), "loss": None}, "an imported model needs a loss"),
    (loss("loss_not_reduced"), "the loss returned DynamicJaxprTracer (64, 10) for 'loss'"),
    (loss("loss_nothing"), "the loss returned NoneType"),
    (
        loss("loss_misnamed"),
        "the loss returned ['nll'], without the value to minimise: add the key 'loss'",
    ),
    (loss("loss", args={"beta": 1}), "got an unexpected keyword argument 'beta'"),
    ({"loss": {"type": "import", "path": "mime:loss"}}, "there is no module 'mime'"),
    ({"loss": {"type": "import", "path": "mine.loss"}}, "expected 'package.module:name'"),
    (optimizer("optimizer_number"), "mine:optimizer_number returned int, but must return an optax"),
    (optimizer("optimizer", args={"beta": 1}), "got an unexpected keyword argument 'beta'"),
    (
        {"optim": LBFGS},
        "'value_fn'; a step computes the loss once, and passes to the update only the",
    ),
    (data("data_number"), "'mine:data_number' gave a int, expected an object with __len__"),
    (
        data("Data", args={"length": 0}),
        "the training split of 'mine:Data' is empty: it has 0 examples",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
@pytest.mark.every(3)
def test_what_it_returns_is_checked(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        build_with(folder, changes)
    assert message in str(caught.value)
    assert "config.yaml:1" in str(caught.value) or "not set in" in str(caught.value)


@pytest.mark.parametrize(
    "changes", [model("Model"), loss("loss"), optimizer("optimizer"), data("Data")]
)
def test_what_is_right_builds(folder: Path, changes: dict[str, Any]) -> None:
    build_with(folder, changes)


def test_a_label_that_is_no_class_ends_the_epoch_and_the_evaluation(folder: Path) -> None:
    train = build_with(folder, data("DataLabel", args={"place": 50})).loader
    with train.batches() as batches, pytest.raises(DataError, match="example 50 of the training"):
        list(itertools.islice(batches, 2))
    heldout = build_with(folder, data("pair", args={"place": 70})).heldout
    assert heldout is not None
    with (
        heldout.evaluation_batches() as batches,
        pytest.raises(DataError, match=r"example 70 of the held-out split is 12, .* from 0 to 9:"),
    ):
        list(batches)
    with pytest.raises(ConfigError, match=r"data = .*'label' of example 99 .* is 12"):
        build_with(folder, data("DataLabel", args={"place": 99}))


def test_on_the_command_line_there_is_no_traceback(jaxdist: Jaxdist) -> None:
    (jaxdist.folder / "mine.py").write_text(MINE)
    jaxdist.config(loss=own("loss_of_other"))
    refused = jaxdist.train()
    assert refused.code == 2
    assert f"KeyError: 'target' ({jaxdist.folder / 'mine.py'}:{line_of('loss_of_other')})" in (
        refused.message
    )
    assert not jaxdist.run.exists()


def test_data_that_break_in_the_middle_end_the_run(jaxdist: Jaxdist) -> None:
    (jaxdist.folder / "mine.py").write_text(MINE)
    jaxdist.config(data=own("DataBrokenLater", classes=10), train={"steps": 50, "batch_size": 8})
    refused = jaxdist.here("train", "config.yaml")
    assert refused.code == 2
    place = f"({jaxdist.folder / 'mine.py'}:{line_of('DataBrokenLater')})"
    assert refused.message == f"error: data: example 50 raised OSError: a broken sector {place}"


@pytest.mark.parametrize(
    "command",
    quick(
        "inspect", "eval", of=["inspect", "plan", "audit", "eval", "generate", "replay"], slow=True
    ),
)
def test_whose_code_is_imported_is_said_before(jaxdist: Jaxdist, command: str) -> None:
    (jaxdist.folder / "hostile.py").write_text("raise ValueError('it ran')")
    jaxdist.config(
        {**DIGITS, "loss": {"type": "classification"}},
        model={"type": "import", "path": "hostile:Model"},
    )
    run = jaxdist.folder / "run"
    (run / "order").mkdir(parents=True)
    (run / "config.yaml").write_text((jaxdist.folder / "config.yaml").read_text())
    of_run = command in ("eval", "generate", "replay")
    more = {"plan": ["--on", "v5p:2x2x1"], "generate": ["--prompt", "a"]}.get(command, [])
    devices = [] if command == "plan" else ["--devices", "8"]
    done = jaxdist.here(command, "run" if of_run else "config.yaml", *more, *devices)
    assert done.code == 2, done
    assert f"code   imports {jaxdist.folder}/hostile.py for model" in done.out
    assert "it ran" in done.message
