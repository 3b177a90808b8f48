"""Every shipped config: its header, its plan, a few steps of those meant for CPU, and mutations."""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxdist.config import Document, json_schema, read, resolved_yaml, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build, load
from jaxdist.models.functional import functional
from jaxdist.runtime.topology import topology_devices
from jaxdist.trees import tree_size

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
HEADER = ("command", "hardware", "time", "target")
SMALL = (ROOT / "configs/mlp/digits.yaml", ROOT / "configs/cnn/digits.yaml")


def header(path):
    lines = path.read_text().splitlines()
    return {
        key: match.group(1)
        for line, key in zip(lines, HEADER, strict=False)
        if (match := re.fullmatch(rf"# {key}: +(.+)", line))
    }


def on_this_machine(config, command=""):
    """The devices that a config's mesh asks for, of the eight that a test has, or of its pod."""
    topology = re.search(r"--topology (\S+)", command)
    if topology and -1 not in config.mesh.sizes().values():
        return topology_devices(topology.group(1))
    product = 1
    for size in config.mesh.sizes().values():
        product *= abs(size) if isinstance(size, int) else size.dcn * size.ici
    return jax.devices()[: 8 if -1 in config.mesh.sizes().values() else product]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_header_says_how_to_run_it(path):
    found = header(path)
    assert tuple(found) == HEADER
    assert str(path.relative_to(ROOT)) in found["command"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_resolves_and_round_trips(path, tmp_path):
    _, config = load(path)
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(config))
    assert load(again)[1] == config
    assert list(load(again)[1].mesh.sizes()) == list(config.mesh.sizes())


def when(path):
    """Few configs in quick tests; `.ci/run` audits the others, or those that include them."""
    name = str(path.relative_to(ROOT / "configs"))
    if name in ("mlp/digits_ring.yaml", "cnn/digits.yaml", "gpt/quickstart.yaml"):
        return ()
    pod = re.search(r"\d[bt]\.yaml$", name)
    size = re.search(r"\d+M-parameter", path.read_text())
    return pytest.mark.full if pod or size else pytest.mark.slow


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=str(p.relative_to(ROOT)), marks=when(p)) for p in CONFIGS]
)
@pytest.mark.every(2)
def test_builds_and_plans_the_step(path):
    """Everything but the computing: data, model, shardings, optimizer, the traced step."""
    document, config = load(path)
    if getattr(config.data, "source", "") == "fashion-mnist":
        document, config = load(path, ["data.source=digits"])
    if getattr(config.data, "source", "") == "cifar10":  # images that the user installs
        document, config = load(path, ["data={type: synthetic, kind: images}"])
    if getattr(config.data, "files", None) == ["kjv.txt"]:  # a text that the user installs
        settings = [f'data.files=["{ROOT}/docs/**/*.md"]', "data.tokenizer={type: bytes}"]
        document, config = load(path, settings)
    if config.data.type == "movielens":  # this would fetch the files
        fields = len(config.data.fields)
        document, config = load(path, [f"data={{type: clicks, fields: {fields}}}"])
    devices = on_this_machine(config, header(path)["command"])
    experiment = build(config, document, devices=devices)
    program = experiment.program
    _, metrics = jax.eval_shape(program.train, program.state_shapes, program.batch)
    assert metrics.shape == (len(program.metrics),)
    for size in re.findall(r"(\d+)M-parameter", path.read_text()):
        assert round(tree_size(program.model.params) / 1e6) == int(size)


@pytest.mark.parametrize("path", SMALL, ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.every(2)
def test_a_few_steps_learn(path):
    document, config = load(path, ["train.steps=30", "train.epochs=null"])
    experiment = build(config, document)
    state, losses = experiment.program.init(), []
    with experiment.loader.batches() as batches:
        for batch in itertools.islice(batches, 30):
            state, metrics = experiment.program.train(state, batch)
            losses.append(float(metrics[0]))
    assert losses[-1] < 0.75 * losses[0]


def test_the_base_model_has_the_size_that_its_file_says_with_a_tokenizer_too():
    """Both sizes in `configs/gpt/base.yaml`: as it is, and with the tokens of GPT-2."""
    _, config = load(ROOT / "configs/gpt/base.yaml")
    sizes = {"whole bytes": 257, "GPT-2": 50_257}
    found = {
        name: tree_size(functional(partial(config.model.build, vocab_size=vocab)).params)
        for name, vocab in sizes.items()
    }
    assert {name: round(size / 1e6) for name, size in found.items()} == {
        "whole bytes": 85,
        "GPT-2": 124,
    }


def test_the_schema_describes_every_setting():
    schema = json.loads(json_schema(ExperimentConfig))
    for definition in [schema, *schema["$defs"].values()]:
        for name, field in definition.get("properties", {}).items():
            assert "description" in field or "$ref" in str(field), name


# Mutations: whatever is done to a shipped config, it builds or it is refused with a place in it.

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([0.5, -1.0, 1e30, 2**40]),
    st.sampled_from(["", "gpt", "mlp", "tensor", "import", "digits", "x" * 300, "\u2603"]),
    st.just([]),
    st.just({}),
    st.just([1, "a", None]),
    st.dictionaries(st.sampled_from(["type", "data", "a"]), st.integers(-1, 8), max_size=2),
)


def places(value, path=()):
    """Every path of a nested mapping."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield (*path, key)
            yield from places(child, (*path, key))


def mutate(values, path, action, junk):
    node = values
    for key in path[:-1]:
        node = node[key]
    if action == "drop":
        node.pop(path[-1])
    elif action == "rename":
        node[f"{path[-1]}x"] = node.pop(path[-1])
    elif action == "replace":
        node[path[-1]] = junk
    else:
        node[path[-1]] = {"nested": node[path[-1]]}


def outcome(values, path):
    """ "builds", or the message that refused it."""
    document = Document(values, {}, path)
    try:
        config = validate(document, ExperimentConfig)
        experiment = build(config, document, devices=on_this_machine(config))
        program = experiment.program
        jax.eval_shape(program.train, program.state_shapes, program.batch)
    except ConfigError as error:
        return str(error)
    return "builds"


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_config_builds_or_says_what_is_wrong(data):
    path = data.draw(st.sampled_from(SMALL))
    values = read(path).values
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(sorted(places(values))))
        action = data.draw(st.sampled_from(["drop", "rename", "replace", "nest"]))
        mutate(values, where, action, data.draw(JUNK))
    found = outcome(values, path)
    assert found == "builds" or str(path) in found
    assert "Traceback" not in found


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_mutated_configs(data):
    test_a_mutated_config_builds_or_says_what_is_wrong.hypothesis.inner_test(data)
