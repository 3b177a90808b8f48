from __future__ import annotations

import errno
import gc
import json
import math
import shutil
from contextlib import suppress
from pathlib import Path

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  (made at import)

from jaxdist.errors import RunError
from jaxdist.metrics.writer import MetricsWriter, read_metrics


def without_time(path: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(path)]


def run(directory: Path, first: int, last: int, resume_step: int | None) -> None:
    with MetricsWriter(directory, resume_step=resume_step) as writer:
        for step in range(first, last + 1):
            writer.write(step, {"loss": 1 / step, "grad_norm": step * 0.1})
            if step % 3 == 0:
                writer.write(step, {"loss": 2 / step}, split="heldout")


def test_a_record_is_one_json_line_with_step_split_and_time(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        writer.write(7, {"loss": jnp.float32(1.5)}, split="heldout")
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # flushed before close
    record = json.loads(line)
    assert record.pop("time") > 1e9
    assert record == {"step": 7, "split": "heldout", "loss": 1.5}


def test_nan_and_infinities_stay_valid_json_and_come_back(tmp_path):
    values = {"loss": math.nan, "high": math.inf, "low": -math.inf}
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        writer.write(1, values, split="nan")

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["loss"])
    assert (record["high"], record["low"], record["split"]) == (math.inf, -math.inf, "nan")


@pytest.mark.parametrize("killed_at", range(1, 10))
@pytest.mark.parametrize("torn", [b"", b'{"step": 9, "sp', b"\0\0\0", b"7"])
def test_a_resumed_file_equals_that_of_an_uninterrupted_run(tmp_path, killed_at, torn):
    run(tmp_path / "whole", 1, 12, None)
    run(tmp_path / "cut", 1, killed_at, None)
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    checkpoint = killed_at - killed_at % 2
    run(tmp_path / "cut", checkpoint + 1, 12, checkpoint)
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_a_record_kept_whole_but_without_its_line_end_is_kept(tmp_path):
    run(tmp_path, 1, 2, None)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    run(tmp_path, 3, 3, 2)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 3]


def test_an_evaluation_repeated_at_the_resumed_step_is_recorded_once(tmp_path):
    run(tmp_path, 1, 3, None)
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        writer.write(3, {"loss": 2 / 3}, split="heldout")
        writer.write(3, {"loss": 0.5}, split="other")
    records = read_metrics(tmp_path)
    assert [(r["step"], r["split"]) for r in records[2:]] == [
        (3, "train"),
        (3, "heldout"),
        (3, "other"),
    ]


def test_resuming_without_a_file_starts_one(tmp_path):
    run(tmp_path / "new", 1, 1, 0)
    assert len(read_metrics(tmp_path / "new" / "metrics.jsonl")) == 1


def test_tensorboard_gets_the_same_numbers_and_the_purge(tmp_path):
    run(tmp_path, 1, 3, None)
    run(tmp_path, 2, 2, 1)
    events = [e for f in sorted((tmp_path / "tensorboard").iterdir()) for e in read_events(f)]
    scalars = {(v.tag, e.step): v.simple_value for e in events for v in e.summary.value}
    assert scalars["heldout/loss", 3] == pytest.approx(2 / 3)
    assert scalars["train/grad_norm", 2] == pytest.approx(0.2)
    assert [e.step for e in events if e.HasField("session_log")] == [2]


def read_events(path: Path) -> list[Event]:
    data, events = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return events


def test_a_new_run_does_not_overwrite_the_metrics_of_another(tmp_path):
    run(tmp_path, 1, 1, None)
    with pytest.raises(RunError, match=r"metrics.jsonl already holds the metrics of a run"):
        MetricsWriter(tmp_path, resume_step=None)
    assert len(read_metrics(tmp_path)) == 1


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/metrics.jsonl: File exists; make the run directory"):
        MetricsWriter(tmp_path / "file", resume_step=None)


def test_a_reserved_name_is_refused(tmp_path):
    with (
        MetricsWriter(tmp_path, resume_step=None) as writer,
        pytest.raises(RunError, match="metric 'time' of split 'train'"),
    ):
        writer.write(1, {"loss": 1.0, "time": 2.0})


def test_a_full_disk_is_said_with_the_step(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        monkeypatch.setattr(writer, "_file", FullDisk(writer._file))
        with pytest.raises(RunError, match=r"step 41 to .*metrics.jsonl: No space left on device"):
            writer.write(41, {"loss": 1.0})


@pytest.mark.parametrize(("method", "said"), [("write", "step 2 to"), ("close", "last metrics to")])
def test_events_that_find_no_room_are_said_too(tmp_path, mount_tmpfs, monkeypatch, method, said):
    """Where they are flushed with a record, whose line has room still, or at the end alone."""
    disk = mount_tmpfs(tmp_path, 1 << 20)
    writer = MetricsWriter(disk, resume_step=None)
    writer.write(1, {"loss": 1.0})
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
    monkeypatch.setattr("jaxdist.metrics.events._FLUSH_SECONDS", 0)
    arguments = (2, {"loss": 0.5}) if method == "write" else ()
    with pytest.raises(RunError, match=rf"{said} .*metrics.jsonl: No space left on device"):
        getattr(writer, method)(*arguments)
    assert len(read_metrics(disk)) == (2 if method == "write" else 1)
    with suppress(RunError):
        writer.close()
    gc.collect()  # a file that is still open tells of what it could not write


@pytest.mark.parametrize(
    ("take_away", "said"),
    [
        (lambda path: path.unlink(), "was removed"),
        (lambda path: path.with_suffix(".tmp").replace(path), "was replaced by another file"),
        (lambda path: shutil.rmtree(path.parent), "was removed with the run directory"),
    ],
)
def test_a_file_that_is_taken_away_is_noticed_at_the_next_record(tmp_path, take_away, said):
    with MetricsWriter(tmp_path / "run", resume_step=None) as writer:
        writer.write(1, {"loss": 1.0})
        shutil.copy(writer.path, writer.path.with_suffix(".tmp"))
        take_away(writer.path)
        with pytest.raises(RunError, match=rf"metrics.jsonl {said} while .* step 2 on"):
            writer.write(2, {"loss": 0.5})


class FullDisk:
    def __init__(self, file) -> None:
        self.close = file.close

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_broken_line_inside_the_file_is_named(tmp_path):
    run(tmp_path, 1, 3, None)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "garbage", *lines[1:]]))
    with pytest.raises(RunError, match=r"metrics.jsonl:2 is not a metrics record: b'garbage'"):
        read_metrics(path)
    with pytest.raises(RunError, match=r"metrics.jsonl:2"):
        MetricsWriter(tmp_path, resume_step=1)


def test_no_metrics_file_is_said(tmp_path):
    with pytest.raises(RunError, match=r"metrics.jsonl: No such file or directory"):
        read_metrics(tmp_path)
