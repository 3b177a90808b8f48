"""`jaxdist import` and `jaxdist export`: a directory to a run and back, and what is refused."""

import json
import struct
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from chosen import quick
from rich.console import Console

from benchmarks.models.drawn import CONFIGS, VOCAB, ours, tokens, write_drawn
from jaxdist.checkpoint.parts import BeginWith
from jaxdist.commands import evaluate
from jaxdist.commands import export_model as export
from jaxdist.commands.evaluate import open_run
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model
from jaxdist.errors import JaxdistError
from jaxdist.experiment import build, load
from jaxdist.interchange import safetensors
from jaxdist.interchange.leaves import Leaf, Room
from jaxdist.interchange.source import open_source
from jaxdist.interchange.tensors import Tensor
from jaxdist.run.loading.begin import begin_with
from jaxdist.run.loading.model import load_params, matched
from jaxdist.train.sampling import Sampling
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names

SMALL = ["data.examples=16", "data.heldout_examples=8", "data.window=16"]
QUIET = Console(quiet=True)
FULL, SLOW = ("vit", "bert"), ("qwen3", "bert_classes", "resnet_basic")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "llama3"
    write_drawn("llama3", out)
    return out


def arrays(path):
    return {name: np.array(t.open()) for name, t in open_source(path).tensors.items()}


