"""Examples of README and docs: Python runs as it is written, on eight devices; configs are valid;
commands are those of the command line."""

import re
import shlex
import sys
import tomllib
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import typer.main
from documents import PAGES, README, ROOT, blocks, commands, ids
from ruamel.yaml import YAML

import jaxdist
from jaxdist.cli import app
from jaxdist.config import Document, read, validate
from jaxdist.experiment import ExperimentConfig, build, load

GUIDES = ROOT / "docs/guides"
BASE = ROOT / "configs/gpt/quickstart.yaml"


def ran(page, monkeypatch):
    """The names that a page's Python leaves, all of its blocks run one after another."""
    monkeypatch.chdir(ROOT)
    found = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, ids(page), "exec"), found)
    return found


def test_collectives_in_a_shard_map_of_ones_own(capsys, monkeypatch):
    found = ran(GUIDES / "reductions.md", monkeypatch)
    shapes = jax.tree.map(np.shape, (found["means"], found["whole"]))
    assert shapes == ({"w": (2, 4)}, [(8, 4), (4, 8)])
    assert (np.asarray(found["means"]["w"]) == 4).all()
    assert all((np.asarray(leaf) == 1).all() for leaf in found["whole"])
    assert "hierarchical" in capsys.readouterr().out


def test_compression_in_a_loop_of_ones_own(monkeypatch):
    losses = ran(ROOT / "docs/reference/compression.md", monkeypatch)["losses"]
    assert losses[-1] < 0.5 * losses[0]


def test_the_ledger_of_any_program(capsys, monkeypatch):
    ran(GUIDES / "inspect.md", monkeypatch)
    assert capsys.readouterr().out.startswith("all-reduce ('data',) ")


def test_an_optimizer_in_a_loop_of_ones_own(monkeypatch):
    found = ran(GUIDES / "optimizers.md", monkeypatch)
    state = found["transform"].init(found["params"])
    assert {leaf.shape for leaf in jax.tree.leaves(state)} >= {(4, 8, 8), (8, 16)}
    # An imported function is given a schedule, here one whose first rate is 0.
    own = found["lion_with_decay"](optax.linear_schedule(0.0, 0.1, 2), decay=0.1)
    first, state = own.update(1.0, own.init(1.0), 1.0)
    assert (float(first), float(own.update(1.0, state, 1.0)[0])) == (0.0, pytest.approx(-0.055))


def test_a_loop_of_ones_own(capsys, monkeypatch):
    """Its first block, of gradients and update, has a process of its own: test_python_api.py."""
    ran(GUIDES / "python.md", monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"'loss': ([\d.]+)", line)[1]) for line in lines[:4]]
    assert losses[-1] < losses[0]
    assert re.fullmatch(r"\d+ [\d.]+", lines[4])
    assert "'Dense_0'" in lines[5]


