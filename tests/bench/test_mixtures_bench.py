"""The predicted MFU of mixtures of experts, from the time of a layer's experts."""

from __future__ import annotations

import pytest

from benchmarks import run
from benchmarks.core.report import Figure
from benchmarks.tpu import report
from benchmarks.tpu.mixtures import MIXTURES, Layer, figures, mfu, step_flops
from jaxdist.errors import JaxdistError, RunError

MIXTRAL, DEEPSEEK = MIXTURES


def test_the_flops_of_mixtral_agree_with_the_published_speed_and_mfu() -> None:
    """MaxText's table has 2,909 tokens per second and chip beside its MFU of 52.56%."""
    flops = step_flops(MIXTRAL) / (MIXTRAL.dense.batch * MIXTRAL.dense.window)
    assert flops == pytest.approx(0.5256 * 459e12 / 2909, rel=0.005)


@pytest.mark.parametrize("one", MIXTURES)
def test_time_of_the_experts_lowers_the_mfu_and_none_leaves_the_rest(one) -> None:
    fast, slow = (mfu(one, Layer(seconds, seconds / 3)) for seconds in (0.6, 0.8))
    assert 0 < slow < fast < 1
    added = 4 / 3 * 0.2 * one.dense.layers
    chips = {"v5p:4x4x8": 128, "v5p:8x8x8": 512}[one.topology]
    ideal = step_flops(one) / (459e12 * chips)
    assert ideal / slow - ideal / fast == pytest.approx(added)


def test_a_layer_that_is_not_compiled_is_skipped_with_the_reason(monkeypatch) -> None:
    def refused(function, what):
        def run(*given):
            if given[3] == 8:
                raise RunError("no memory")
            return [Layer(0.2, 0.05)]

        return run

    monkeypatch.setattr("benchmarks.tpu.mixtures.child.apart", refused)
    first, second = figures()
    assert first.note == "skipped: no memory"
    assert second.ratio == pytest.approx(mfu(DEEPSEEK, Layer(0.2, 0.05)) / DEEPSEEK.published)


def test_a_part_of_the_bench_runs_alone(monkeypatch) -> None:
    found = Figure("MFU", 0.5, 0.5, ">= 0.95", "")
    monkeypatch.setattr(report, "lacking", lambda package: "")
    monkeypatch.setattr(report, "PARTS", {"products": lambda: 1 / 0, "experts": lambda: [found]})
    assert run("tpu", part=["experts"]).figures == [found]
    with pytest.raises(JaxdistError, match=r"bench tpu has no part 'expert'.*experts"):
        run("tpu", part=["expert"])
