"""`jaxdist drill`: processes of a run are killed on purpose, and it says what that cost."""

from __future__ import annotations

import json

import pytest
from runs import Jaxdist, metrics


# Strikes and figures: tests/elastic/test_drill.py; processes that are killed: run/test_elastic.py.
@pytest.mark.slow
def test_a_run_stands_what_it_is_made_to(jaxdist: Jaxdist):
    jaxdist.config(train={"steps": 900, "batch_size": 64, "log_every": 1}, eval={"every": None})
    options = ("--failures", 2, "--processes", 2, "--devices", 1, "--json", "drill.json")
    done = jaxdist("drill", "config.yaml", *options)
    assert done.code in (0, 3), done  # how much it kept is the machine's
    told = json.loads((jaxdist.folder / "drill.json").read_text())
    assert (done.code == 0) == (told["achieved"] >= 0.9 * told["predicted"])
    assert len(told["recoveries"]) == 2
    assert "of the time was used for new steps" in done.out
    assert [r["step"] for r in metrics(jaxdist.run) if r["split"] == "train"] == [*range(1, 901)]
    assert (jaxdist.run / "flight_1.png").exists()
    assert (jaxdist.run / "flight_2.json").exists()


def test_a_drill_needs_steps(jaxdist: Jaxdist):
    jaxdist.config(train={"batch_size": 64, "epochs": 2, "steps": None})
    done = jaxdist.here("drill", "config.yaml", "--failures", 1, "--devices", 8)
    assert done.code == 2
    assert "set train.steps" in done.message
