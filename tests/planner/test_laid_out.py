"""The memory of a step from what XLA dumps before it generates code."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxdist.errors import JaxdistError, RunError
from jaxdist.inspect.program import inspect_step, open_subject
from jaxdist.planner import confirm
from jaxdist.planner.laid_out import laid_out_bytes, reported_bytes
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import parse_target
from jaxdist.runtime.topology import topology_devices

REPORT = """BufferAssignment:
allocation 0: size 512, page 0, thread-local:
allocation 1: size 4096, page 0, parameter 1, shape |f32[1024]| at ShapeIndex {}:
allocation 2: size 40, color 2, page 0, preallocated-temp:
allocation 3: size 8192, page 0, preallocated-temp:
"""
NAME = "module_0001.jit_step.cl_1.after_optimizations"
CONFIG = "configs/mlp/digits.yaml"
LIMIT = 1 << 40


def test_a_report_counts_once_the_next_file_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    assert reported_bytes(tmp_path) is None
    (folder / f"{NAME}-buffer-assignment.txt").write_text(REPORT)
    assert reported_bytes(tmp_path) is None
    (folder / f"{NAME}_after_buffer_assignment.txt").write_text("")
    assert reported_bytes(tmp_path) == 4096 + 8192


@pytest.mark.needs_libtpu
@pytest.mark.full
def test_it_is_that_of_the_compiled_program() -> None:
    pytest.importorskip("libtpu")
    early = laid_out_bytes(Path(CONFIG), ["mesh.data=8"], "v5e:2x4", LIMIT)
    devices = topology_devices("v5e:2x4")
    held = inspect_step(open_subject(Path(CONFIG), ["mesh.data=8"], devices)).ledger.memory
    whole = held.argument_bytes + held.output_bytes - held.alias_bytes + held.temp_bytes
    assert early == pytest.approx(whole, rel=0.01)


@pytest.mark.slow
def test_what_goes_wrong_is_told_in_its_words_and_is_no_refusal(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(JaxdistError, match=r"none\.yaml") as raised:
        laid_out_bytes(missing, [], "v5e:2x4", LIMIT)
    assert not isinstance(raised.value, RunError)


def test_a_refusal_is_that_of_the_config_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> int:
        raise RunError(f"{path}: the train step needs 20 GB")

    monkeypatch.setattr(confirm, "laid_out_bytes", refuse)
    found = confirm.lay_out(Path(CONFIG), (), Plan(data=8), parse_target("v5e:2x4"))
    assert found.refusal == f"{CONFIG}: the train step needs 20 GB"
