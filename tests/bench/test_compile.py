from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compile as bench_compile
from benchmarks.compile import experiment, persistent_cache, warm_and_cold


@pytest.mark.slow
def test_the_report_holds_both_figures(monkeypatch):
    monkeypatch.setattr(bench_compile, "WARMUP", 0)
    report = bench_compile.bench(repeats=1, shallow=1, deep=2)
    assert [(figure.name, figure.goal) for figure in report.figures] == [
        ("2 layers over 1", "<= 1.2"),
        ("warm start over cold", "<= 0.3"),
    ]


@pytest.mark.slow
def test_depth_does_not_lengthen_the_program():
    sizes = []
    for layers in (2, 8):
        program = experiment(layers).program
        lowered = program.train.lower(program.state_shapes, program.batch)
        sizes.append(len(lowered.as_text().splitlines()))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_a_warm_start_reads_what_a_cold_one_wrote(tmp_path):
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    before = jax.config.jax_compilation_cache_dir
    try:
        warm, cold = warm_and_cold(experiment(1), tmp_path)
        for start, expected in ((warm, True), (cold, False), (warm, True)):
            hits.clear()
            start()
            assert ("/jax/compilation_cache/cache_hits" in hits) is expected
    finally:
        jax.monitoring.clear_event_listeners()
    assert jax.config.jax_compilation_cache_dir == before


def test_a_program_from_the_cache_computes_the_same_bits(tmp_path):
    def compute():
        jax.clear_caches()
        x = jnp.linspace(0, 1, 4096)
        return np.asarray(jax.jit(lambda x: jnp.sin(x) @ jnp.exp(x) + x)(x))

    with persistent_cache(None):
        fresh = compute()
    with persistent_cache(tmp_path):
        compute()
        assert list(tmp_path.iterdir())
        np.testing.assert_array_equal(compute(), fresh)
