"""`jaxdist audit`: every knob of a config is judged, and one that does nothing fails it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runs import DIGITS, Jaxdist

from jaxdist.audit.options import ALL, audit_options
from jaxdist.audit.report import audit, has_no_effect
from jaxdist.audit.step import KnobEffect
from jaxdist.errors import RunError
from jaxdist.parallel import compiler

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

MINE = """\
import jax, optax
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs, width=None, init_scale=1.0, remat="none"):
        width = width or 16
        init = nnx.initializers.normal(init_scale)
        self.hidden = nnx.Linear(64, width, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)
    def __call__(self, x):
        return self.out(jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1))))

def optimizer(rate, momentum=0.9, momentun=0.9):
    return optax.sgd(rate, momentum)
"""
IMPORTED = {
    "model": {"type": "import", "path": "audited:Model", "args": {}},
    "loss": {"type": "classification"},
    "sharding": {"params": {"*/kernel": [None, None], "*/bias": [None]}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "audited.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("audited", None)


def audited(folder: Path, changes: dict[str, Any], **options: Any) -> dict[str, KnobEffect]:
    """The findings on the digits with these sections, by knob."""
    path = folder / "config.yaml"
    path.write_text(json.dumps({**DIGITS, **changes}))
    return {f.knob: f for f in audit(path, console=Console(quiet=True), **options)}


def model(**args: Any) -> dict[str, Any]:
    return {**IMPORTED, "model": {**IMPORTED["model"], "args": args}}


def optim(**settings: Any) -> dict[str, Any]:
    return {"optim": {**DIGITS["optim"], **settings}}


def own_optim(**args: Any) -> dict[str, Any]:
    own = {"type": "import", "path": "audited:optimizer", "learning_rate": 1e-3, "args": args}
    return {"optim": own}


JUDGED = {
    "a model of one's own": (
        model(width=8, init_scale=0.5, remat="full"),
        {
            "model.args.width": "ok: program",
            "model.args.init_scale": "ok: initial state",
            "model.args.remat": "NO EFFECT: without the setting the step",
            "loss.type": "required: ",
            "sharding.params.'*/kernel'": "not in the step: it names dims",
        },
    ),
    "its own defaults": (
        model(width=16, remat="none"),
        {"model.args.width": "default: the value that null", "model.args.remat": "default: "},
    ),
    "an optimizer of one's own": (
        own_optim(momentum=0.5, momentun=0.5),
        {
            "optim.args.momentum": "ok: program",
            "optim.args.momentun": "NO EFFECT: without the setting the step",
            "optim.learning_rate": "required: set exactly one of learning_rate and scale_from",
        },
    ),
    "optimizer": (
        optim(b1=0.9, clip_norm=None, skip_spikes={"factor": 4.0, "window": 50}, max_skipped=3)
        | {
            "loss": {"type": "classification", "label_smoothing": 0.1},
            "seed": 3,
            "strategy": {"type": "lookahead", "steps": 3},
            "mesh": {"data": 8, "fake_devices": 8},
        },
        {
            "model.hidden": "required: ",
            "data.source": "not in the step: defines what is learned",
            "loss": "ok: program",
            "loss.label_smoothing": "ok: program",
            "optim.b1": "default: ",
            "optim.clip_norm": "default: ",
            "optim.schedule.type": "ok: program",
            "optim.skip_spikes.factor": "default: ",
            "optim.max_skipped": "not in the step: ends a run",
            "eval.every": "not in the step: evaluates",
            "checkpoint.every": "not in the step: saves",
            "strategy.steps": "not in the step: exchanges",
            "seed": "not in the step: draws",
            "mesh.data": "default: ",
            "mesh.fake_devices": "not in the step: chooses the devices",
        },
    ),
    "train": (
        {
            "train": {
                "steps": 24,
                "batch_size": 64,
                "microbatches": 2,
                "log_every": 3,
                "batch_ramp": {"start_batch_size": 32, "increment": 32, "ramp_examples": 64},
            },
            "loss": {"type": "classification"},
            "mesh": {"data": 8, "tensor": 1},
        },
        {
            "loss": "default: ",
            "train.steps": "required: set exactly one of steps and epochs",
            "train.microbatches": "ok: program",
            "train.log_every": "not in the step: prints",
            "train.batch_ramp": "ok: program",
            "train.batch_ramp.start_batch_size": "required: ",
            "train.batch_ramp.ramp_examples": "not in the step: determines when",
            "mesh.data": "required: mesh {tensor: 1} needs 1 devices, but there are 8",
            "mesh.tensor": "default: ",
        },
    ),
    "layout": (
        {
            "mesh": {"data": 4, "tensor": 2},
            "sharding": {"rules": {"mlp": None}},
            "parallel": {"reduce": {"type": "ring"}, "zero": {"stage": 1, "whole_below": 1}},
        },
        {
            "mesh.data": "required: ",
            "mesh.tensor": "required: ",
            "sharding.rules.mlp": "ok: bytes ",
            "parallel.reduce": "ok: bytes ",
            "parallel.reduce.type": "required: ",
            "parallel.zero.stage": "ok: bytes ",
            "parallel.zero.whole_below": "ok: bytes ",
        },
    ),
    "ZeRO of one replica": (
        {"mesh": {"data": 1, "tensor": 8}, "parallel": {"zero": {"stage": 1, "whole_below": 1}}},
        {
            "parallel.zero.stage": "NO EFFECT: without the setting the step",
            "parallel.zero.whole_below": "NO EFFECT: without the setting the step",
        },
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if i % 3 == 0 else pytest.mark.full) for i, c in enumerate(JUDGED)],
)
@pytest.mark.every(3)
def test_each_knob_is_judged(folder: Path, case: str) -> None:
    changes, expected = JUDGED[case]
    findings = audited(folder, changes)
    for knob, start in expected.items():
        found = findings[knob]
        assert f"{found.verdict}: {found.effect}".startswith(start), found
    idle = {knob for knob, found in findings.items() if found.verdict == "NO EFFECT"}
    assert idle == {knob for knob, start in expected.items() if start.startswith("NO EFFECT")}
    assert has_no_effect(list(findings.values())) == bool(idle)
    # A section is a knob only where its absence is a choice of its own.
    assert not {"model", "optim", "train", "mesh", "parallel", "optim.schedule"} & set(findings)


@pytest.mark.full
def test_full_compiles_and_says_what_each_knob_costs(folder: Path) -> None:
    (folder / "audited.py").write_text(
        MINE + "def turned(rate, turns=0):\n"
        "    def turn(x):\n"
        "        return x if x.ndim < 2 or not turns else x.T.T\n"
        "    def update(grads, state, params=None):\n"
        "        return jax.tree.map(lambda x: -0.1 * turn(x), grads), state\n"
        "    return optax.GradientTransformation(lambda params: (), update)\n"
    )
    own = {"type": "import", "path": "audited:turned", "learning_rate": 1e-3, "args": {"turns": 2}}
    changes = {"optim": own, "train": {"steps": 24, "batch_size": 64, "microbatches": 4}}
    quick, full = audited(folder, changes), audited(folder, changes, full=True)
    assert "memory " in full["train.microbatches"].effect
    # The compiler undoes what is done twice, which the text before compilation does not show.
    assert quick["optim.args.turns"].verdict == "ok"
    assert full["optim.args.turns"].verdict == "NO EFFECT"


INCLUDED = ("bert/large", "bert/small", "gpt/quickstart", "mlp/digits")
"""Configs that others include, which are audited with all that these set."""


IN_3D = ("1.3b", "175b", "1t")
"""Configs of 64 to 4,096 TPUs, audited for eight: on CPUs, stages split no sequence."""
SMALL_IN_3D = ["mesh={data: 2, stage: 2, tensor: 2}", "model.layers=4", "data.window=64"]
SMALL_IN_3D += ["model.embed=64", "model.heads=4", "model.mlp=128", "data.vocab_size=256"]


def shipped(path: Path) -> Any:
    """A knob takes a second: .ci/run audits all but those of pods and those that others include."""
    name = str(path.relative_to(ROOT))
    quick = ("configs/mlp/digits_ring.yaml", "configs/recommend/movielens_clicks.yaml")
    where = "of_pods-" if re.search(r"(\d[bt]|imagenet)\.yaml$", name) else ""
    if str(path.relative_to(ROOT / "configs").with_suffix("")) in INCLUDED:
        where = "included-"
    marks = [] if name in quick else [pytest.mark.slow]
    marks += [pytest.mark.needs_libtpu] if path.stem in IN_3D else []
    return pytest.param(path, id=where + name, marks=marks)


@pytest.mark.parametrize("path", [shipped(path) for path in CONFIGS])
@pytest.mark.every(2)
def test_every_shipped_config_passes(path: Path) -> None:
    here = ["data.source=digits"] if "fashion-mnist" in path.read_text() else []
    if "cifar" in path.stem:  # images that the user installs
        here = ["data={type: synthetic, kind: images}"]
    if "kjv.txt" in path.read_text():  # a text that the user installs
        here = ['data.files=["docs/**/*.md"]', "data.tokenizer={type: bytes}"]
        here += ["mesh.data=8", "train.batch_size=8"] if "smollm2" in path.stem else []
    topology = "v4:2x2x2" if path.stem in IN_3D else None
    here = SMALL_IN_3D if topology else here
    if "movielens" in path.stem:  # this would fetch the files
        here = [f'data={{"type": "clicks", "fields": {7 if "clicks" in path.stem else 2}}}']
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    findings = audit(path, here, topology=topology, console=console)
    assert not has_no_effect(findings), out.getvalue()
    verdicts = {found.verdict for found in findings}
    # A config may set nothing that moves the step away from a default.
    assert {"required", "not in the step"} <= verdicts
    assert verdicts & {"ok", "default"}
    assert max(map(len, out.getvalue().splitlines()[1:])) <= 80


def test_the_command(jaxdist: Jaxdist) -> None:
    jaxdist.config(mesh={"data": -1})
    passed = jaxdist("audit", "config.yaml", "--devices", 2, "--json", "report.json")
    assert (passed.code, passed.err) == (0, ""), passed
    report = json.loads((jaxdist.folder / "report.json").read_text())
    assert report["passed"]
    assert not report["full"]
    assert report["devices"] == {"kind": "cpu", "count": 2}
    assert {"jax", "platform"} <= set(report["versions"])
    (rate,) = (k for k in report["knobs"] if k["knob"] == "optim.schedule.type")
    assert (rate["value"], rate["verdict"], rate["effect"]) == ("constant", "ok", "program")
    assert rate["origin"] == "config.yaml:1"


@pytest.mark.full
def test_the_command_fails_with_the_name_of_an_idle_knob(jaxdist: Jaxdist) -> None:
    (jaxdist.folder / "audited.py").write_text(MINE)
    jaxdist.config(**own_optim(momentun=0.5))
    failed = jaxdist("audit", "config.yaml", "optim.args.momentum=0.5", "--json", "report.json")
    assert (failed.code, failed.err) == (1, ""), failed
    assert "optim.args.momentun = 0.5 (config.yaml:1) has no effect" in failed.out
    assert not json.loads((jaxdist.folder / "report.json").read_text())["passed"]


def test_the_command_compiles_for_one_thing(jaxdist: Jaxdist) -> None:
    jaxdist.config()
    refused = jaxdist("audit", "config.yaml", "--devices", 4, "--topology", "v5e:2x4")
    assert refused.code == 2
    assert (
        "error: --devices 4 compiles for CPUs, but --topology v5e:2x4 compiles for TPUs"
        in refused.message
    )


def test_a_report_that_cannot_be_written_is_an_error(folder: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write the audit to .*none/report.json: No such"):
        audited(folder, {}, json_file=folder / "none/report.json")


@pytest.mark.needs_libtpu
@pytest.mark.full
def test_for_tpus(folder: Path) -> None:
    mesh = {"mesh": {"data": 4}, "parallel": {"zero": {"stage": 1, "whole_below": 1}}}
    findings = audited(folder, mesh, topology="v5e:2x2")
    assert findings["parallel.zero.stage"].verdict == "ok"
    assert findings["mesh.data"].verdict == "default"


XLA = {"options": {"xla_disable_hlo_passes": "fusion", "xla_dump_hlo_as_text": True}}


@pytest.mark.full
def test_options_for_the_compiler_are_judged_by_the_compiled_program(folder: Path) -> None:
    findings = audited(folder, {"parallel": {"xla": {"preset": "default", **XLA}}})
    judged = {knob.rpartition(".")[2]: found.verdict for knob, found in findings.items()}
    assert judged["xla_disable_hlo_passes"] == "ok"
    assert judged["xla_dump_hlo_as_text"] == "NO EFFECT"
    assert judged["preset"] == "default"


@pytest.mark.full
def test_the_table_of_options_says_what_each_changes(jaxdist: Jaxdist) -> None:
    jaxdist.config(parallel={"xla": XLA})
    done = jaxdist.here(
        "audit", "config.yaml", "--devices", 8, "--options", "--json", "report.json"
    )
    assert (done.code, done.err) == (0, ""), done
    lines = [line.split()[:3] for line in done.out.splitlines()[1:]]
    assert ["changes", "options", "xla_disable_hlo_passes=fusion:"] in lines
    assert ["same", "program", "options"] in lines
    report = json.loads((jaxdist.folder / "report.json").read_text())
    assert [row["verdict"] for row in report["options"]] == ["changes", "same program", "changes"]
    assert report["options"][2]["option"] == "all of them"


def test_the_table_says_where_there_are_no_options(jaxdist: Jaxdist) -> None:
    jaxdist.config()
    done = jaxdist.here("audit", "config.yaml", "--devices", 8, "--options")
    assert "no preset has compiler options for cpu, and parallel.xla.options sets none" in done.out
    refused = jaxdist.here("audit", "config.yaml", "--devices", 8, "--options", "--full")
    assert "--full has no effect with --options" in refused.message


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_a_preset_is_taken_apart_on_tpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presets: Any = compiler.PRESETS
    monkeypatch.delitem(presets, "overlap")  # the largest
    mesh = {"mesh": {"data": 4}, "parallel": {"zero": {"stage": 3, "whole_below": 1}}}
    path = folder / "config.yaml"
    path.write_text(json.dumps({**DIGITS, **mesh}))
    found = audit_options(path, topology="v5e:2x2", console=Console(quiet=True))
    named = {name for options in presets.values() for name in options}
    assert {effect.option for effect in found} - {ALL} == named
    changed = [effect.effect for effect in found if effect.verdict == "changes"]
    assert changed
    assert all("predicted time " in effect for effect in changed)
    assert not [effect for effect in found if effect.verdict == "refused"]
