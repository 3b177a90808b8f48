"""The table of the jobs that need a pod: each fits its chips by formula, as its config says it."""

import pytest

from benchmarks.pods import JOBS, price, row


@pytest.mark.parametrize(("path", "on"), [job for job in JOBS if "gpt" in job[0]])
def test_a_decoder_has_the_plan_of_its_config_and_fits_its_pod(path, on):
    job = price(path, on)
    judged, sizes = job.judged, job.config.mesh.sizes()
    assert judged.fits
    assert judged.plan.devices == job.target.chips
    assert {"stage": judged.plan.stage, "tensor": judged.plan.tensor} == {
        name: sizes.get(name, 1) for name in ("stage", "tensor")
    }
    assert judged.plan.microbatches == job.config.train.microbatches
    # Energy is that of all chips at their highest power.
    assert job.joules == pytest.approx(192.0 * job.target.chips * job.seconds)
    assert row(path, on, job).count("|") == 11
