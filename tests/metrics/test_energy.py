"""Energy: counters that wrap, a driver of GPUs, the model, lives joined, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import Document, validate
from jaxdist.cost.energy import POWERS, Power, Site
from jaxdist.errors import ConfigError, RunError
from jaxdist.metrics.energy import meters, tally
from jaxdist.metrics.energy.config import EnergyConfig
from jaxdist.metrics.energy.meters import Modelled, Nvml, Rapl, open_meter, visible_gpus
from jaxdist.metrics.energy.tally import Tally, energy_table, joined_energy
from jaxdist.runtime.hardware import DEVICES


def zone(root: Path, folder: str, name: str, energy: int, most: int = 1000) -> Path:
    made = root / folder
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "energy_uj").write_text(f"{energy}\n")
    (made / "max_energy_range_uj").write_text(f"{most}\n")
    return made


def test_rapl_counts_packages_and_memory_once_and_wraps(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900)
    zone(tmp_path, "intel-rapl:0:0", "core", 100)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    meter = Rapl(tmp_path)
    assert meter.name == "RAPL (package-0, dram)"
    assert meter.joules() == 0
    (package / "energy_uj").write_text("50")  # 150 on, over the end of its range
    (memory / "energy_uj").write_text("30")
    assert meter.joules() == pytest.approx(170e-6)
    (package / "energy_uj").write_text("60")
    assert meter.joules() == pytest.approx(180e-6)


@given(st.lists(st.integers(0, 999), max_size=20))
def test_no_reading_of_rapl_is_lost(steps: list[int]) -> None:
    meter = object.__new__(Rapl)
    readings, total = [0], 0
    meter._zones, meter._ranges, meter._last, meter._total = [Path("x")], [1000], [0], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meters, "_number", lambda path: readings[-1])
        for step in steps:
            total += step
            readings.append(total % 1000)
            assert meter.joules() == pytest.approx(1e-6 * total)


def test_without_counters_rapl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no RAPL energy counter"):
        Rapl(tmp_path)


class NVMLError(Exception):
    pass


def driver(counts: list[int]) -> SimpleNamespace:
    """Of two GPUs, whose counters go by the list."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: counts[gpu],
    )


def test_nvml_counts_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [5000, 7000]
    monkeypatch.setitem(sys.modules, "pynvml", driver(counts))
    both, second = Nvml(), Nvml(visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}))
    counts[:] = [6000, 9500]
    assert (both.joules(), second.joules()) == (3.5, 2.5)
    assert (both.name, second.name) == ("NVML (2 GPUs)", "NVML (1 GPU)")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}) is None


def test_a_driver_that_cannot_count_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NVMLError("Driver Not Loaded")

    fake = driver([0, 0])
    fake.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with pytest.raises(RunError, match="Driver Not Loaded"):
        Nvml()
    found = open_meter("auto", "gpu", POWERS["h100"], 8, lambda: (10.0, 5.0))
    assert isinstance(found, Modelled)
    assert found.joules() == 8 * 700 * 10.0  # no power at no work is known: an upper bound
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RunError, match=r"jaxdist\[energy\]"):
        open_meter("nvml", "gpu", None, 8, lambda: (0.0, 0.0))


def test_the_model_tells_work_from_waiting() -> None:
    meter = Modelled(Power(192.0, 90.0, "paper"), 4, lambda: (10.0, 6.0))
    assert meter.joules() == 4 * (192 * 6 + 90 * 4)
    assert meter.method == "model"


def test_what_nothing_measures_says_why() -> None:
    def never() -> tuple[float, float]:
        raise AssertionError

    assert open_meter("none", "cpu", None, 1, never) == "energy.meter is none"
    found = open_meter("auto", "tpu", None, 4, never)
    assert isinstance(found, str)
    assert "energy.watts" in found
    with pytest.raises(RunError, match=r"energy\.watts"):
        open_meter("model", "tpu", None, 4, never)


def test_all_powers_are_of_devices_that_are_known() -> None:
    assert set(POWERS) <= set(DEVICES)
    assert all(power.source and power.most > (power.idle or 0) for power in POWERS.values())


def test_lives_are_joined_and_carbon_follows() -> None:
    now = [0.0]
    records = []
    for life, work in ((1, 60.0), (2, 40.0)):
        begun = now[0]
        meter = Modelled(Power(100.0, None, ""), 1, lambda begun=begun: (now[0] - begun, 0.0))
        one = Tally(meter, Site(1.2, 500.0), "tokens", 1000, clock=lambda: now[0])
        for _ in range(2):
            now[0] += work / 2
            one.stepped()
            records.append({"step": 0, "split": tally.SPLIT, **one.values(life)})
    found = joined_energy([{"step": 0, "split": "train"}, *records])
    assert found is not None
    assert (found.joules, found.seconds, found.units) == (1e4, 100.0, 4000)
    assert found.kwh == pytest.approx(1e4 / 3.6e6 * 1.2)
    assert found.grams == pytest.approx(found.kwh * 500)
    assert found.as_json()["joules_per_million_tokens"] == 2.5e6
    assert energy_table(found).startswith("energy 10.0 kJ (100.0 W), 2.5 MJ a million tokens\n")
    assert joined_energy([{"step": 0, "split": "train"}]) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pue": 0.9}, "a number of at least 1"),
        ({"grid": -1}, "a number of at least 0"),
        ({"meter": "smi"}, "nvml"),
        ({"idle_watts": 10}, "idle_watts works only with watts"),
        ({"watts": 10, "idle_watts": 20}, "must not exceed watts"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(Document(given), EnergyConfig)
