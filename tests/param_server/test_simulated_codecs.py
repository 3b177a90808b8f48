"""Pushes in few bytes: what servers get, what senders keep, and how many bytes travel."""

import numpy as np
import pytest
from test_simulator import BAD, INSTANT, RATE, Quadratic, assert_same

from jaxdist.compression import Cast, ErrorFeedback, NoFeedback, Quantize, Sign, TopK, WholeCodec
from jaxdist.param_server.aggregation import Direct, Racks
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import SSP
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.codes import Codes, PushEncoder
from jaxdist.param_server.live.layout import ShardLayout, ShardPiece
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.placement.ranges import Range
from jaxdist.param_server.scenario import Crash, SimulationConfig
from jaxdist.simulation.engine.network import HEADER_BYTES
from jaxdist.simulation.engine.problem import Sgd
from jaxdist.simulation.engine.run import Simulation, simulate_training

BIAS = frozenset({"b"})


class Narrow(Quadratic):
    """In float32, as codecs are."""

    start = {"w": np.ones((6, 64), np.float32), "b": np.float32(3.0)}  # noqa: RUF012

    def gradient(self, params, worker, step):
        found = super().gradient(params, worker, step)
        return found._replace(
            gradient={name: np.asarray(g, np.float32) for name, g in found.gradient.items()}
        )


def cluster_of(codec, model=None, *, feedback=True, racks=0, **script):
    return Cluster(
        workers=4,
        servers=2,
        consistency=model or BSP(),
        placement=Balanced(range_bytes=512),
        aggregation=Racks(size=racks) if racks else Direct(),
        codec=codec,
        error_feedback=feedback,
        simulation=SimulationConfig(**script),
    )


def simulated(codec, model=None, *, steps=6, **settings):
    cluster = cluster_of(codec, model, **settings)
    return simulate_training(cluster, Narrow(), Sgd(RATE), clocks=steps, whole=BIAS)


@pytest.mark.parametrize("racks", [0, 2])
def test_a_codec_that_leaves_nothing_out_changes_nothing(racks):
    plain, coded = (simulated(codec, racks=racks, seed=3) for codec in (None, WholeCodec()))
    assert_same(coded.params, plain.params)
    assert coded.received_bytes == plain.received_bytes


def test_a_push_has_the_bytes_of_its_messages():
    headers, pushes = 2 * 2 * 4 * 6 * HEADER_BYTES, 4 * 6
    for codec, bits in ((None, 32), (Cast(), 16), (Quantize(bits=8, block=64), 8 + 16 / 64)):
        found = simulated(codec, link=INSTANT)
        assert sum(found.received_bytes) == headers + pushes * (6 * 64 * bits / 8 + 4)
        assert sum(found.sent_bytes) == headers + pushes * (6 * 64 * 4 + 4)


class Recorded(Narrow):
    """Adds up what workers found."""

    def __init__(self):
        super().__init__()
        self.total = np.zeros((6, 64))

    def gradient(self, params, worker, step):
        found = super().gradient(params, worker, step)
        self.total += found.gradient["w"]
        return found


@pytest.mark.parametrize("model", [BSP(), SSP(bound=1)])
@pytest.mark.parametrize("codec", [Sign(), TopK(fraction=0.1)])
@pytest.mark.every(3)
def test_parameters_move_by_all_that_is_not_kept(model, codec):
    problem = Recorded()
    cluster = cluster_of(codec, model, link=BAD)
    speeds = cluster.simulation.speeds(4)
    run = Simulation(cluster, problem, Sgd(RATE), speeds, 6, 10, None, BIAS)
    found = run.run()
    kept = np.zeros((6, 64))
    for worker in run.workers:
        for encoder in worker.encoders:
            for at, state in encoder._states.items():
                one = encoder.codes.layout.pieces[at].range
                kept[one.start : one.stop] += state.memory["residual"]
    moved = problem.start["w"] - found.params["w"]
    np.testing.assert_allclose(moved, RATE / 4 * (problem.total - kept), rtol=1e-4, atol=1e-4)
    assert np.abs(kept).max() > 0.1


class BrokenBias(Recorded):
    def gradient(self, params, worker, step):
        found = super().gradient(params, worker, step)
        if (worker, step) != (1, 2):
            return found
        return found._replace(gradient={**found.gradient, "b": np.float32("nan")})


def test_a_nan_at_one_server_loses_nothing_at_the_other_server():
    """As with live servers, each server drops only the pushes that hold a NaN themselves."""
    problem, cluster = BrokenBias(), cluster_of(TopK(fraction=0.1), SSP(bound=1))
    speeds = cluster.simulation.speeds(4)
    run = Simulation(cluster, problem, Sgd(RATE), speeds, 6, 10, None, BIAS)
    found = run.run()
    assert found.dropped == {"the push contains a NaN or an infinity": 1}
    seen = 0
    for server, shard in enumerate(run.shards):
        ranges = [piece.range for piece in shard.layout.pieces]
        if any(one.name == "b" for one in ranges):
            continue
        for at, one in enumerate(ranges):
            rows = slice(one.start, one.stop)
            kept = np.zeros((one.stop - one.start, 64))
            for worker in run.workers:
                kept += worker.encoders[server]._states[at].memory["residual"]
            moved = problem.start["w"][rows] - found.params["w"][rows]
            wanted = RATE / 4 * (problem.total[rows] - kept)
            np.testing.assert_allclose(moved, wanted, rtol=1e-4, atol=1e-4)
            seen += 1
    assert seen


