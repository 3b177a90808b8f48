"""`jaxdist report --html`: its data without a browser, and the page as a browser shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import RUN, Jaxdist

from jaxdist.errors import RunError
from jaxdist.metrics.writer import read_metrics
from jaxdist.run.directory import RunDirectory
from jaxdist.run.report.page.data import program_data
from jaxdist.run.report.page.loads import MOST_STEPS
from jaxdist.run.report.page.write import MOST_BYTES, report_page, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
HOSTILE = "</script><script>console.error('broken out')</script><img src=x onerror=alert(1)>"
NO_PROGRAM = {"program": None, "why_no_program": "not compiled"}


def data_of(page: Path) -> dict:
    """The data that a page holds."""
    (found,) = re.findall(r'id="data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(found)


def made(folder: Path, lines: list[str], config: str = "mesh: {data: 1}\n") -> Path:
    """A run directory with these lines of metrics."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def line(step: int, split: str = "train", /, **values: object) -> str:
    return json.dumps({"step": step, "split": split, "time": 1e9 + step, **values}) + "\n"


def curve(run: dict, split: str, name: str) -> dict:
    (found,) = (c for c in run["curves"] if (c["split"], c["name"]) == (split, name))
    return found


def written(tmp_path: Path, *runs: Path) -> dict:
    page = tmp_path / "page.html"
    assert write_page(runs, page, [NO_PROGRAM] * len(runs)) == page.stat().st_size <= MOST_BYTES
    return data_of(page)


@pytest.mark.full
def test_a_run_as_it_was_recorded(trained: Jaxdist) -> None:
    done = trained.here("report", RUN, "--html", "page.html")
    assert (done.code, done.err) == (0, ""), done
    (run,) = data_of(trained.folder / "page.html")["runs"]
    records = read_metrics(trained.run)
    for split, name in (("train", "loss"), ("train", "grad_norm"), ("heldout", "loss")):
        ours = [(r["step"], r[name]) for r in records if r["split"] == split]
        found = curve(run, split, name)
        assert found["last"] == list(ours[-1])
        assert found["points"][0] == [step for step, _ in ours]
        assert found["points"][1] == pytest.approx([value for _, value in ours], rel=1e-6)
    times = json.loads(report_json(trained))
    assert {name: run["time"][name] for name in ("goodput", "seconds")} == {
        name: times[name] for name in ("goodput", "seconds")
    }
    assert run["config"]["optim.learning_rate"] == "0.001"
    assert run["checkpoints"] == [16, 24]
    # The default mesh of this run leaves an axis open.
    assert "leaves the size of an axis open (-1)" in run["why_no_program"]
    assert "jaxdist inspect" in run["why_no_program"]


def report_json(trained: Jaxdist) -> str:
    assert trained.here("report", RUN, "--json", "report.json").code == 0
    return (trained.folder / "report.json").read_text()


@pytest.mark.full
def test_bytes_of_each_axis_and_memory_are_those_of_the_compiled_step(trained: Jaxdist) -> None:
    config = trained.run / "config.yaml"
    config.write_text(config.read_text().replace("mesh: {}", "mesh: {data: 8}"))
    done = trained.here("report", RUN, "--html", "page.html")
    assert (done.code, done.err) == (0, ""), done
    (run,) = data_of(trained.folder / "page.html")["runs"]
    args = ("inspect", config, "mesh.fake_devices=8", "--json", trained.run / "inspect.json")
    assert trained.here(*args).code == 0
    inspected = json.loads((trained.run / "inspect.json").read_text())
    assert run["program"]["axes"] == inspected["axes"] != []
    assert run["program"]["memory"] == inspected["memory"]
    # What was inspected before, for TPUs perhaps, is taken as it is.
    assert program_data(trained.run, None)["program"]["axes"] == inspected["axes"]
    (trained.run / "inspect.json").write_text("[]")
    found = program_data(trained.run, None)
    assert found["program"] is None
    assert "is not what `jaxdist inspect --json` writes" in found["why_no_program"]


