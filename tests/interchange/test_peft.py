"""Adapters in PEFT's files: to a run and back, merged on export, and what is refused."""

import json

import numpy as np
import pytest
from rich.console import Console

from benchmarks.models.drawn import write_drawn
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.commands.adapters import export_adapters, import_adapters
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model
from jaxdist.errors import JaxdistError
from jaxdist.interchange import safetensors
from jaxdist.interchange.source import open_source
from jaxdist.run.directory import RunDirectory

SMALL = ["data.examples=16", "data.heldout_examples=8", "data.window=16"]
QUIET = Console(quiet=True)
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
SETTINGS = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_rslora": False, "bias": "none"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A drawn llama as a directory, and its run."""
    out = tmp_path_factory.mktemp("peft")
    write_drawn("llama3", out / "model")
    import_model(out / "model", out / "run", SMALL, console=QUIET)
    return out


def arrays(path):
    return {name: np.array(t.open()) for name, t in open_source(path).tensors.items()}


def write_peft(base, out, *, wider=0, rename=("", ""), deeper="", **settings):
    """Write drawn adapters for the base model, also for a layer `deeper`; return them by module."""
    out.mkdir()
    random, tensors, found = np.random.default_rng(0), {}, {}
    for name, weight in arrays(base / "model").items():
        module = name.removesuffix(".weight")
        if not module.endswith(MODULES):
            continue
        a = random.normal(size=(3, weight.shape[1] + wider)).astype(np.float32)
        b = random.normal(size=(weight.shape[0], 3)).astype(np.float32)
        found[name] = (a, b)
        stem = f"base_model.model.{module.replace(*rename)}"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    if deeper:
        tensors |= {name.replace("layers.0.", deeper): x for name, x in tensors.items()}
    entries = [(name, x.shape, x.dtype) for name, x in tensors.items()]
    safetensors.write(out / "adapter_model.safetensors", entries, lambda name: tensors[name])
    written = {name: value for name, value in {**SETTINGS, **settings}.items() if value is not None}
    (out / "adapter_config.json").write_text(json.dumps(written))
    return found


@pytest.mark.full
def test_adapters_come_back_to_the_bit_and_merge_into_kernels(base, tmp_path):
    adapters = write_peft(base, tmp_path / "given")
    run = tmp_path / "run"
    import_adapters(tmp_path / "given", base / "run", run, console=QUIET)
    export_adapters(run, tmp_path / "out", console=QUIET)
    before, after = (
        {name: np.array(t.open()) for name, t in safetensors.read_header(file).items()}
        for file in (tmp_path / f / "adapter_model.safetensors" for f in ("given", "out"))
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    written = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert written | SETTINGS == written
    assert written["target_modules"] == ["down_proj", "o_proj", "q_proj"]
    export_model(run, tmp_path / "merged", console=QUIET)
    merged, own = arrays(tmp_path / "merged"), arrays(base / "model")
    assert merged.keys() == own.keys()
    for name, weight in own.items():
        a, b = adapters.get(name, (None, None))
        expected = weight if a is None else weight + 6 / 3 * b @ a
        np.testing.assert_allclose(merged[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wider": 1}, "blocks/attention/query takes (3, 32)"),
        ({"rename": ("self_attn", "attn")}, "of another base model: base_model.model.model.layers"),
        ({"deeper": "layers.7."}, "layers.7.mlp.down_proj.lora_A.weight belongs to no layer"),
        ({"r": None}, "adapter_config.json lacks r: download"),
        ({"r": None, "lora_alpha": None}, "adapter_config.json lacks r, lora_alpha: download"),
        ({"lora_alpha": "16"}, "lora_alpha '16' is not a number; write it without quotes"),
        ({"use_dora": True}, "use_dora True is not supported"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(base, tmp_path, given, said):
    write_peft(base, tmp_path / "given", **given)
    with pytest.raises(JaxdistError) as refused:
        import_adapters(tmp_path / "given", base / "run", tmp_path / "run", console=QUIET)
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_import_that_is_cut_off_leaves_no_run(base, tmp_path, monkeypatch):
    """A directory with a config counts as a run that has begun, so that the config is last."""

    def cut_off(self, *args, **kwargs):
        raise KeyboardInterrupt

    write_peft(base, tmp_path / "given")
    monkeypatch.setattr(CheckpointStore, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        import_adapters(tmp_path / "given", base / "run", tmp_path / "run", console=QUIET)
    assert not RunDirectory(tmp_path / "run").occupied


def test_adapters_in_a_pickle_and_adapters_as_a_model_are_refused(base, tmp_path):
    folder, run = tmp_path / "given", tmp_path / "run"
    write_peft(base, folder)
    with pytest.raises(JaxdistError, match=r"no config.json, only adapter_config.json; .* --base"):
        import_model(folder, run, console=QUIET)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(JaxdistError, match=r"adapter_model.bin, a pickle. .* of PEFT\)"):
        import_adapters(folder, base / "run", run, console=QUIET)


@pytest.mark.full
def test_a_folder_without_adapters_and_a_run_without_adapters_are_told(base, tmp_path):
    with pytest.raises(JaxdistError, match=r"lacks adapter_config\.json"):
        import_adapters(base / "model", base / "run", tmp_path / "run", console=QUIET)
    with pytest.raises(
        JaxdistError, match=r"has no adapters \(model\.lora\): export the whole model"
    ):
        export_adapters(base / "run", tmp_path / "out", console=QUIET)
