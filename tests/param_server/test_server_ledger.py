"""What a supervisor knows: who is late, and the loss of a clock whose workers have died."""

import pytest

from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.training.ledger import ClockReports

LATE = {"seconds": 1.0, "waited_seconds": 0.5, "received_bytes": 0, "sent_bytes": 0}


@pytest.fixture
def ledger():
    found = ClockReports(Cluster(workers=2), ("loss", "grad_norm"), lambda step: 0.1, 0)
    found.applied(0, {"squares": [], "stats": {"floor": 7}})
    return found


def done(ledger, clock, *slots, loss=1.0):
    for slot in slots:
        ledger.measured(slot, clock, {"loss": (loss * 8, 8.0)})
        ledger.clock(slot, {"clock": clock, **LATE})


def test_who_waits_for_another_is_not_late(ledger):
    done(ledger, 0, 0, 1)
    ledger.measured(1, 1, {"loss": (8.0, 8.0)})  # and now waits for worker 0's gradient
    assert ledger.behind({0, 1}) == {0}
    assert not ledger.complete(1, set())


def test_the_loss_of_a_worker_that_dies_as_its_gradient_is_applied(ledger):
    done(ledger, 0, 0, 1, loss=2.0)
    ledger.metrics(0, 1)
    ledger.measured(0, 1, {"loss": (24.0, 8.0)})
    done(ledger, 1, 1)
    done(ledger, 2, 0)  # of the worker in its place
    assert ledger.complete(1, set())
    assert ledger.metrics(1, 2)[0][0] == 2.0


def test_a_clock_whose_loss_nobody_lived_to_tell(ledger):
    done(ledger, 0, 0, 1, loss=2.0)
    assert ledger.metrics(0, 1)[0][0] == 2.0
    done(ledger, 2, 0, 1)  # of the workers in their places
    assert ledger.complete(1, set())
    assert ledger.metrics(1, 2)[0][0] == 2.0


def test_a_clock_in_which_nothing_weighs_has_the_loss_of_the_one_before(ledger):
    done(ledger, 0, 0, 1, loss=2.0)
    assert ledger.metrics(0, 1)[0][0] == 2.0
    for slot in 0, 1:
        ledger.measured(slot, 1, {"loss": (0.0, 0.0)})
        ledger.clock(slot, {"clock": 1, **LATE})
    assert ledger.metrics(1, 2)[0][0] == 2.0
    assert ledger.empty == 1


def test_a_clock_of_nan_has_no_loss(ledger):
    done(ledger, 0, 0, 1, loss=2.0)
    ledger.metrics(0, 1)
    for slot in 0, 1:
        ledger.measured(slot, 1, {"loss": (float("nan"), 8.0)})
        ledger.clock(slot, {"clock": 1, **LATE})
    assert str(ledger.metrics(1, 2)[0][0]) == "nan"
    assert ledger.empty == 0