@pytest.mark.parametrize(
    "name",
    [*quick("gpt2", "resnet", of=("gpt2", "resnet", *FULL)), *quick(of=SLOW, slow=True)],
)
@pytest.mark.every(2)
def test_a_model_comes_back_to_the_bit(name, tmp_path):
    before, run, out = (tmp_path / word for word in ("given", "run", "out"))
    write_drawn(name, before)
    images = "image" in str(CONFIGS[name]) or CONFIGS[name]["model_type"] == "resnet"
    small = ["data.height=16", "data.width=16"] if name.startswith("resnet") else []
    small += SMALL[:2] if images else SMALL
    import_model(before, run, small, console=QUIET)
    made = export_model(run, out, console=QUIET)
    assert made["dtype"] == "float32"
    was, now = arrays(before), arrays(out)
    assert was.keys() == now.keys()
    for key, value in was.items():
        np.testing.assert_array_equal(value, now[key])
    configs = [json.loads((path / "config.json").read_text()) for path in (before, out)]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_an_encoder_without_a_head_gets_one_of_zeros(tmp_path):
    """As files of a BertModel are, some of them with older names of norms."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    write_drawn("bert_classes", whole)
    held = {
        name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma"): value
        for name, value in arrays(whole).items()
        if not name.startswith("classifier")
    }
    bare.mkdir()
    config = CONFIGS["bert_classes"] | {"architectures": ["BertModel"]}
    (bare / "config.json").write_text(json.dumps(config))
    entries = [(name, value.shape, value.dtype) for name, value in held.items()]
    safetensors.write(bare / "model.safetensors", entries, held.__getitem__)
    import_model(bare, tmp_path / "run", SMALL, console=QUIET)
    export_model(tmp_path / "run", tmp_path / "out", console=QUIET)
    now = arrays(tmp_path / "out")
    for name, value in arrays(whole).items():
        np.testing.assert_array_equal(now[name], 0 if name.startswith("classifier") else value)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["BertForSequenceClassification"]
    with pytest.raises(
        JaxdistError, match=r"--to gguf supports only model.type gpt, but model.type is bert"
    ):
        export_model(tmp_path / "run", tmp_path / "x.gguf", gguf=True, console=QUIET)
    # A model that has the head by its architecture must have its tensors.
    (bare / "config.json").write_text(
        json.dumps(CONFIGS["bert_classes"] | {"architectures": ["BertForSequenceClassification"]})
    )
    with pytest.raises(JaxdistError, match=r"classifier.weight\[3, 32\]: no such tensor"):
        import_model(bare, tmp_path / "again", SMALL, console=QUIET)


@pytest.mark.slow
def test_a_run_can_begin_with_a_model_that_has_buffers(tmp_path, devices):
    write_drawn("resnet", tmp_path / "given")
    import_model(tmp_path / "given", tmp_path / "run", SMALL[:2], console=QUIET)
    settings = ["mesh.data=8", "train.batch_size=8", "data.height=16", "data.width=16"]
    for begin in ({"run": str(tmp_path / "given")}, None):
        config: Any
        document, config = load(tmp_path / "run" / "config.yaml", settings)
        if begin is not None:
            values = {**document.values, "checkpoint": {"begin_with": begin}}
            config = load(values, [])[1]
        program = build(config).program
        state, _ = begin_with(program, config.checkpoint.begin_with, say=print)
        name = "resnet.embedder.embedder.normalization.running_var"
        right = arrays(tmp_path / "given")[name]
        np.testing.assert_array_equal(np.asarray(state.buffers["stem_norm"]["var"]), right)


def test_images_are_scaled_as_the_model_was_trained(tmp_path):
    write_drawn("vit", tmp_path / "given")
    file = tmp_path / "given" / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    import_model(tmp_path / "given", tmp_path / "run", SMALL[:2], console=QUIET)
    data: Any = load(tmp_path / "run" / "config.yaml", [])[1].data
    assert (data.transform.mean, data.transform.std) == ([127.5] * 3, [63.75] * 3)
    file.write_text("{}")
    with pytest.raises(JaxdistError, match="has no image_mean and image_std"):
        import_model(tmp_path / "given", tmp_path / "other", console=QUIET)


@pytest.mark.full
def test_an_imported_run_has_the_models_parameters_on_any_mesh(model, tmp_path, devices):
    """Padded vocabulary, ZeRO 3 over eight devices."""
    import_model(model, tmp_path / "run", SMALL, console=QUIET)
    settings = ["mesh.data=8", "parallel.zero.stage=3", "train.batch_size=8"]
    settings += ["parallel.zero.whole_below=0"]
    experiment, restored = open_run(tmp_path / "run", settings, step=None, console=QUIET)
    program = experiment.program
    params = jax.jit(program.home.used.params)(restored.state.params)
    embedding = np.asarray(params["embedding"])
    right = arrays(model)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding[:VOCAB], right)
    assert not embedding[VOCAB:].any()
    module = program.model.bind(params, {})
    logits = jax.jit(lambda x: module(x, None))(tokens()[:, :16])
    np.testing.assert_allclose(
        logits[0],
        ours(model, {"input_ids": tokens()[:, :16], "labels": tokens()[0, 1:16]})["logits"],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.full
def test_the_use_of_an_imported_run_loads_parameters_only(model, tmp_path, monkeypatch, devices):
    """`eval`, `export` and `generate` initialize no state, so that moments of AdamW never exist."""
    run, opened = tmp_path / "run", []
    import_model(model, run, SMALL, console=QUIET)

    def kept(*given, **more):
        opened.append(open_run(*given, **more))
        return opened[-1]

    monkeypatch.setattr(Program, "init", lambda self: pytest.fail("a state was initialized"))
    monkeypatch.setattr(evaluate, "open_run", kept)
    monkeypatch.setattr(export, "open_run", kept)
    evaluate.evaluate_run(run, ["mesh.data=8"], console=QUIET)
    export.export_model(run, tmp_path / "out", ["mesh.data=8"], console=QUIET)
    asked = {"prompts": ["a"], "tokens": 1, "sampling": Sampling(), "console": QUIET}
    with pytest.raises(JaxdistError, match="not trained on text"):  # after the load
        evaluate.generate_from_run(run, **asked)
    for _, restored in opened:
        assert jax.tree.leaves(restored.state.params)
        assert not jax.tree.leaves(restored.state.opt_state)
    assert len(opened) == 3


def test_an_imported_run_with_an_average_of_iterates_is_used_as_it_was_imported(model, tmp_path):
    """The average of a schedule-free optimizer begins at the parameters, and is not in the run."""
    import_model(model, tmp_path / "run", SMALL, console=QUIET)
    free = "optim={type: import, path: 'optax.contrib:schedule_free_sgd', learning_rate: 0.1}"
    export_model(tmp_path / "run", tmp_path / "out", [free, "mesh.data=8"], console=QUIET)
    was, now = arrays(model), arrays(tmp_path / "out")
    assert was.keys() == now.keys()
    for key, value in was.items():
        np.testing.assert_allclose(value, now[key], rtol=1e-6, atol=1e-7)


def damaged(kind, folder, model):
    """A directory, or a file, that is none."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights, config = folder / "model.safetensors", folder / "config.json"
    raw = weights.read_bytes()
    if kind == "no config":
        config.unlink()
    elif kind == "no json":
        config.write_text("{")
    elif kind == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif kind == "no weights":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(raw[:-5])
    elif kind == "longer":
        weights.write_bytes(raw + b"12345")
    elif kind == "oversized header":
        weights.write_bytes(struct.pack("<Q", 1 << 60) + raw[8:])
    elif kind == "header cut":
        weights.write_bytes(raw[:20])
    elif kind == "header no json":
        weights.write_bytes(raw[:8] + b"[" + raw[9:])
    elif kind == "index":
        weights.rename(folder / "a.safetensors")
        index = {"weight_map": {"x": "b.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "index elsewhere":
        weights.rename(folder.parent / "a.safetensors")
        index = {"weight_map": {"x": "../a.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        held = arrays(model)
        if kind == "missing":
            del held["model.layers.1.mlp.up_proj.weight"]
        elif kind == "unused":
            held["model.extra.weight"] = np.zeros(3, np.float32)
        elif kind == "shape":
            held["model.norm.weight"] = np.zeros(31, np.float32)
        elif kind == "dtype":
            held["model.norm.weight"] = np.zeros(32, np.int32)
        entries = [(name, value.shape, value.dtype) for name, value in held.items()]
        safetensors.write(weights, entries, held.__getitem__)
    return folder


BAD = {
    "no config": r"is not a model: it has no config.json",
    "no json": r"config.json cannot be read: .*download the file again",
    "pickle": r"pytorch_model.bin, a pickle. .*jaxdist never reads pickles: download the model's",
    "no weights": r"has no safetensors: download model.safetensors too",
    "truncated": r"is truncated: it has [\d,]+ bytes of [\d,]+; download the file again",
    "longer": r"is longer than its header says: it has",
    "oversized header": r"its header alone would have 1,152,921,504,606,846,976; download",
    "header cut": r"is not a complete safetensors file: it has 20 bytes",
    "header no json": r"its header is not JSON",
    "index": r"names b.safetensors, which .* does not have",
    "index elsewhere": r"names ../a.safetensors, which .* does not have",
    "missing": r"up_proj.weight\[48, 32\]: no such tensor, for blocks/mlp/up",
    "unused": r"model.extra.weight\[3\]: this tensor fills no parameter",
    "shape": r"model.norm.weight: has shape \[31\], but norm/scale takes \[32\]",
    "dtype": r"model.norm.weight: has dtype int32, but norm/scale takes floating-point numbers",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_directory_is_one_message_and_leaves_nothing(kind, model, tmp_path):
    folder = damaged(kind, tmp_path / "bad", model)
    with pytest.raises(JaxdistError, match=BAD[kind]):
        import_model(folder, tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_what_is_no_model_and_what_exists_are_refused(model, tmp_path):
    (tmp_path / "file").write_text("text")
    for path, words in ((tmp_path / "none", "does not exist"), (tmp_path / "file", "of another")):
        with pytest.raises(JaxdistError, match=words):
            import_model(path, tmp_path / "run", console=QUIET)
    with pytest.raises(JaxdistError, match="exists already: choose a new directory"):
        import_model(model, tmp_path, console=QUIET)


def test_the_dtype_of_a_model_is_that_of_its_largest_parameter(model, tmp_path):
    """The largest by elements: the embedding has more rows than the layers have."""
    folder, held = damaged("as it is", tmp_path / "mixed", model), arrays(model)
    mixed = {n: x.astype(np.float16 if ".mlp." in n else np.float32) for n, x in held.items()}
    assert (
        held["model.layers.0.mlp.up_proj.weight"].size * 2 > held["model.embed_tokens.weight"].size
    )
    entries = [(name, value.shape, value.dtype) for name, value in mixed.items()]
    safetensors.write(folder / "model.safetensors", entries, mixed.__getitem__)
    import_model(folder, tmp_path / "run", SMALL, console=QUIET)
    written = json.loads((tmp_path / "run/source/config.json").read_text())
    assert written["dtype"] == "float16"


def test_a_tokenizer_that_does_not_fit_is_refused(model, tmp_path):
    folder = damaged("as it is", tmp_path / "bad", model)
    vocab = {"model": {"vocab": {chr(97 + i): i for i in range(VOCAB + 1)}}}
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(JaxdistError, match=rf"tokens up to {VOCAB}, but the model .* has {VOCAB}"):
        import_model(folder, tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ["mesh.data=4", "mesh.tensor=2", "parallel.zero.stage=3"],
        ["mesh.data=8", "model.lora={rank: 2, alpha: 4, targets: ['blocks/*']}"],
        pytest.param(["mesh.data=4", "mesh.stage=2"], marks=pytest.mark.full),
    ],
)
@pytest.mark.every(2)
def test_a_run_begins_with_a_model_directly_on_any_mesh(settings, model, tmp_path, devices):
    """The parameters of a model's directory, read in shards, are those of its import."""
    import_model(model, tmp_path / "run", SMALL, console=QUIET)
    settings = [*settings, "train.batch_size=16", "train.microbatches=2"]
    program = build(load(tmp_path / "run/config.yaml", settings)[1]).program
    begun = [BeginWith(run=str(path)) for path in (tmp_path / "run", model)]
    states, steps = zip(*(begin_with(program, one, say=print) for one in begun), strict=True)
    assert steps == (0, 0)
    pairs = zip(*map(flatten_with_names, states), strict=True)
    for (name, imported), (_, read) in pairs:
        assert imported.sharding == read.sharding, name
        np.testing.assert_array_equal(np.asarray(imported), np.asarray(read), err_msg=name)


def test_each_device_reads_its_block_only(model, tmp_path, devices, monkeypatch):
    """Eight shards of a parameter are eight blocks, for which its tensors are opened once."""
    experiment = small_experiment(model, tmp_path)
    asked, opened = [], Counter()
    fill, opening, reading = Leaf.fill, Tensor.open, Tensor.read_into
    monkeypatch.setattr(Leaf, "fill", lambda leaf, some: asked.extend(some) or fill(leaf, some))
    monkeypatch.setattr(Tensor, "open", lambda t: opened.update([t.name]) or opening(t))
    read_whole = []
    monkeypatch.setattr(
        Tensor,
        "read_into",
        lambda t, out: opened.update([t.name]) or read_whole.append(t.name) or reading(t, out),
    )
    leaves = matched(experiment.program, model)
    params = load_params(experiment.program, leaves)
    sizes = [int(np.prod(leaf.shape)) for leaf in leaves]
    assert sum(block.size for _, block in asked) < 1.1 * sum(sizes)
    # The padded embedding exceeds its tensor, so that the room holds a part of its blocks.
    assert {opened.pop("model.embed_tokens.weight"), *opened.values()} == {2, 1}
    # All layers of a query fit into the room together.
    assert "model.layers.0.self_attn.q_proj.weight" in read_whole
    right = {leaf.name: leaf.block((slice(None),) * len(leaf.shape)) for leaf in leaves}
    for name, value in flatten_with_names(experiment.program.home.used.params(params)):
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    value = np.arange(6, dtype=np.float32)
    safetensors.write(file, [("x", value.shape, value.dtype)], {"x": value}.__getitem__)
    tensor, out = safetensors.read_header(file)["x"], np.empty(6, np.float32)
    tensor.read_into(out)
    np.testing.assert_array_equal(out, value)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(JaxdistError, match=r"ends within 'x'; download the file again"):
        tensor.read_into(out)


def test_a_room_gives_as_many_arrays_as_fit_and_always_one():
    room, dtype = Room(128), np.dtype(np.float32)
    given = [(2, 2), (2, 3), (1, 1)]
    assert [a.shape for a in room.arrays(given, dtype, (1, 0))] == given[:2]
    assert [a.shape for a in room.arrays([(99,), (1,)], dtype, (0,))] == [(99,)]


def test_devices_copy_what_is_in_a_room(devices):
    room = Room(1 << 12)
    blocks = room.arrays([(17,), (64,), (1,)], np.dtype(np.float32), (0,))
    for block in blocks:
        block.fill(1)
    held = [jax.block_until_ready(jax.device_put(block, devices[1])) for block in blocks]
    for block in blocks:
        block.fill(2)
    assert [float(array.max()) for array in held] == [1, 1, 1]


def test_parts_of_a_model_are_refused(model, tmp_path, devices):
    experiment = small_experiment(model, tmp_path)
    begin = BeginWith(run=str(model), parts=("params/norm",))
    with pytest.raises(JaxdistError, match="which can be loaded only completely: leave out"):
        begin_with(experiment.program, begin, say=print)


def small_experiment(model, tmp_path):
    settings = ["mesh.data=8", "train.batch_size=8", "parallel.zero={stage: 3, whole_below: 0}"]
    import_model(model, tmp_path / "run", SMALL, console=QUIET)
    return build(load(tmp_path / "run/config.yaml", settings)[1])
