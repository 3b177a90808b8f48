"""`jaxdist train --profile`: a trace of the steps that were asked for, in the run directory."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from runs import RUN, Jaxdist

from jaxdist.errors import ConfigError
from jaxdist.metrics.rates import Efficiency
from jaxdist.run.hooks.loop import Moment
from jaxdist.run.report import describe
from jaxdist.run.report.describe import efficiency_of
from jaxdist.run.watch.profile import Profile, ProfiledSteps, parse_profile


@pytest.mark.full
def test_a_trace_holds_the_steps_asked_for(jaxdist: Jaxdist) -> None:
    jaxdist.config(train={"steps": 7}, eval={"every": 5}, mesh={"data": 8})
    done = jaxdist.here("train", "config.yaml", "--devices", 8, "--profile", "4:5")
    assert (done.code, done.err) == (0, ""), done
    lines = [line for line in done.out.splitlines() if line.startswith("profile: ")]
    assert lines == [
        f"profile: steps 4 to 5 in {RUN}/profile; open its file perfetto_trace.json.gz at "
        f"https://ui.perfetto.dev, or open the folder with xprof --logdir {RUN}/profile"
    ]
    (trace,) = (jaxdist.run / "profile/plugins/profile").iterdir()
    with gzip.open(trace / "perfetto_trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert calls(events, "PjitFunction(_train)") == 2
    # The evaluation of step 5 comes after the trace.
    assert not [event for event in events if "evaluate" in event.get("name", "")]
    (planes,) = trace.glob("*.xplane.pb")
    found = jax.profiler.ProfileData.from_file(str(planes))
    assert "/host:CPU" in [plane.name for plane in found.planes]


def calls(events: list[dict[str, Any]], name: str) -> int:
    """Events of this name; one that lies inside another is the same call."""
    count, end = 0, 0.0
    for event in sorted((e for e in events if e.get("name") == name), key=lambda e: e["ts"]):
        if event["ts"] >= end:
            count, end = count + 1, event["ts"] + event["dur"]
    return count


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("x", r"--profile 'x' cannot be read: write the first and the last step, such as 10:13"),
        ("-1", r"cannot be read"),
        ("0", r"--profile 0 traces no step"),
        ("5:4", r"--profile 5:4 traces no step"),
        ("1:4", r"begins at step 1, but .* first step is 1, .* begin at step 2 or later"),
        ("20:30", r"--profile ends at step 30, but the run ends at step 24"),
        ("23", r"--profile ends at step 25, but"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(
    jaxdist: Jaxdist, steps: str, message: str
) -> None:
    jaxdist.config()
    refused = jaxdist.here("train", "config.yaml", "--devices", 8, f"--profile={steps}")
    assert refused.code == 2
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(refused.message)
    assert not jaxdist.run.exists()


def test_steps_are_counted_from_where_a_process_begins() -> None:
    assert parse_profile("4").after(8, 24) == (11, 14)
    assert parse_profile("11:14").after(8, 24) == (11, 14)
    with pytest.raises(ConfigError, match=r"this process's first step is 11, .* step 12 or later"):
        ProfiledSteps(11, 2).after(10, 24)


class Tracer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_trace(self, *_: Any, **__: Any) -> None:
        self.calls.append("start")

    def stop_trace(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    made = Tracer()
    monkeypatch.setattr(jax, "profiler", made)
    return made


def at(hook: Profile, step: int, *, stop: bool = False) -> None:
    nothing: Any = None
    hook.metrics(step, nothing, 0.1)
    if hook.due(step):
        hook.at(Moment(step, nothing, stop=stop))


def test_a_run_that_stops_ends_its_trace(tracer: Tracer, tmp_path: Any) -> None:
    said: list[str] = []
    hook = Profile(4, 9, tmp_path, said.append)
    for step in range(1, 6):
        at(hook, step)
    hook.close()
    hook.close()
    assert tracer.calls == ["start", "stop"]
    assert len(said) == 1


def test_other_processes_wait_for_the_same_steps_and_trace_nothing(tracer: Tracer) -> None:
    hooks = [Profile(4, 5, None, pytest.fail), Profile(4, 5, None, pytest.fail)]
    for step in range(1, 8):
        at(hooks[0], step)
    at(hooks[1], 3, stop=True)
    assert [step for step in range(1, 8) if hooks[0].due(step)] == [3, 5]
    assert tracer.calls == []


def test_a_trace_that_cannot_be_written_is_told(
    tracer: Tracer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tracer, "stop_trace", full)
    said: list[str] = []
    hook = Profile(2, 2, tmp_path, said.append)
    at(hook, 1)
    at(hook, 2)
    assert said == [
        f"profile: no trace was written to {tmp_path}: No space left on device; if you need the "
        "trace, resume the run with --profile"
    ]


def experiment(platform: str, kind: str, dtype: str) -> Any:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    devices = np.array([device] * 4)
    return SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(compute_dtype=dtype)),
        layout=SimpleNamespace(mesh=SimpleNamespace(devices=devices, local_devices=devices[:2])),
        unit="tokens",
        units_per_step=1000,
    )


def test_mfu_is_of_the_peak_in_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "model_flops", lambda *_: 6e12)
    found = efficiency_of(experiment("tpu", "TPU v5 lite", "bfloat16"))
    assert found == Efficiency("tokens", 6e9, 4, 1.97e14)
    assert found is not None
    assert found.of(1000, 1.0)["mfu"] == pytest.approx(6e12 / 4 / 1.97e14)


@pytest.mark.parametrize(
    ("platform", "kind", "dtype"),
    [("cpu", "cpu", "float32"), ("tpu", "TPU v5 lite", "float32"), ("gpu", "Other", "bfloat16")],
)
def test_there_is_no_mfu_where_the_peak_is_not_known(
    platform: str, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "model_flops", pytest.fail)  # it is not asked for
    assert efficiency_of(experiment(platform, kind, dtype)) is None
