"""Notices of a machine that is taken away: a file, the metadata server, and what a run does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from runs import Jaxdist, metrics, steps

from jaxdist.run.termination import Termination
from jaxdist.runtime import notices
from jaxdist.runtime.notices import MetadataNotice, PreemptionConfig, heard


class Metadata(ThreadingHTTPServer):
    """Google's metadata server: who asks for a change waits for it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.preempted, self.asked = threading.Event(), []
        super().__init__(("127.0.0.1", 0), _Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/computeMetadata/v1/instance/preempted"


class _Answers(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self.server.asked.append(self.path.partition("?")[2])
        refused = self.headers["Metadata-Flavor"] != "Google"
        if not refused and "wait_for_change=true" in self.path:
            self.server.preempted.wait(60)
        self.send_response(403 if refused else 200)
        self.end_headers()
        self.wfile.write(b"TRUE" if self.server.preempted.is_set() else b"FALSE")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.preempted.set()
        server.shutdown()
        thread.join()


class Told(list[str]):
    def __init__(self) -> None:
        self.heard = threading.Event()

    def __call__(self, name: str) -> None:
        self.append(name)
        self.heard.set()


def test_a_file_that_appears(tmp_path: Path):
    told = Told()
    config = PreemptionConfig(file=tmp_path / "go", file_seconds=0.01)
    with heard(config.build(pytest.fail), told):
        assert not told.heard.wait(0.1)
        (tmp_path / "go").touch()
        assert told.heard.wait(60)
    assert told == [f"{tmp_path / 'go'} has appeared"]


def test_the_metadata_server_is_asked_for_a_change(metadata: Metadata):
    told = Told()
    with heard(PreemptionConfig(gce=True, gce_url=metadata.url).build(pytest.fail), told):
        while len(metadata.asked) < 2:
            assert not told.heard.wait(0.01)
        metadata.preempted.set()
        assert told.heard.wait(60)
    assert told == [MetadataNotice.name]
    assert metadata.asked == ["", "wait_for_change=true"]


def test_a_server_that_does_not_answer_is_told_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notices, "AGAIN_SECONDS", 0.01)
    said = Told()
    source = MetadataNotice("http://127.0.0.1:9/preempted", said)
    over = threading.Event()
    thread = threading.Thread(target=source.wait, args=(over,))
    thread.start()
    assert said.heard.wait(60)
    assert not over.wait(0.1)
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(said) == 1
    assert "127.0.0.1:9/preempted does not answer" in said[0]


def test_nobody_is_asked_by_default():
    assert PreemptionConfig().build(pytest.fail) == []


def test_a_notice_stops_a_run_as_a_signal_does():
    said = Told()
    with Termination(said) as termination:
        termination.notice("the cloud")
        termination.notice("the file")
        assert termination.requested(1)
    assert termination.signal == "the cloud"
    assert said == ["the cloud: the run stops after the step under way and saves a checkpoint"]


@pytest.mark.parametrize("source", ["file", "gce"])
@pytest.mark.every(2)
def test_a_run_saves_stops_and_says_so_by_its_exit_code(
    jaxdist: Jaxdist, metadata: Metadata, source: str
):
    jaxdist.config(train={"steps": 100_000}, eval={"every": None})
    (jaxdist.folder / "now").touch()
    metadata.preempted.set()
    given = {
        "file": [f"run.preemption.file={jaxdist.folder / 'now'}"],
        "gce": ["run.preemption.gce=true", f"run.preemption.gce_url={metadata.url}"],
    }
    done = jaxdist.here("train", "config.yaml", *given[source])
    assert done.code == 75, done
    last = metrics(jaxdist.run)[-1]["step"]
    assert steps(jaxdist.run) == [last]
    assert f"stopped after step {last} of 100000 and saved a checkpoint" in " ".join(
        done.out.split()
    )
    more = jaxdist.here("train", "config.yaml", "--resume", f"train.steps={last + 1}")
    assert more.code == 0, more
