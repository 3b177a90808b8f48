"""`jaxdist import` and `jaxdist export`: a directory to a run and back, and what is refused."""

import json
import struct

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks.models.drawn import VOCAB, ours, tokens, write_drawn
from jaxdist.checkpoint.parts import BeginWith
from jaxdist.commands.evaluate import open_run
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model
from jaxdist.errors import JaxdistError
from jaxdist.experiment import build, load
from jaxdist.interchange import safetensors
from jaxdist.interchange.leaves import Leaf
from jaxdist.interchange.source import open_source
from jaxdist.run.loading.begin import begin_with
from jaxdist.run.loading.model import load_params, matched
from jaxdist.trees import flatten_with_names

SMALL = ["data.examples=16", "data.heldout_examples=8", "data.window=16"]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "llama3"
    write_drawn("llama3", out)
    return out


def arrays(path):
    return {name: np.array(t.open()) for name, t in open_source(path).tensors.items()}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen3", marks=pytest.mark.full)])
def test_a_model_comes_back_to_the_bit(name, tmp_path):
    given, run, out = (tmp_path / word for word in ("given", "run", "out"))
    write_drawn(name, given)
    import_model(given, run, SMALL, console=QUIET)
    made = export_model(run, out, console=QUIET)
    assert made["dtype"] == "float32"
    before, after = arrays(given), arrays(out)
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(value, after[key])
    configs = [json.loads((path / "config.json").read_text()) for path in (given, out)]
    assert configs[0] == configs[1]


def test_an_imported_run_has_the_models_parameters_on_any_mesh(model, tmp_path, devices):
    """Padded vocabulary, ZeRO 3 over eight devices."""
    import_model(model, tmp_path / "run", SMALL, console=QUIET)
    settings = ["mesh.data=8", "parallel.zero.stage=3", "train.batch_size=8"]
    settings += ["parallel.zero.whole_below=0"]
    experiment, restored = open_run(tmp_path / "run", settings, step=None, console=QUIET)
    program = experiment.program
    params = jax.jit(program.home.used_params)(restored.state.params)
    embedding = np.asarray(params["embedding"])
    right = arrays(model)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding[:VOCAB], right)
    assert not embedding[VOCAB:].any()
    module = program.model.bind(params, {})
    logits = jax.jit(lambda x: module(x, None))(tokens()[:, :16])
    np.testing.assert_allclose(
        logits[0], ours(model, tokens()[:, :16])["logits"], rtol=1e-5, atol=1e-5
    )


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
    "no json": r"config.json cannot be read: .*download it again",
    "pickle": r"pytorch_model.bin, a pickle. .*jaxdist never reads pickles: download the model's",
    "no weights": r"has no safetensors: download model.safetensors too",
    "truncated": r"is truncated: it has [\d,]+ bytes of [\d,]+; download it again",
    "longer": r"is longer than its header says: it has",
    "oversized header": r"its header alone would have 1,152,921,504,606,846,976; download it again",
    "header cut": r"is not a complete safetensors file: it has 20 bytes",
    "header no json": r"its header is not JSON",
    "index": r"names b.safetensors, which .* does not have",
    "missing": r"up_proj.weight\[48, 32\]: no such tensor, for blocks/mlp/up",
    "unused": r"model.extra.weight\[3\]: a tensor that fills no parameter",
    "shape": r"model.norm.weight: is \[31\], and norm/scale takes \[32\]",
    "dtype": r"model.norm.weight: is int32, but norm/scale takes floating-point numbers",
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
    with pytest.raises(JaxdistError, match="exists already: name another directory with --out"):
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
        pytest.param(["mesh.data=4", "mesh.stage=2"], marks=pytest.mark.full),
    ],
)
def test_a_run_begins_with_a_model_directly_on_any_mesh(settings, model, tmp_path, devices):
    """The parameters of a model's directory, read in shards, are those of its import."""
    import_model(model, tmp_path / "run", SMALL, console=QUIET)
    settings = [*settings, "train.batch_size=8", "train.microbatches=2"]
    experiment, restored = open_run(tmp_path / "run", settings, step=None, console=QUIET)
    state, step = begin_with(experiment.program, BeginWith(run=str(model)), say=print)
    assert step == 0
    pairs = zip(*map(flatten_with_names, (restored.state, state)), strict=True)
    for (name, imported), (_, read) in pairs:
        assert imported.sharding == read.sharding, name
        np.testing.assert_array_equal(np.asarray(imported), np.asarray(read), err_msg=name)


def test_each_device_reads_its_block_only(model, tmp_path, devices, monkeypatch):
    """Eight shards of a parameter are eight blocks that do not overlap."""
    experiment = small_experiment(model, tmp_path)
    asked = []
    block = Leaf.block
    monkeypatch.setattr(Leaf, "block", lambda leaf, at: asked.append(at) or block(leaf, at))
    leaves = matched(experiment.program, model)
    load_params(experiment.program, leaves)
    sizes = {leaf.name: int(np.prod(leaf.shape)) for leaf in leaves}
    read = sum(int(np.prod([p.stop - p.start for p in index])) for index in asked)
    assert read < 1.1 * sum(sizes.values())


def test_parts_of_a_model_are_refused(model, tmp_path, devices):
    experiment = small_experiment(model, tmp_path)
    begin = BeginWith(run=str(model), parts=("params/norm",))
    with pytest.raises(JaxdistError, match="which is loaded as a whole: leave out"):
        begin_with(experiment.program, begin, say=print)


def small_experiment(model, tmp_path):
    settings = ["mesh.data=8", "train.batch_size=8", "parallel.zero={stage: 3, whole_below: 0}"]
    import_model(model, tmp_path / "run", SMALL, console=QUIET)
    return build(load(tmp_path / "run/config.yaml", settings)[1])
