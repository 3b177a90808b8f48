import jax.numpy as jnp
import pytest

from jaxdist.train.loop import run_loop


class Recorder:
    """A step and hooks that write down the order of events."""

    def __init__(self, due=(), stop_at=None):
        self.events, self._due, self._stop_at = [], set(due), stop_at

    def train(self, state, batch):
        self.events.append(f"dispatch {batch}")
        return state + 1, jnp.float32(batch)

    def waiting(self, step):
        pass

    def metrics(self, step, values, step_seconds):
        assert step_seconds >= 0
        self.events.append(f"metrics {step}={int(values)}")

    def due(self, step):
        return step in self._due

    def boundary(self, step, state):
        self.events.append(f"boundary {step} state={state}")
        return state, step == self._stop_at

    def run(self, start=0, stop=3):
        final = run_loop(
            self.train, start, iter(range(start + 1, 100)), self, start=start, stop=stop
        )
        return final, self.events


def test_metrics_are_read_one_step_late():
    final, events = Recorder().run()
    assert final == 3
    assert events == [
        "dispatch 1",
        "dispatch 2",
        "metrics 1=1",
        "dispatch 3",
        "metrics 2=2",
        "metrics 3=3",
    ]


def test_a_boundary_comes_after_its_own_metrics():
    _, events = Recorder(due=[2]).run()
    assert events.index("metrics 2=2") < events.index("boundary 2 state=2")
    assert events.index("boundary 2 state=2") < events.index("dispatch 3")


def test_a_boundary_can_end_the_loop():
    final, events = Recorder(due=[2], stop_at=2).run(stop=9)
    assert final == 2
    assert events[-1] == "boundary 2 state=2"


@pytest.mark.parametrize("start", [0, 5])
def test_every_step_has_its_metrics_once_and_in_order(start):
    _, events = Recorder(due=[6]).run(start=start, stop=9)
    steps = [event for event in events if event.startswith("metrics")]
    assert steps == [f"metrics {step}={step}" for step in range(start + 1, 10)]
