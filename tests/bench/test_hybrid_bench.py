"""The bench of tables on servers: its parts, and the figures of links from times of a lab."""

from __future__ import annotations

import jax
import pytest

from benchmarks.core.hosts import Timed
from benchmarks.hybrid import quality
from benchmarks.hybrid.report import bench
from benchmarks.param_server import links
from jaxdist.errors import JaxdistError
from jaxdist.experiment import build, load
from jaxdist.train.evaluate import evaluate


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(JaxdistError, match="no part 'byte': did you mean 'bytes'"):
        bench(part=["byte"])


def test_figures_of_links_compare_bytes_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Timed(links.HYBRID, (0.1, 0.2, 0.1), 5.0, 0.0),
        Timed(links.SERVER, (0.3, 0.4, 0.3), 10.0, 0.0),
        Timed(links.RING, (0.9, 1.0, 1.0), 50.0, 0.0),
    ]
    monkeypatch.setattr(links, "on_hosts", lambda *given: found)
    monkeypatch.setattr(links.lab, "unavailable", lambda hosts: None)
    sent, beside_ring, server, ring = links.figures()
    assert (sent.ratio, sent.holds, beside_ring.ratio) == (0.5, True, 0.1)
    assert (server.ratio, server.holds) == (pytest.approx(3.0), True)
    assert (ring.ratio, ring.holds) == (pytest.approx(9.0), True)
    monkeypatch.setattr(links.lab, "unavailable", lambda hosts: "no root")
    (skipped,) = links.figures()
    assert skipped.note == "skipped: no root"


def test_workers_of_the_bench_train_as_one_mesh_does() -> None:
    config = {
        "model": {"type": "mf", "width": 4},
        "data": {"type": "clicks", "fields": 2, "ids": 30, "examples": 256, "heldout_examples": 32},
        # At a rate of 0.5, stale rows diverge, and how far depends on the order of arrival.
        "optim": {"type": "sgd", "momentum": 0.0, "learning_rate": 0.02},
        "train": {"steps": 12, "batch_size": 16},
    }
    plain = build(load(config)[1], devices=jax.devices()[: quality.WORKERS])
    state = plain.program.init()
    with plain.loader.batches() as batches:
        for _ in range(plain.total_steps):
            state, _ = plain.program.train(state, next(batches))
    assert plain.heldout is not None
    with plain.heldout.evaluation_batches() as batches:
        alone = evaluate(plain.program, state.params, state.buffers, batches)
    hybrid = {**config, "strategy": {"type": "hybrid", "servers": 2, "optimizer": {"type": "sgd"}}}
    found = quality.trained(hybrid, (), quality.MODELS)
    assert found["BSP"] == pytest.approx(alone, rel=1e-5)
    for name in ("SSP 2", "async"):
        assert found[name]["loss"] != pytest.approx(alone["loss"], rel=1e-5), "rows are stale"


def test_figures_of_quality_compare_with_a_goal_and_with_bsp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(source: object, overrides: object, models: object) -> object:
        return {"BSP": {"rmse": 0.9}, "SSP 2": {"rmse": 0.902}, "async": {"rmse": 0.896}}

    monkeypatch.setattr(quality, "trained", trained)
    bsp, *others = quality.figures(quality.RATINGS)
    assert (bsp.ratio, bsp.holds) == (pytest.approx(0.9 / 0.934), True)
    assert [one.holds for one in others] == [True, False]
    assert "the mean of 15 runs" in bsp.note