@pytest.mark.full
@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_steps_fit_a_page(tmp_path: Path, count: int) -> None:
    lines = [
        f'{{"step": {step}, "split": "train", "time": 1.0, "loss": {3 + 1 / step:.7f}, '
        f'"grad_norm": {step % 977 / 7:.6f}}}\n'
        for step in range(1, count + 1)
    ]
    lines[77_776] = line(77_777, loss=99.5, grad_norm=1)
    run = made(tmp_path / "long", lines)
    found = curve(written(tmp_path, run)["runs"][0], "train", "loss")
    assert found["records"] == count
    assert found["last"] == [count, 3 + 1 / count]
    # Thinned, it keeps its highest and lowest values where they were.
    steps, values = found["points"]
    assert len(steps) < 20_000
    assert steps[values.index(99.5)] == 77_777


def test_loads_of_experts_are_a_picture_and_no_curves(tmp_path: Path) -> None:
    def loads(step: int) -> dict[str, float]:
        even = {f"expert_load/0/{i}": 0.25 for i in range(4)}
        return even | {f"expert_load/1/{i}": float(i == step // 500) for i in range(4)}

    lines = [line(step, loss=1.0, max_vio=3.0, **loads(step)) for step in range(1000)]
    lines += [line(999, "heldout", loss=1.0, **{"expert_load/0/0": 1.0, "expert_load/0/1": 0.0})]
    (run,) = written(tmp_path, made(tmp_path / "r", lines))["runs"]
    assert {c["name"] for c in run["curves"]} == {"loss", "max_vio"}
    train, heldout = run["loads"]
    assert (train["split"], heldout["split"]) == ("train", "heldout")
    steps = train["steps"]
    assert (len(steps), steps[-1]) == (MOST_STEPS, 999)
    even, uneven = train["percent"]
    assert even == [[100] * MOST_STEPS] * 4
    assert [row[0] for row in uneven] == [400, 0, 0, 0]
    assert [row[-1] for row in uneven] == [0, 400, 0, 0]
    assert (heldout["steps"], heldout["percent"]) == ([999], [[[200], [0]]])


@pytest.mark.full
def test_loads_of_many_experts_fit_a_page(tmp_path: Path) -> None:
    loads = {f"expert_load/{n}/{i}": 1 / 256 for n in range(58) for i in range(256)}
    lines = [line(step, loss=1.0, **loads) for step in range(20)]
    (run,) = written(tmp_path, made(tmp_path / "r", lines))["runs"]
    assert len(run["loads"][0]["steps"]) == 3
    assert run["loads"][0]["steps"][-1] == 19


@pytest.mark.slow
def test_many_runs_fit_a_page_or_are_refused(tmp_path: Path) -> None:
    names = [f"metric_{number}" for number in range(40)]
    lines = [line(step, **dict.fromkeys(names, step / 7)) for step in range(1, 400)]
    runs = [made(tmp_path / f"run-{number}", lines) for number in range(8)]
    assert len(written(tmp_path, *runs)["runs"]) == 8
    config = "".join(f"key_{at}: {'v' * 150}\n" for at in range(400))
    large = [made(tmp_path / f"large-{number}", [], config) for number in range(16)]
    with pytest.raises(RunError, match=r"more than the limit of .*: give fewer runs"):
        write_page(large, tmp_path / "page.html", [NO_PROGRAM] * 16)


def test_what_differs_between_runs(tmp_path: Path) -> None:
    a = made(tmp_path / "a", [line(1, loss=2.0)], "seed: 0\noptim: {type: sgd, b1: 0.9}\n")
    b = made(tmp_path / "b", [line(1, loss=3.0)], "seed: 1\noptim: {type: sgd}\n")
    found = written(tmp_path, a, b)
    assert found["differences"] == [["seed", "0", "1"], ["optim.b1", "0.9", None]]
    assert [run["path"] for run in found["runs"]] == [str(a), str(b)]


def test_a_page_cannot_be_broken_by_what_it_shows(tmp_path: Path) -> None:
    lines = [line(1, loss=2.0, **{HOSTILE: 1.0})]
    run = made(tmp_path / "<b>run", lines, f"name: {json.dumps(HOSTILE)}\n")
    found = written(tmp_path, run)["runs"][0]
    assert found["config"]["name"] == HOSTILE
    text = (tmp_path / "page.html").read_text()
    assert HOSTILE not in text
    assert "<b>run" not in text
    assert html.escape("<b>run") in text
    held = text.split('id="data">')[1].split("\n<script>")[0]
    assert held.count("<") == 1  # of the tag that ends it
    # Nothing is fetched: no address but the name of SVG's elements.
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]


def test_the_schedule_of_a_pipeline(tmp_path: Path) -> None:
    config = (
        "model: {type: mlp, hidden: [16]}\n"
        "data: {type: images, source: digits}\n"
        "optim: {type: adamw, learning_rate: 0.001}\n"
        "train: {steps: 8, batch_size: 64, microbatches: 4}\n"
        "mesh: {stage: 2}\n"
        "parallel: {pipeline: {schedule: {type: gpipe}}}\n"
    )
    run = made(tmp_path / "staged", [], config)
    schedule = written(tmp_path, run)["runs"][0]["schedule"]
    assert schedule["summary"].startswith("gpipe: 2 stages, 4 microbatches; bubble ")
    assert [len(boxes) for boxes in schedule["boxes"]] == [8, 8]
    # A run of a version whose settings were others has a page all the same.
    other = made(tmp_path / "other", [], config + "gone: 1\n")
    schedule = written(tmp_path, other)["runs"][0]["schedule"]
    assert "gone" in schedule["summary"]
    assert schedule["boxes"] == []


def test_bad_input(tmp_path: Path, jaxdist: Jaxdist) -> None:
    with pytest.raises(RunError, match="nowhere is not a run directory"):
        write_page([tmp_path / "nowhere"], tmp_path / "page.html", [NO_PROGRAM])
    empty = made(tmp_path / "empty", [])
    assert written(tmp_path, empty)["runs"][0]["curves"] == []
    (empty / "metrics.jsonl").unlink()
    assert written(tmp_path, empty)["runs"][0]["last_step"] == 0
    torn = made(tmp_path / "torn", [line(1, loss=2.0), line(2, loss="nan"), '{"step": 3, "spl'])
    loss = curve(written(tmp_path, torn)["runs"][0], "train", "loss")
    assert (loss["points"], loss["last"], loss["broken"]) == ([[1], [2]], [2, "nan"], 1)
    bad = made(tmp_path / "bad", ["not a record\n", line(1, loss=2.0)])
    with pytest.raises(RunError, match=r"metrics.jsonl:1 is not a metrics record"):
        write_page([bad], tmp_path / "page.html", [NO_PROGRAM])
    with pytest.raises(RunError, match="cannot write the page to"):
        write_page([empty], torn / "config.yaml" / "page.html", [NO_PROGRAM])
    for args, words in (
        (("--live",), "--live rewrites the page of --html, which is missing: give --html FILE"),
        (
            (torn, "--json", "x.json"),
            "--json writes the report of a single run, but several are given: "
            "give one run directory",
        ),
        (("--html", "x.html", "--json", "x.json"), "--json has no effect with --html"),
    ):
        done = jaxdist.here("report", empty, *args)
        assert done.code != 0
        assert words in done.message


def test_a_live_page_is_written_until_the_run_ends(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [line(1, loss=2.0)])
    lock, page = run / "run.lock", tmp_path / "page.html"
    lock.write_text("{}")
    seen, said = [], []

    def sleep(seconds: float) -> None:
        assert seconds >= 5
        found = data_of(page)
        seen.append((found["reload_seconds"], found["runs"][0]["last_step"]))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(2, loss=1.0))
        if len(seen) == 2:
            lock.unlink()

    report_page([run], page, live_seconds=5, say=said.append, sleep=sleep)
    found = data_of(page)
    assert seen == [(5, 1), (5, 2)]
    assert found["reload_seconds"] is None
    assert said == [f"page   {page}, {page.stat().st_size:,} bytes"]


