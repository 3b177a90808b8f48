"""A run that is refused loses nothing of the one that is there."""

from __future__ import annotations

import pytest
from runs import Jaxdist


@pytest.mark.full
def test_a_refused_resume_leaves_the_run_as_it_was(jaxdist: Jaxdist) -> None:
    jaxdist.config(train={"steps": 8})
    assert jaxdist.here("train", "config.yaml").code == 0
    before = {
        path.relative_to(jaxdist.run): path.read_bytes()
        for path in sorted(jaxdist.run.rglob("*"))
        if path.is_file() and "tensorboard" not in path.parts
    }
    jaxdist.config(train={"steps": 8}, model={"hidden": [12]})
    refused = jaxdist.here("train", "config.yaml", "--resume")
    assert refused.code == 3
    assert "saved float32[16]" in refused.message
    after = {path: (jaxdist.run / path).read_bytes() for path in before}
    assert after == before
