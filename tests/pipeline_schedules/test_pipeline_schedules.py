"""Every generator over its sizes passes the check; sizes it cannot serve are refused."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter, ValidationError

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.check import check_schedule
from jaxdist.pipeline_schedules.csv_form import write_csv
from jaxdist.pipeline_schedules.derived import forward_only
from jaxdist.pipeline_schedules.dual_pipe_v import dual_pipe_v
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import breadth_first, interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.schedule import TaskKind, loop, v_shape
from jaxdist.pipeline_schedules.zero_bubble.auto import zb_auto
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1, zb_h2
from jaxdist.pipeline_schedules.zero_bubble.v import v_half, v_min, zb_v

ANY = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "v_half": v_half,
    "v_min": v_min,
    "zb_auto": lambda p, m: zb_auto(p, m, search=3),
}
LEAST = {
    "zb_h1": (zb_h1, lambda p: p),
    "zb_h2": (zb_h2, lambda p: 2 * p - 1),
    "zb_v": (zb_v, lambda p: 2 * p - 1),
    "dual_pipe_v": (dual_pipe_v, lambda p: 2 * p),
    "breadth_first": (lambda p, m: breadth_first(p, m, 2), lambda p: p),
}
stages = st.integers(1, 9)
CONFIG = TypeAdapter(PipelineScheduleConfig)


@pytest.mark.full
@settings(max_examples=60)
@given(st.sampled_from(sorted(ANY)), stages, st.integers(1, 24))
def test_any_number_of_microbatches(name, p, m):
    made = ANY[name](p, m)
    check_schedule(made)
    assert (made.name, made.stages, made.microbatches) == (name, p, m)


@settings(max_examples=60)
@given(st.sampled_from(sorted(LEAST)), stages, st.integers(0, 12))
def test_from_the_least_number_on(name, p, more):
    build, least = LEAST[name]
    made = build(p, least(p) + more)
    check_schedule(made)
    assert (made.name, made.stages, made.microbatches) == (name, p, least(p) + more)


@settings(max_examples=40)
@given(stages, st.integers(1, 4), st.integers(2, 4))
def test_chunks(p, rounds, v):
    for made in (interleaved(p, rounds * p, v), breadth_first(p, rounds * p, v)):
        check_schedule(made)
        assert made.placement == loop(p, p * v)


@settings(max_examples=40)
@given(stages, st.integers(1, 12), st.integers(1, 3))
def test_forward_only(p, m, v):
    for placement in (loop(p, p * v), v_shape(p)):
        made = forward_only(placement, m)
        check_schedule(made)
        assert made.placement == placement
        assert {task.kind for row in made.rows for task in row} == {TaskKind.FORWARD}


def test_forward_only_takes_what_is_furthest_first():
    """Depth first: no more waits between the chunks than a round of microbatches."""
    made = forward_only((0, 1, 0, 1), 4)
    found = " ".join(map(str, made.tasks(0)))
    assert found == "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"


@pytest.mark.parametrize("name", sorted(LEAST))
def test_fewer_microbatches_are_refused(name):
    build, least = LEAST[name]
    with pytest.raises(
        ConfigError,
        match=rf"{name}: 4 stages need at least {least(4)} microbatches, got "
        rf"{least(4) - 1}: use {least(4)} or more, or fewer stages, or \w+",
    ):
        build(4, least(4) - 1)


def test_interleaved_needs_whole_rounds():
    with pytest.raises(ConfigError, match=r"interleaved: 4 stages need at least 4 .* got 3"):
        interleaved(4, 3, 2)
    with pytest.raises(
        ConfigError, match=r"10 microbatches are not a multiple of 4 stages: use 8 or 12"
    ):
        interleaved(4, 10, 2)


@pytest.mark.parametrize(("build", "instead"), [(interleaved, "1f1b"), (breadth_first, "gpipe")])
def test_one_chunk_is_another_schedule(build, instead):
    with pytest.raises(
        ConfigError, match=rf"1 chunks per stage: use at least 2, or use schedule {instead}"
    ):
        build(4, 8, 1)


@pytest.mark.parametrize("name", sorted(ANY))
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_nothing_to_do_is_refused(name, sizes):
    with pytest.raises(
        ConfigError, match=rf"{name}: {sizes[0]} stages and {sizes[1]} microbatches"
    ):
        ANY[name](*sizes)


def test_forward_only_of_nothing():
    with pytest.raises(ConfigError, match="forward_only: 0 stages and 4 microbatches"):
        forward_only((), 4)


CONFIGS = [
    {"type": "gpipe"},
    {"type": "1f1b"},
    {"type": "interleaved", "chunks": 2},
    {"type": "breadth_first", "chunks": 2},
    {"type": "zb_h1"},
    {"type": "zb_h2"},
    {"type": "zb_auto", "memory_limit": 1.5, "costs": {"forward": [1, 2, 1, 1.5], "kept": 0.5}},
    {"type": "zb_v"},
    {"type": "v_half"},
    {"type": "v_min"},
    {"type": "dual_pipe_v"},
]


@pytest.mark.parametrize("section", CONFIGS, ids=lambda section: section["type"])
def test_config(section):
    made = CONFIG.validate_json(CONFIG.dump_json(CONFIG.validate_python(section, strict=False)))
    schedule = made.build(stages=4, microbatches=8)
    check_schedule(schedule)
    assert (schedule.name, schedule.stages, schedule.microbatches) == (section["type"], 4, 8)


def test_config_csv(tmp_path):
    path = tmp_path / "mine.csv"
    write_csv(one_f_one_b(4, 8), path)
    config = CONFIG.validate_python({"type": "csv", "path": str(path)})
    assert config.build(4, 8).rows == one_f_one_b(4, 8).rows
    with pytest.raises(ConfigError, match=r"mine.csv: the file has 4 stages, but the run has 2"):
        config.build(2, 8)
    with pytest.raises(
        ConfigError, match=r"mine.csv: the file has 8 microbatches, but the run has 16"
    ):
        config.build(4, 16)


def test_every_schedule_of_the_config_is_tested():
    tags = set(CONFIG.json_schema()["discriminator"]["mapping"])
    assert tags == {section["type"] for section in CONFIGS} | {"csv"}


def test_config_refuses_one_chunk():
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        CONFIG.validate_python({"type": "interleaved", "chunks": 1})