def test_a_live_page_ends_with_a_killed_run(tmp_path: Path) -> None:
    """Its lock stays, but nobody touches it any more."""
    run = made(tmp_path / "run", [line(1, loss=2.0)])
    (run / "run.lock").write_text("{}")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < 300

    page = tmp_path / "page.html"
    given = {"live_seconds": 5, "say": lambda text: None}
    report_page([run], page, sleep=sleep, clock=lambda: now[0], **given)
    assert data_of(page)["reload_seconds"] is None
    assert now[0] > 20


def shown(page: Path, folder: Path) -> tuple[str, str]:
    """The text of a page once its scripts have run, and what the browser said of it."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
        "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [text for text in done.stderr.splitlines() if "CONSOLE" in text]
    return done.stdout, "\n".join(said)


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_a_browser_shows_the_numbers(trained: Jaxdist, tmp_path: Path) -> None:
    config = trained.run / "config.yaml"
    config.write_text(config.read_text() + f"# {HOSTILE}\n")
    hostile = made(tmp_path / HOSTILE.replace("/", "_"), [line(1, loss=2.5)], f"x: {HOSTILE!r}\n")
    page = trained.folder / "page.html"
    assert trained.here("report", RUN, hostile, "--no-compile", "--html", page).code == 0
    text, said = shown(page, tmp_path / "browser")
    assert said == ""
    records = read_metrics(trained.run)
    for split in ("train", "heldout"):
        last = [r for r in records if r["split"] == split][-1]["loss"]
        assert f"{split}, {RUN}: {float(f'{last:.6g}'):g}" in text.replace("&nbsp;", " ")
    # Labels: every picture and every table that scrolls has a name.
    for tag in re.findall(r"<svg[^>]*role=\"img\"[^>]*>|<div[^>]*role=\"region\"[^>]*>", text):
        assert re.search(r'aria-label="[^"]+"', tag), tag
    assert text.count("<path") > 8
    assert "<img" not in text
    assert "Differences between the configs" in text


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_a_browser_tells_of_an_error(tmp_path: Path) -> None:
    """The test above would see one."""
    page = tmp_path / "page.html"
    page.write_text("<script>throw new Error('seen')</script>")
    assert "seen" in shown(page, tmp_path / "browser")[1]


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, WCAG 2.2 section 1.4.3."""

    def luminance(text: str) -> float:
        parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_in_light_and_in_dark(tmp_path: Path) -> None:
    written(tmp_path, made(tmp_path / "run", [line(1, loss=2.0)]))
    text = (tmp_path / "page.html").read_text()
    themes = re.findall(r":root \{(.*?)\}", text, re.S)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", theme))
        for ink in ("ink", "soft"):
            assert contrast(colours[ink], colours["card"]) >= 4.5
            assert contrast(colours[ink], colours["back"]) >= 4.5
        for number in range(10):  # curves, and numbers in the boxes of a schedule
            assert contrast(colours[f"c{number}"], colours["card"]) >= 3
        for number in (0, 2, 3, 5):
            assert contrast(colours["on"], colours[f"c{number}"]) >= 4.5


def test_the_proof_of_a_run_has_a_section(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [line(1, loss=2.0)])
    assert written(tmp_path, run)["runs"][0]["proof"] == []
    numbers = {"seed": 3, "plans": [], "neighbours": []}
    certificate = {"verdict": "proved", "digest": "a" * 64, "types": None, "bytes": None}
    RunDirectory(run).proof.write_text(json.dumps({**certificate, "numbers": numbers}))
    (found,) = written(tmp_path, run)["runs"]
    assert found["proof"] == ["proof  proved, config aaaaaaaaaaaa, seed 3"]
    assert "drawProof();" in (tmp_path / "page.html").read_text()