@pytest.mark.full
def test_a_bad_network_changes_no_bit_of_a_round():
    """A message that is sent again is the same message."""
    for codec in (Sign(), Quantize(bits=4, rounding="stochastic", block=64)):
        feedback = isinstance(codec, Sign)
        calm, rough = (
            simulated(codec, link=link, feedback=feedback, steps=8) for link in (INSTANT, BAD)
        )
        assert rough.lost > 0
        assert_same(rough.params, calm.params)


def test_one_seed_gives_one_run_with_a_worker_that_dies():
    dies = (Crash(worker=2, at_seconds=0.35, back_seconds=1.0),)
    runs = [
        simulated(TopK(fraction=0.1), SSP(bound=2), link=BAD, crashes=dies, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert runs[0].as_json() == runs[1].as_json() != runs[2].as_json()
    assert_same(runs[0].params, runs[1].params)


def encoder_of(codec, *shapes, feedback=None, whole=BIAS, client=0):
    """The encoder of float32 ranges a, b, ... of these shapes, and the slice of each range."""
    pieces, offset = [], 0
    for name, shape in zip("ab", shapes, strict=False):
        rows = Range(name, 0, shape[0], 4 * int(np.prod(shape)))
        pieces.append(ShardPiece(rows, shape, offset, np.dtype(np.float32)))
        offset += pieces[-1].length
    layout = ShardLayout(0, np.dtype(np.float32), tuple(pieces))
    codes = Codes(layout, codec, feedback or ErrorFeedback(), whole, 0)
    return PushEncoder(codes, client), [piece.slice for piece in pieces]


@pytest.mark.parametrize("codec", [Sign(), TopK(fraction=0.05), Quantize(bits=4, block=32)])
def test_messages_and_what_is_kept_are_all_that_was_to_be_sent(codec):
    """Drawn at random, with pushes that are not finite: those leave nothing behind."""
    encoder, (rows, bias) = encoder_of(codec, (4, 64), (1,), client=7)
    rng = np.random.default_rng(1)
    wanted, sent = np.zeros(256), np.zeros(256)
    for sequence in range(12):
        change = rng.normal(size=257).astype("f4")
        broken = sequence in (3, 7)
        if broken:
            change[2 * 64 + 5] = np.inf
        coded, finite = encoder.decoded(change, sequence)
        assert finite != broken
        assert coded[bias] == change[bias]
        if not broken:
            wanted += change[rows]
            sent += coded[rows]
    kept = np.asarray(encoder._states[0].memory["residual"]).reshape(-1)
    np.testing.assert_allclose(sent + kept, wanted, rtol=1e-4, atol=1e-4)
    assert int(encoder._states[0].skipped) == 2


@pytest.mark.parametrize("codec", [Sign(), Quantize(bits=4, rounding="stochastic", block=32)])
def test_the_simulator_decodes_a_push_as_a_server_does(codec):
    feedback = ErrorFeedback() if isinstance(codec, Sign) else NoFeedback()
    (ours, _), (theirs, _) = (encoder_of(codec, (4, 64), (1,), feedback=feedback) for _ in "12")
    rng = np.random.default_rng(1)
    for sequence in range(3):
        change = rng.normal(size=257).astype("f4")
        raw, _ = theirs(change, sequence)
        expected = theirs.codes.decode(raw, 0, sequence)
        np.testing.assert_array_equal(ours.decoded(change, sequence)[0], expected)


@pytest.mark.parametrize("whole", [frozenset(), BIAS])
def test_a_dropped_push_leaves_the_residual_of_its_finite_ranges(whole):
    encoder, _ = encoder_of(TopK(fraction=0.25), (1, 8), (1, 8), whole=whole)
    rising = np.arange(1, 9, dtype="f4")

    def push(b, sequence):
        return encoder(np.concatenate([rising, b]), sequence)[1]

    def residual():
        return np.asarray(encoder._states[0].memory["residual"]).reshape(-1).tolist()

    assert push(rising, 0)
    kept = [1, 2, 3, 4, 5, 6, 0, 0]
    assert residual() == kept
    assert not push(np.where(rising == 3, np.nan, rising), 1)
    assert residual() == kept
    assert int(encoder._states[0].skipped) == 1
    assert push(rising, 2)
    assert residual() == [2, 4, 6, 8, 0, 0, 7, 8]


def test_without_feedback_equal_changes_are_equal_pushes():
    change = np.arange(8, dtype="f4")
    (first, _), (bare, _) = (
        encoder_of(Sign(), (2, 4), feedback=one) for one in (ErrorFeedback(), NoFeedback())
    )
    alone = first.decoded(change, 0)[0]
    assert np.any(first.decoded(change, 1)[0] != alone)
    for sequence in range(2):
        np.testing.assert_array_equal(bare.decoded(change, sequence)[0], alone)
