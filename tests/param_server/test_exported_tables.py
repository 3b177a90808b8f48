"""The export of recommenders: dense parameters, and the rows of each table by id."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import Jaxdist

from jaxdist.commands.export_tables import table_tensors
from jaxdist.interchange.safetensors import read_header
from jaxdist.models.recommend.rows import RowForm
from jaxdist.tables.bounded import open_store
from jaxdist.tables.keys import KEY
from jaxdist.tables.optimizer import RowSgd

MF = {
    "model": {"type": "mf", "width": 3},
    "data": {"type": "clicks", "fields": 2, "ids": 50, "examples": 64, "heldout_examples": 8},
    "loss": {"type": "click"},
    "optim": {"type": "sgd", "learning_rate": 0.5},
    "train": {"steps": 2, "batch_size": 16},
    "mesh": {"data": -1},
}


def read(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: np.fromfile(tensor.file, tensor.dtype, offset=tensor.offset,
                          count=int(np.prod(tensor.shape))).reshape(tensor.shape)
        for name, tensor in read_header(folder / "model.safetensors").items()
    }  # fmt: skip


@pytest.mark.full
def test_a_recommender_is_exported_with_a_tensor_for_each_table(jaxdist: Jaxdist) -> None:
    jaxdist.config(MF)
    assert jaxdist.here("train", "config.yaml").code == 0
    done = jaxdist.here("export", "runs/config", "out", "--json", "told.json")
    assert done.code == 0, done
    assert json.loads((jaxdist.folder / "told.json").read_text())["tensors"] == 3
    found = read(jaxdist.folder / "out")
    shapes = {name: array.shape for name, array in found.items()}
    assert shapes == {
        "bias": (1,), "tables.field_0.weight": (50, 4), "tables.field_1.weight": (50, 4)
    }  # fmt: skip
    assert np.abs(found["tables.field_1.weight"][:, -1]).max() > 0, "biases begin at zero"
    config = json.loads((jaxdist.folder / "out" / "config.json").read_text())
    assert config["fields"] == {"field_0": 50, "field_1": 50}
    assert "exists already" in jaxdist.here("export", "runs/config", "out").message
    wrong = jaxdist.here("export", "runs/config", "new", "--dtype", "int8")
    assert "--dtype int8 is unknown" in wrong.message
    gguf = jaxdist.here("export", "runs/config", "new", "--to", "gguf")
    assert "without --to, mf and dlrm" in gguf.message
    (jaxdist.folder / "file").write_text("")
    assert "cannot be written" in jaxdist.here("export", "runs/config", "file/new").message


@pytest.mark.parametrize("most", [0, 64])
def test_rows_that_were_never_updated_have_their_initial_values(most: int) -> None:
    form = RowForm({"user": 5, "item": 7}, 2, 0.1, most=most)
    store, every = open_store(form, RowSgd(), 3), open_store(form, RowSgd(), 3)
    rows = np.array([6], np.uint32)
    if most:
        rows = np.array([(1, 1)], KEY)
    before = dict(table_tensors(form, rows[:0], every.read))["tables.item.weight"][1]()
    store.update(rows, np.ones((1, 2), np.float32), 0.5)
    after = dict(table_tensors(form, rows[:0], store.read))["tables.item.weight"][1]()
    before[1] -= 0.5
    np.testing.assert_array_equal(after, before)


def test_ids_of_64_bits_are_exported_with_their_rows() -> None:
    form = RowForm({"user": 0, "item": 7}, 2, 0.1, most=64)
    store = open_store(form, RowSgd(), 3)
    rows = np.array([(0, 2**63 + 5), (0, 9), (1, 3)], KEY)
    store.update(np.sort(rows), np.ones((3, 2), np.float32), 0.5)
    tensors = table_tensors(form, store.kept()[0], store.read)
    found = {name: make() for name, (_, make) in tensors}
    assert found["tables.user.ids"].tolist() == [9, 5 - 2**63]
    np.testing.assert_array_equal(found["tables.user.weight"], store.read(rows[[1, 0]]))
    assert found["tables.item.weight"].shape == (7, 2)
