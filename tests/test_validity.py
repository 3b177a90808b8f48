"""The table of validity: every row, what it lets through, the page, and the command line."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.compression.config import (
    CompressAuto,
    CompressCast,
    CompressQuantize,
    CompressSign,
    CompressTopK,
)
from jaxdist.errors import ConfigError, JaxdistError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.parallel.plan import ParallelConfig, plan_exchange
from jaxdist.parallel.zero import ZeroConfig
from jaxdist.sharding import DEFAULT_RULES, ShardingConfig, make_layout
from jaxdist.validity import sections
from jaxdist.validity.features import FEATURES, Facts, OptimFacts
from jaxdist.validity.page import footnotes, validity_page
from jaxdist.validity.table import ROWS

DOCS = Path(__file__).parents[1] / "docs"
TYPES = ("xla", "ring", "hierarchical")
"""Of each that the table tells apart."""
SPLIT = {"data_dcn": 2, "data_ici": 4}
REDUCTIONS = {
    None: None,
    **{kind: TypeAdapter(ReduceConfig).validate_python({"type": kind}) for kind in TYPES},
}
MESHES = (
    {"tensor": 8},
    {"data": 8},
    {"data": 4, "tensor": 2},
    {"data": 4, "stage": 2},
    SPLIT,
    {**SPLIT, "tensor": 2},
    {**SPLIT, "stage": 2},
)
ZEROS = [
    ZeroConfig(stage=stage, scope=scope, secondary=secondary)
    for stage in (0, 1, 2, 3)
    for scope in ("all", "ici")
    for secondary in ([False, True] if stage == 3 else [False])
]
MESSAGES = (
    None,
    CompressSign(),
    CompressSign(axis="data.dcn"),
    CompressQuantize(error_feedback=False),
)
EVERY = [
    Facts(
        mesh,
        tuple(name for name in mesh if name.startswith("data")),
        REDUCTIONS[kind],
        zero,
        split if any(name.startswith("data") for name in mesh) else {},
        offloads=offloads,
        compression=messages,
        shards=shards,
    )
    for mesh, kind, zero, split, offloads, messages, shards in itertools.product(
        MESHES, (None, *TYPES), ZEROS, ({}, {"w": "embed"}), (False, True), MESSAGES, (None, 8)
    )
]
SCALARS = [
    Facts(
        mesh,
        tuple(name for name in mesh if name.startswith("data")),
        REDUCTIONS[kind],
        zero,
        offloads=kind is None,
        compression=messages,
        shards=shards,
        scalars=scalars,
        microbatches=2 if more else 1,
        workers=2 if more else 1,
        weighted=more,
        evaluation="100 examples in parts" if more else None,
    )
    for mesh, kind, zero, messages, shards, scalars, more in itertools.product(
        MESHES, (None, *TYPES), ZEROS, MESSAGES, (None, 8), ((), ("loss",)), (False, True)
    )
]
EVERY += SCALARS
EVERY += [replace(facts, strategy="parameter_server") for facts in EVERY[::3]]
"""Facts of every kind that the features of the matrix tell apart."""
DATA = Facts({"data": 8}, ("data",))
UNSHARDED = replace(DATA, zero=ZeroConfig(stage=3))


def with_settings(strategy="parameter_server", **settings):
    """Facts of settings, with `__` for a dot in their paths."""
    named = {path.replace("__", "."): value for path, value in settings.items()}
    return replace(DATA, strategy=strategy, settings=named)


def with_messages(optim, facts=DATA, kind=CompressSign, **messages):
    return replace(facts, optim=optim, compression=kind.model_validate(messages))


ADAMW, ONEBIT = OptimFacts("adamw", 0.9), OptimFacts("onebit_adam", 0.9, freeze_step=3)
COMPRESSED = {"type": "compressed_momentum", "b1": 0.9}
RESCALED = {"strategy": "synchronous", "elastic__batch": "rescale"}
SHARED = {
    "sharding.context_order": "zigzag",
    "sharding.rules.embed": "expert",
    "sharding.collective_matmul": "True",
    "model.type": "cnn",
    "model.attention": "plain",
    "model.experts": "{}",
    "model.attention_window": "4",
    "loss.type": "dpo",
}
TABLES = {
    "train__batch_ramp": "{}", "train__phases": "[]", "train__check_replicas": "{}",
    "train__microbatches": "2", "elastic__batch": "rescale", "model__freeze": "[]",
    "model__lora": "{}", "checkpoint__local": "{}", "optim__clip_norm": "1.0",
    "optim__skip_spikes": "{}", "optim__max_grad_norm": "1.0", "optim__loss_scale": "{}",
}  # fmt: skip
EVERY += [
    with_messages(ADAMW, error_feedback={"type": "momentum"}),
    with_messages(ADAMW, error_feedback=COMPRESSED),
    with_messages(replace(ONEBIT, momentum=0.8), error_feedback=COMPRESSED),
    with_messages(ONEBIT),
    with_messages(ONEBIT, error_feedback=COMPRESSED),
    with_messages(ADAMW, UNSHARDED, CompressAuto, error_feedback=False),
    with_messages(
        ADAMW, UNSHARDED, CompressCast, error_feedback=False, warmup_steps=3,
        rules=({"pattern": "*", "codec": {"type": "sign"}},),
    ),
    with_messages(ADAMW, UNSHARDED, CompressTopK, error_feedback=False),
    with_settings(**RESCALED),
    with_settings(**RESCALED, optim__scale_from="{}", train__batch_ramp="{}", train__phases="[]"),
    replace(with_settings(**RESCALED, optim__scale_from="{}"), shards=8),
    with_settings(parallel__zero="{}"),
    replace(DATA, strategy="parameter_server", mesh={"data": 2, "context": 4}),
    replace(DATA, mesh={"context": 2, "stage": 2}, settings=SHARED | {"sharding.context": "ring"}),
    replace(
        DATA,
        mesh={"context": 2},
        settings=SHARED | {"sharding.context": "ring", "model.attention": "splash"},
    ),
    replace(DATA, mesh={"context": 2}, settings=SHARED | {"sharding.context": "ulysses"}),
    replace(DATA, mesh={"context": 2}, settings=SHARED | {"sharding.context": "ring"}),
    with_settings(train__batch_ramp="{}", train__phases="[]", train__check_replicas="{}"),
    with_settings(
        optim__clip_norm="1.0", optim__skip_spikes="{}", optim__loss_scale="{}",
        optim__master_weights="bfloat16", optim__skip_nonfinite="True", optim__max_grad_norm="1",
    ),
    replace(DATA, strategy="parameter_server", optim=ONEBIT),
    replace(DATA, strategy="parameter_server", optim=OptimFacts("muon", 0.95)),
    replace(DATA, shards=8, optim=OptimFacts("muon", 0.95)),
    replace(DATA, strategy="parameter_server", optim=replace(ADAMW, averages=True)),
    replace(with_settings(strategy__codec="sign"), buffers=("norm/mean",)),
    replace(with_settings(strategy__consistency__value_bound="1"), buffers=("norm/mean",)),
    replace(with_settings(strategy__consistency__delay_compensation="set"), buffers=("norm/mean",)),
    with_settings(strategy__codec="sign", strategy__consistency__type="elastic"),
    with_settings(strategy__aggregation__type="racks", strategy__consistency__type="elastic"),
    with_settings(strategy__aggregation__type="racks", strategy__consistency__value_bound="1"),
    with_settings(strategy__aggregation__type="secure", strategy__consistency__type="ssp"),
    with_settings(strategy__aggregation__type="secure", strategy__consistency__backups="1"),
    with_settings(strategy__aggregation__type="secure", strategy__codec="sign"),
    with_settings("lookahead", optim__master_weights="bfloat16"),
    with_settings(model__freeze="['blocks/*']"),
    with_settings(model__lora="{}"),
    with_settings(optim__rates="{}"),
    replace(
        with_settings("synchronous", optim__rates="{}"), optim=replace(ADAMW, averages=True)
    ),
    replace(
        with_settings("synchronous", model__freeze="['blocks/*']"),
        zero=ZeroConfig(stage=3, prefetch=True),
    ),
    replace(DATA, strategy="lookahead", optim=replace(ADAMW, averages=True)),
    with_settings(model__experts="{}"),
    replace(DATA, mesh={"data": 2, "expert": 4}, shards=8),
    replace(DATA, zero=ZeroConfig(stage=1, offload=True), shards=8),
    replace(
        with_settings("lookahead"), zero=ZeroConfig(stage=1, offload_parameters=("*",)), shards=8
    ),
    replace(DATA, zero=ZeroConfig(stage=1, offload_parameters=("*",)), mesh={"stage": 2}),
    replace(with_settings("hybrid", **TABLES), shards=8, microbatches=2,
            mesh={"data": 2, "stage": 2, "context": 2}, optim=replace(ADAMW, averages=True)),
]  # fmt: skip
"""Facts of each row that speaks of other sections."""


def active(facts, name):
    return sections.EVERY[name].active(facts)


@cache
def found():
    """Of each of `EVERY` its features, and the rows that refuse it."""
    return [
        (
            frozenset(name for name in FEATURES if active(facts, name)),
            frozenset(n for n, row in enumerate(ROWS, 1) if row.problem(facts) is not None),
        )
        for facts in EVERY
    ]


@pytest.mark.parametrize("number", range(1, len(ROWS) + 1))
def test_a_row_gives_its_values_its_reason_and_a_remedy(number):
    row = ROWS[number - 1]
    hit = [facts for facts, (_, refused) in zip(EVERY, found(), strict=True) if number in refused]
    assert hit
    for facts in hit:
        message = row.problem(facts)
        assert message.endswith(f": {row.why}; {row.instead}")
        for group in row.groups:
            assert any(active(facts, name) for name in group)
            shown = [sections.EVERY[name].shown(facts) for name in group if active(facts, name)]
            assert shown[0] in message


@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids=" x ".join)
def test_the_matrix_says_what_the_table_does(pair):
    """A footnote refuses every config with both features; without one, some config has both."""
    both = [refused for names, refused in found() if names.issuperset(pair)]
    alone = [number for number, by_itself in footnotes(*pair) if by_itself]
    if alone:
        assert both
        assert all(refused.issuperset(alone) for refused in both)
    elif both:
        assert not all(both)


def plan(mesh, dims=None, rules=None, shapes=None, **parallel):
    layout = make_layout(
        ShardingConfig(rules=rules or {}), build_mesh(MeshConfig.model_validate(mesh))
    )
    dims = dims or {"w": ("embed", "mlp")}
    shapes = dict.fromkeys(dims, (64, 64)) | (shapes or {})
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return plan_exchange(ParallelConfig.model_validate(parallel), layout, params, dims, whole=None)


RING, XLA, HIERARCHICAL = ({"type": kind} for kind in ("ring", "xla", "hierarchical"))


SIGN = {"type": "sign"}
TWO = {"data": {"dcn": 2, "ici": 4}}


@pytest.mark.parametrize(
    ("mesh", "rules", "parallel", "message"),
    [
        ({"tensor": 8}, None, {"zero": {"stage": 2}},
         r"zero\.stage 2 with mesh \{tensor: 8\}: .* no axis splits the batch; set mesh\.data"),
        ({"data": 8}, {"batch": None}, {"zero": {"stage": 1}},
         r"zero\.stage 1 with mesh \{data: 8\}: .* leave sharding\.rules\.batch at data"),
        ({"data": 8}, {"embed": "data"}, {"zero": {"stage": 3}},
         r"stage 3 with sharding\.rules\.embed, which splits w over data: .* rule to null"),
        ({"data": 8}, None, {"zero": {"stage": 1, "scope": "ici"}},
         r"scope ici with mesh \{data: 8\}: .* \{dcn: D, ici: I\}, or parallel\.zero\.scope: all"),
        ({"tensor": 8}, None, {"reduce": RING},
         r"reduce\.type ring with mesh \{tensor: 8\}: .* parallel\.reduce: null"),
        ({"data": 8}, {"embed": "data"}, {"reduce": RING},
         r"type ring with sharding\.rules\.embed, which splits w over data: .* rule to null"),
        ({"data": 4, "stage": 2}, {"embed": "data"}, {},
         r"mesh \{data: 4, stage: 2\} with sharding\.rules\.embed, .*; .* leave out mesh\.stage"),
        ({"data": 8}, None, {"reduce": HIERARCHICAL},
         r"type hierarchical with mesh \{data: 8\}: .* \{dcn: D, ici: I\}, or .*type: ring"),
        (TWO, None,
         {"reduce": HIERARCHICAL, "zero": {"stage": 1, "scope": "ici"}},
         r"type hierarchical with parallel\.zero\.scope ici: .*; set parallel\.reduce\.type: ring"),
        ({"data": 4, "stage": 2}, None, {"zero": {"stage": 3, "prefetch": True}},
         r"zero\.prefetch true with mesh \{data: 4, stage: 2\}: .*\.gather determines when"),
        ({"data": 4, "stage": 2}, None, {"zero": {"stage": 3}, "reduce": RING},
         r"stage 3 with mesh .*stage: 2\} with parallel\.reduce\.type ring: .*type: xla, or "),
        ({"data": 4, "stage": 2}, None, {"zero": {"stage": 2}, "reduce": RING},
         r"stage 2 with mesh .*stage: 2\} with parallel\.reduce\.type ring: .*type: xla, or "),
        ({"tensor": 8}, None, {"compression": SIGN},
         r"compression\.type sign over axis data with mesh \{tensor: 8\}: .*compression: null"),
        ({"data": 8}, {"embed": "data"}, {"compression": SIGN},
         r"axis data with sharding\.rules\.embed, which splits w over data: .* rule to null"),
        ({"data": 8}, None, {"compression": {**SIGN, "axis": "data.dcn"}},
         r"axis data\.dcn with mesh \{data: 8\}: .* \{dcn: D, ici: I\}, or .*axis: data"),
        ({"data": 8}, None, {"compression": SIGN, "zero": {"stage": 3}},
         r"zero\.stage 3 with parallel\.compression\.type sign .* set mesh\.data: .*stage: 1"),
        ({"data": 8}, None, {"zero": {"stage": 3, "secondary": True}},
         r"parallel\.zero\.secondary with mesh \{data: 8\}: .* \{dcn: D, ici: I\}, or "),
        (TWO, None, {"zero": {"stage": 3, "secondary": True, "scope": "ici"}},
         r"parallel\.zero\.secondary with parallel\.zero\.scope ici: .*scope: all, or "),
        (TWO, None, {"zero": {"stage": 3, "secondary": True}, "reduce": HIERARCHICAL},
         r"zero\.secondary with parallel\.reduce\.type hierarchical: .*type: ring, or "),
        ({"data": 8}, None, {"compression": {**SIGN, "error_feedback": False, "warmup_steps": 3},
         "zero": {"stage": 3}}, r"warmup_steps 3 with .*stage 3 .*; leave the setting out, or "),
        ({"data": 8}, None, {"compression": {"type": "topk", "error_feedback": False},
         "zero": {"stage": 2}}, r"topk, which cannot add up shards, with .*stage 2 .*; use codec "),
        (TWO, None, {"compression": SIGN, "zero": {"stage": 1, "scope": "ici"}},
         r"scope ici with parallel\.compression\.type sign over axis data: .*axis: data\.dcn, or "),
        (TWO, None, {"compression": {**SIGN, "axis": "data.dcn"}, "zero": {"stage": 1}},
         r"scope all with .* over axis data\.dcn: .*scope: ici, or .*axis: data"),
        (TWO, None, {"compression": {**SIGN, "axis": "data.dcn"}, "reduce": HIERARCHICAL},
         r"axis data\.dcn with parallel\.reduce\.type hierarchical: .*type: ring"),
    ],
)  # fmt: skip
def test_what_is_refused(mesh, rules, parallel, message, devices):
    with pytest.raises(ConfigError, match=message):
        plan(mesh, rules=rules, **parallel)


def test_all_violations_come_in_one_message(devices):
    with pytest.raises(ConfigError) as refused:
        plan({"tensor": 8}, reduce=HIERARCHICAL, zero={"stage": 3})
    lines = str(refused.value).splitlines()
    assert [line.split(" with ")[0] for line in lines] == [
        "parallel.zero.stage 3",
        "parallel.reduce.type hierarchical",
    ]


@pytest.mark.parametrize(
    ("mesh", "parallel", "message"),
    [
        ({"data": 1, "tensor": 8}, {"zero": {"stage": 2}},
         "parallel.zero.stage 2 has no effect: data of mesh {data: 1, tensor: 8} has size 1"),
        ({"data": {"dcn": 8, "ici": 1}}, {"zero": {"stage": 1, "scope": "ici"}},
         "parallel.zero.stage 1 has no effect: data_ici of mesh {data_dcn: 8, data_ici: 1}"),
        ({"data": 8}, {"zero": {"stage": 1, "whole_below": 5000}},
         "ZeRO splits no parameter over 8 devices. Parameters of less than 5000 elements "
         "(parallel.zero.whole_below) stay whole"),
        ({"data": 8}, {"zero": {"scope": "ici"}},
         "parallel.zero.scope ici has no effect at parallel.zero.stage 0"),
        ({"data": 8}, {"zero": {"offload": True}},
         "parallel.zero.offload true has no effect at parallel.zero.stage 0"),
        ({"data": 1, "tensor": 8}, {"reduce": RING}, "parallel.reduce.type ring has no effect"),
        ({"data": 8}, {"reduce_dtype": "bfloat16"},
         "parallel.reduce_dtype bfloat16 has no effect with parallel.reduce null"),
        ({"stage": 8}, {"reduce_dtype": "bfloat16"},
         "parallel.reduce_dtype bfloat16 has no effect: no axis of mesh {stage: 8} splits the"),
        ({"data": 8}, {"pipeline": {"schedule": {"type": "gpipe"}, "ahead": True}},
         "parallel.pipeline.schedule gpipe and parallel.pipeline.ahead true have no effect: mesh "
         "{data: 8} has one stage"),
        ({"data": 8, "stage": 1}, {"pipeline": {"activations": "stash"}},
         "parallel.pipeline.activations stash has no effect: mesh {data: 8, stage: 1} has one"),
        ({"data": 8}, {"pipeline": {"layers": (2, 1)}},
         "parallel.pipeline.layers [2, 1] has no effect"),
        ({"data": 8}, {"pipeline": {"schedule": {"type": "interleaved", "chunks": 3}}},
         "parallel.pipeline.schedule interleaved has no effect"),
        ({"data": 8}, {"reduce": XLA, "zero": {"stage": 2, "gather_dtype": "bfloat16"}},
         "gather_dtype bfloat16 has no effect with parallel.zero.stage 2 and parallel.reduce.type"),
        ({"data": 8}, {"reduce": XLA, "zero": {"stage": 2, "prefetch": True}},
         "prefetch true has no effect with parallel.zero.stage 2 and parallel.reduce.type xla"),
        ({"data": 8}, {"zero": {"stage": 3, "gather_dtype": "bfloat16"}},
         "gather_dtype bfloat16 has no effect with parallel.zero.stage 3 and parallel.reduce null"),
        ({"data": 8}, {"batch_norm": "local"},
         "parallel.batch_norm local has no effect with parallel.reduce null"),
    ],
)  # fmt: skip
def test_what_does_nothing_is_noticed_and_not_refused(mesh, parallel, message, devices):
    (notice,) = plan(mesh, **parallel)[1]
    assert message in notice


def test_an_axis_that_no_rule_names_is_noticed(devices):
    rules = {dim: None for dim, axis in DEFAULT_RULES.items() if axis == "tensor"}
    (notice,) = plan({"data": 4, "tensor": 2}, rules=rules)[1]
    assert "mesh axis tensor of size 2 has no effect" in notice


@pytest.mark.parametrize("zero", [{}, {"stage": 3}, {"stage": 1, "scope": "ici"}])
def test_what_has_an_effect_is_not_noticed(zero, devices):
    mesh = {"data": {"dcn": 2, "ici": 2}, "tensor": 2}
    assert plan(mesh, reduce=XLA, zero=zero)[1] == ()


def test_a_reduction_that_stages_bring_with_them_is_one(devices):
    settings = {"reduce_dtype": "bfloat16", "pipeline": {"ahead": True}}
    found, notices = plan({"data": 4, "stage": 2}, **settings)
    assert notices == ()
    assert (found.algorithm, found.reduce_dtype) == (Xla(), "bfloat16")


def test_settings_as_they_are_by_default_are_not_noticed(devices):
    """A run's own config names every setting, and is run again."""
    defaults = ParallelConfig().pipeline.model_dump(mode="json")
    assert plan({"data": 8}, pipeline=defaults)[1] == ()