@pytest.mark.full
def test_fit_with_a_hook_and_with_a_model_of_a_notebook(tmp_path, capsys, monkeypatch):
    """In a module of a name, as a notebook is one, and where runs may be written."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("page_hooks")
    monkeypatch.setitem(sys.modules, "page_hooks", page)
    first, second = blocks(GUIDES / "hooks.md", "python")
    exec(compile(first, "hooks.md", "exec"), vars(page))
    assert "held-out loss below 1.5" in vars(page)["found"].stopped_by
    assert 10 < vars(page)["found"].step < 60
    assert re.search(r"held-out loss \d\.\d{3} at step 10", capsys.readouterr().out)
    exec(compile(second, "hooks.md", "exec"), vars(page))
    assert vars(page)["found"].step == 20
    assert "path: page_hooks:Net" in (tmp_path / "runs/fit/config.yaml").read_text()


def test_a_model_and_a_loss_of_ones_own(tmp_path, monkeypatch):
    (block,) = blocks(GUIDES / "model.md", "python")
    (tmp_path / "page_model.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "page_model", raising=False)
    own = {"type": "import", "path": "page_model:build", "args": {"width": 64}}
    program, losses = trained_on_digits(own, "{data: 4, tensor: 2}", steps=10)
    assert "tensor" in program.state_shapes.params["up"].sharding.spec
    assert losses[-1] < losses[0]


def trained_on_digits(model, mesh, steps, microbatches=1, devices=8):
    """The program of a page's model and loss, and the losses of its first steps."""
    module = model["path"].split(":")[0]
    settings = [f"mesh={mesh}", f"train.microbatches={microbatches}"]
    values = read(ROOT / "configs/mlp/digits.yaml", settings).values
    values |= {"model": model, "loss": {"type": "import", "path": f"{module}:loss"}}
    config = validate(Document(values), ExperimentConfig)
    experiment = build(config, devices=jax.devices()[:devices])
    program, losses = experiment.program, []
    state = program.init()
    with experiment.loader.batches() as batches:
        for _ in range(steps):
            state, metrics = program.train(state, next(batches))
            losses.append(float(metrics[0]))
    return program, losses


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "args"),
    [
        # On other axes: the draws of `.ci/run`; its layers are found as those of the other are.
        pytest.param("LinenNet", {"width": 16, "layers": 4}, marks=pytest.mark.slow),
        ("EquinoxNet", {"width": 16}),
    ],
)
def test_models_of_linen_and_of_equinox_in_stages(name, args, tmp_path, monkeypatch):
    (block,) = blocks(GUIDES / "pipelines.md", "python")
    (tmp_path / "page_stages.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "page_stages", raising=False)
    model = {"type": "import", "path": f"page_stages:{name}", "args": args}
    (_, alone), (staged, losses) = (
        trained_on_digits(model, mesh, steps=6, microbatches=2, devices=devices)
        for mesh, devices in (("{data: 1}", 1), ("{stage: 2}", 2))
    )
    assert staged.compute.ticks.stages == 2
    assert losses == pytest.approx(alone, rel=1e-5)
    assert losses[-1] < losses[0]


def test_a_sum_of_which_servers_see_no_part():
    pytest.importorskip("cryptography")
    (block,) = blocks(GUIDES / "parameter_server.md", "python")
    exec(block, {})


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_python_is_unread(page):
    """A page with Python has a test above."""
    guides = {"hooks.md", "reductions.md", "inspect.md", "optimizers.md", "python.md", "model.md"}
    guides.add("prove.md")  # tests/proofs/test_foreign.py
    guides.add("prove-types.md")  # tests/proofs/test_prove_types.py
    tested = {*guides, "pipelines.md", "compression.md", "parameter_server.md"}
    assert page.name in tested or not blocks(page, "python")


def test_text_of_ones_own(tmp_path, monkeypatch):
    block = next(block for block in blocks(GUIDES / "model.md", "yaml") if "*.txt" in block)
    monkeypatch.chdir(tmp_path)
    for name in ("corpus/a.txt", "corpus/part/b.txt", "corpus/part/c.txt", "notes/d.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"A line of {name}.\n" * 100)
    Path("pages.jsonl").write_text('{"body": "A line of text, and one more."}\n' * 100)
    dataset = validate(
        Document(completed(YAML(typ="safe").load(block))), ExperimentConfig
    ).data.build()
    assert "5 files" in dataset.description
    assert dataset.train[0]["tokens"].shape == (129,)
    assert dataset.heldout is not None
    alone = load(BASE, ["data.files=corpus/**/*.txt", "data.heldout_fraction=0.3"])[1].data
    assert "3 files" in alone.build().description


def completed(fragment):
    """A part of a config in place of, or within, that of the quickstart."""
    values = read(BASE, []).values
    for section, given in fragment.items():
        merged = isinstance(given, dict) and "type" not in given and section != "mesh"
        values[section] = {**values.get(section, {}), **given} if merged else given
    return values


CONFIGS = [(page, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "block"), CONFIGS, ids=lambda x: getattr(x, "name", ""))
def test_configs_are_valid(page, block):
    fragment = YAML(typ="safe").load(block)
    validate(Document(completed(fragment)), ExperimentConfig)


def words(line):
    """Arguments of a command line: what is optional, a comment or another command's left out."""
    found = []
    for word in shlex.split(line, comments=True)[1:]:
        if word in ("|", ">", "&", "&&"):
            break
        if not (word.startswith("[") or word.endswith("]")) or "=" in word.strip("[]"):
            found.append("1" if re.fullmatch(r"[A-Z]+", word) else word.strip("[]"))
    return found


def refused(arguments):
    """The first word that the command line would not know: a command or an option; None if none."""
    command, rest = typer.main.get_command(app), list(arguments)
    while rest[1:] and rest[0] == "--quiet":  # of any command, before it
        del rest[0]
    while rest and rest[0][:2] != "--" and (commands := getattr(command, "commands", None)):
        name = rest.pop(0)
        if name not in commands and (meant := getattr(command, "default", None)):
            name = meant  # the word is an argument of it
        if name not in commands:
            return name
        command = commands[name]
    known = {"--help"}.union(*(param.opts + param.secondary_opts for param in command.params))
    return next((word for word in rest if word[:2] == "--" and word not in known), None)


LINES = sorted({(ids(page), line) for page in PAGES for line in commands(page)})


@pytest.mark.parametrize(("page", "line"), LINES)
def test_commands_are_those_of_the_command_line(page, line):
    if "COMMAND" in line:
        return
    assert refused(words(line)) is None
    for path in re.findall(r"configs/[\w/]+\.yaml", line):
        assert (ROOT / path).is_file()


def test_a_wrong_command_is_found():
    lines = ["jaxdist trein X", "jaxdist train X --device 8", "jaxdist pipeline shw zb_v"]
    lines.append("jaxdist study X --off compression")
    assert [refused(words(line)) for line in lines] == ["trein", "--device", "shw", "--off"]


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/reference/index.md").read_text()
    assert set(re.findall(r"^\| \[`(\w+)`\]", page, re.M)) == set(jaxdist.__all__)
    for name, target in re.findall(r"^\| \[`(\w+)`\]\[([\w.]+)\]", page, re.M):
        assert f"{getattr(jaxdist, name).__module__}.{name}" == target


def test_the_site_breaks_signatures_into_lines():
    """mkdocstrings does so by a formatter, and without one says so at the level of info alone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(re.match(r"(ruff|black)\b", requirement) for requirement in extras["docs"])


def test_there_are_examples():
    assert len(CONFIGS) > 8
    assert len(LINES) > 30
    assert blocks(README, "console")