def test_what_no_device_has_less_of_is_noticed(devices):
    """Of the five, one divides, one is filled up with zeros, and one is too small to be split."""
    names = ("even", "filled", "odd", "odder", "small")
    dims: dict[str, tuple[str, ...]] = dict.fromkeys(names, ("layers", "mlp"))
    dims["even"] = dims["filled"] = ("embed", "mlp")
    shapes = {"filled": (63, 66), "odd": (40, 66), "odder": (40, 70), "small": (3, 6)}
    mesh = {"data": 4, "tensor": 2}
    (notice,) = plan(mesh, dims, shapes=shapes, zero={"stage": 2})[1]
    assert "stage 2 keeps odd [40, 66] and 1 more whole on every device: no dim divides" in notice
    assert "by 4 (data)" in notice


def test_the_page_is_up_to_date():
    page = (DOCS / "validity.md").read_text()
    assert page == validity_page(), "run the command in its header"
    assert "| 13 reduce: " in page


SECTIONS = {
    "model": {"type": "gpt", "layers": 1, "embed": 32, "heads": 2, "vocab_multiple": 4},
    "data": {"type": "synthetic", "kind": "tokens", "window": 8},
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 1, "batch_size": 8},
}


@pytest.fixture
def compilations(devices):
    """The seconds that each compilation took."""
    found = []

    def listen(name, seconds, **_):
        if "backend_compile" in name:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("command", ["train", "inspect"])
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["mesh={data: 3, tensor: 2}"],
         ["mesh {data: 3, tensor: 2} needs 6 devices, but there are 8", "{data: 4, tensor: 2}"]),
        (["mesh={data: 2, tensor: 4}"],
         ["blocks/attention/query", "dim 'heads' of length 2 does not divide over mesh axis "
          "'tensor' of size 4", "sharding.rules.heads: null"]),
        (["mesh={data: 1, tensor: 8}", "model.heads=8"],
         ["dim 'vocab' of length 260 does not divide over mesh axis 'tensor' of size 8"]),
        (["mesh={data: 8}", "parallel.zero={stage: 2, scope: ici}"],
         ["parallel.zero.scope ici with mesh {data: 8}", "set mesh.data: {dcn: D, ici: I}"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)  # fmt: skip
def test_bad_input_is_told_before_anything_is_compiled(
    command, overrides, parts, tmp_path, monkeypatch, compilations
):
    (tmp_path / "config.yaml").write_text(json.dumps(SECTIONS))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [command, "config.yaml", *overrides])
    assert isinstance(result.exception, JaxdistError)
    assert result.exception.exit_code == 2
    message = " ".join(str(result.exception).split())
    assert message.startswith("1 problem in config.yaml: ")
    for part in parts:
        assert part in message
    assert not compilations
    assert not Path("runs").exists()
    jax.jit(lambda x: x + len(message))(jnp.zeros(3))
    assert compilations


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param("train", marks=pytest.mark.full), "inspect"])
def test_a_stage_without_effect_warns_on_the_console(command, tmp_path):
    sections = {**SECTIONS, "parallel": {"zero": {"stage": 2}}, "mesh": {"data": 1}}
    (tmp_path / "config.yaml").write_text(json.dumps(sections))
    done = subprocess.run(
        [sys.executable, "-m", "jaxdist.cli", command, "config.yaml", "--devices", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning: parallel.zero.stage 2 has no effect: data of mesh {data: 1}" in done.stdout
