"""Real gradients, real optimizers, servers and workers in this process."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from live_training import Training, replay_of

from jaxdist.errors import CheckpointError
from jaxdist.param_server.live.codes import PushEncoder
from jaxdist.param_server.training.files import read_shard, write_shard
from jaxdist.param_server.training.replay import Replay, _NotYetError
from jaxdist.param_server.training.worker import computation
from jaxdist.train.state import TrainState
from jaxdist.train.step import StepGradients
from jaxdist.trees import flatten_with_names


def assert_same(found, wanted):
    for (name, a), (_, b) in zip(
        flatten_with_names(found), flatten_with_names(wanted), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


def ordered_sums(run: Training) -> TrainState:
    """The same steps on one mesh: each worker's gradient, added up in their order."""
    program, workers = run.experiment.program, run.cluster.workers
    parts = [run.worker(slot) for slot in range(workers)]
    streams = [part.loader.batches() for part in parts]
    state = run.start
    for step in range(run.experiment.total_steps):
        found = [
            part.program.gradients(
                replace(state, step=jax.numpy.int32(step * workers + part.slot)), next(stream)
            )
            for part, stream in zip(parts, streams, strict=True)
        ]
        trees = [jax.tree.map(np.asarray, one.grads) for one in found]
        total = trees[0]
        for tree in trees[1:]:
            total = jax.tree.map(np.add, total, tree)
        mean = jax.tree.map(lambda x: x / np.float32(workers), total)
        state, _ = program.update(state, StepGradients(mean, found[0].sums, found[0].buffers, ()))
    for part, stream in zip(parts, streams, strict=True):
        part.client.close()
        stream.close()
    return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.every(2)
def test_rounds_have_the_bits_of_ordered_sums_on_one_mesh(servers):
    placement = {"type": "balanced", "range_bytes": 1024}
    given = {"servers": servers, "placement": placement, "workers": 4}
    run = Training(consistency={"type": "bsp"}, **given)
    wanted = ordered_sums(run)
    run.run()
    found = run.state()
    assert_same(found.params, wanted.params)
    assert_same(found.opt_state, wanted.opt_state)
    assert [one.floor for one in run.reached.values()] == [6] * servers


MODELS = [
    {"type": "ssp", "bound": 1},
    {"type": "async", "staleness_power": 1.0, "delay_compensation": {"decay": 0.9}},
    {"type": "async", "reads": "ahead", "value_bound": 1.0},
    {"type": "adaptive", "least": 1, "most": 3},
    {"type": "elastic", "every": 2},
    {"type": "elastic", "every": 2, "order": "rounds"},
    {"type": "decoupled", "local_steps": 3},
]

BACKUP = {"type": "bsp", "backups": 1}


def each(quick, slow=()):
    """The quick and the slow ones of the models, by number; the others are full."""
    marks = {**dict.fromkeys(quick, ()), **dict.fromkeys(slow, pytest.mark.slow)}
    return [
        pytest.param(model, id=f"{model['type']}-{at}", marks=marks.get(at, pytest.mark.full))
        for at, model in enumerate(MODELS)
    ]


@pytest.mark.parametrize("model", each({2, 5}))
@pytest.mark.every(2)
def test_every_model_lowers_the_loss_and_loses_nothing(model):
    sections = {
        "optim": {"type": "sgd", "learning_rate": 0.1, "momentum": 0.0},
        "train": {"steps": 24, "batch_size": 32},
    }
    run = Training(consistency=model, sections=sections, servers=2)
    run.run()
    losses = [sums["loss"][0] / sums["loss"][1] for sums in run.measured]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    for server in run.servers:
        assert server.counters.applied == 2 * run.clocks
        assert not server.counters.dropped
        assert not server.counters.refused


def replays():
    """Models of consistency with codecs, and without."""
    kept = [pytest.param(*param.values, None, id=param.id, marks=param.marks)
            for param in each({0}, slow={2, 3, 5, 6})]  # fmt: skip
    sign = [
        pytest.param(MODELS[0], {"type": "sign"}, id="ssp-sign"),
        pytest.param(BACKUP, {"type": "sign"}, id="bsp-backup-sign", marks=pytest.mark.full),
        pytest.param(MODELS[6], {"type": "quantize", "bits": 4}, id="decoupled-int4",
                     marks=pytest.mark.slow),
    ]  # fmt: skip
    return kept + sign


@pytest.mark.parametrize(("model", "codec"), replays())
@pytest.mark.every(2)
def test_a_run_is_replayed_from_its_log_to_the_same_bits(model, codec, tmp_path):
    """Gradients are computed again: the log holds who came when, and nothing of what they sent."""
    sections = {"train": {"steps": 9, "batch_size": 32}}
    run = Training(consistency=model, codec=codec, sections=sections, servers=2, workers=3,
                   batch_shares=[8, 8, 16], log=tmp_path)  # fmt: skip
    run.run()
    workers = [run.worker(slot) for slot in range(3)]
    again = replay_of(run, workers, tmp_path)
    assert_same(again.run(), [server.shard.params for server in run.servers])
    for server, found in enumerate(again.reached):
        saved = run.reached[server]
        assert found.version == saved.version
        assert_same((found.params, found.optimizer), (saved.params, saved.optimizer))
    for worker in workers:
        worker.client.close()


def test_a_replay_asks_again_for_the_changes_of_a_merge_that_waited(tmp_path, monkeypatch):
    """Worker 0's change is known when the merge begins, worker 1's change at the second try."""
    computed, late = Replay._computed, set()

    def later(self, client, clock):
        if client == 1 and clock not in late:
            late.add(clock)
            raise _NotYetError
        return computed(self, client, clock)

    monkeypatch.setattr(Replay, "_computed", later)
    run = Training(consistency={"type": "bsp"}, servers=2, log=tmp_path)
    run.run()
    workers = [run.worker(slot) for slot in range(2)]
    found = replay_of(run, workers, tmp_path).run()
    assert_same(found, [server.shard.params for server in run.servers])
    assert late == set(range(run.clocks))
    for worker in workers:
        worker.client.close()


CODECS = [
    {"type": "sign"},
    pytest.param({"type": "topk", "fraction": 0.1}, marks=pytest.mark.full),
    pytest.param({"type": "quantize", "bits": 4}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["type"])
@pytest.mark.every(2)
def test_pushes_in_few_bytes(codec):
    """What servers apply is what the workers' codecs decode to; vectors go as they are."""
    constant = {"schedule": {"type": "constant"}, "learning_rate": 1.0}
    sections = {"optim": {"type": "sgd", "momentum": 0.0, **constant},
                "train": {"steps": 2, "batch_size": 32}}  # fmt: skip
    run = Training(consistency={"type": "bsp"}, codec=codec, sections=sections, servers=2)
    wanted = [server.shard.params for server in run.servers]
    encoders = [[PushEncoder(codes, slot) for codes in run.sharded.codes] for slot in range(2)]
    workers = [run.worker(slot) for slot in range(2)]
    for step in range(2):
        sums = [0, 0]
        for slot, worker in enumerate(workers):
            work = computation(run.sharded, worker.program, slot)
            work.begin(wanted)
            changes, _ = work.compute([worker.loader.batch(step)], step)
            for at, change in enumerate(changes):
                sequence = 1 + 2 * step  # after its pull
                payload, finite = encoders[slot][at](change, sequence)
                assert finite
                assert payload.nbytes == run.sharded.pushes[at].size_bytes
                sums[at] = sums[at] + run.sharded.codes[at].decode(payload, slot, sequence)
        wanted = [one - total / 2 for one, total in zip(wanted, sums, strict=True)]
    for worker in workers:
        worker.client.close()
    run.run()
    for server, params in zip(run.servers, wanted, strict=True):
        np.testing.assert_allclose(server.shard.params, params, rtol=1e-6, atol=1e-6)
        push = server.shard.layout.spec.size_bytes
        assert server.counters.received_bytes < 4 * push / 2


def test_any_bytes_are_decoded():
    """A push of noise is a change like any other, or is refused for what it holds."""
    run = Training(codec={"type": "topk", "fraction": 0.1}, servers=1)
    (codes,) = run.sharded.codes
    rng = np.random.default_rng(0)
    for sequence in range(20):
        noise = rng.integers(0, 256, codes.spec.length, dtype=np.uint8)
        assert codes.decode(noise, 0, sequence).shape == (codes.layout.length,)
    for server in run.servers:
        server.close()


@pytest.mark.full
def test_a_mean_of_one_exchange_of_local_updates():
    """One clock of decoupled local steps, outer rate 1: the mean of what both trained."""
    model = {"type": "decoupled", "local_steps": 3, "learning_rate": 1.0, "momentum": 0.0}
    given = {"optim": {"type": "sgd", "learning_rate": 0.1, "momentum": 0.9}}
    sections = {**given, "train": {"steps": 3, "batch_size": 32}}
    run = Training(consistency={**model, "nesterov": False}, sections=sections)
    trained = []
    for slot in range(2):
        worker = run.worker(slot)
        state = run.start
        with worker.loader.batches() as batches:
            for step in range(3):
                state = replace(state, step=jax.numpy.int32(step))
                found = worker.program.gradients(state, next(batches))
                state, _ = worker.program.update(jax.tree.map(jax.numpy.array, state), found)
        worker.client.close()
        trained.append(jax.tree.map(np.asarray, state.params))
    run.run()
    for a, b, found in zip(*map(jax.tree.leaves, (*trained, run.state().params)), strict=True):
        np.testing.assert_allclose(found, (a + b) / 2, rtol=1e-5, atol=1e-6)


def test_shards_are_saved_and_read_back_and_damage_is_found(tmp_path):
    run = Training(consistency={"type": "bsp"}, servers=2)
    run.run()
    for layout, shard in zip(run.sharded.layouts, run.shards, strict=True):
        write_shard(tmp_path, layout.server, shard)
        found = read_shard(tmp_path, run.sharded, layout, 6)
        assert (found.floor, found.version) == (6, 6)
        assert_same((found.params, found.optimizer), (shard.params, shard.optimizer))
    layout = run.sharded.layouts[1]
    (path,) = (tmp_path / "shards" / "server_1").glob("step_*/arrays/000000.bin")
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"arrays/000000.bin: the content does not match"):
        read_shard(tmp_path, run.sharded, layout, 6)
    with pytest.raises(CheckpointError, match=r"is damaged: manifest.json: missing"):
        read_shard(tmp_path, run.sharded, layout, 7)


@pytest.mark.full
def test_a_state_goes_to_any_number_of_servers_and_back():
    small = {"type": "balanced", "range_bytes": 512}
    run = Training(servers=1, placement=small)
    run.run()
    for servers in (1, 2, 5):
        other = Training(servers=servers, placement=small)
        parts = other.sharded.parted(jax.device_put(run.state()), 6)
        back = other.sharded.whole(parts, other.start, 6)
        assert_same((back.params, back.opt_state), (run.state().params, run.state().opt_state))


def by_name(rate: optax.Schedule) -> optax.GradientTransformation:
    """Biases move by a tenth."""
    labels = lambda tree: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: "slow" if "bias" in jax.tree_util.keystr(path) else "fast", tree
    )
    slow = optax.sgd(lambda count: rate(count) / 10, momentum=0.9)
    return optax.multi_transform({"slow": slow, "fast": optax.sgd(rate, momentum=0.9)}, labels)


@pytest.mark.full
def test_an_optimizer_of_one_s_own_sees_the_model_s_names():
    optim = {"type": "import", "path": f"{__name__}:by_name", "learning_rate": 0.1}
    run = Training(consistency={"type": "bsp"}, servers=2, sections={"optim": optim})
    wanted = ordered_sums(run)
    run.run()
    assert_same(run.state().params, wanted.params)
    assert_same(run.state().opt_state, wanted.opt_state)


def test_learning_rates_are_of_steps_however_many_updates_they_take():
    run = Training(
        consistency={"type": "ssp"}, workers=4, sections={"train": {"steps": 8, "batch_size": 32}}
    )
    schedule = run.experiment.program.optimizer.schedule
    found = [float(run.sharded.schedule(np.int32(count))) for count in range(32)]
    assert found == [float(schedule(np.int32(count // 4))) for count in range(32)]
    assert isinstance(run.sharded.transform(run.sharded.layouts[0]), optax.GradientTransformation)


@pytest.mark.parametrize("codec", [None, {"type": "sign"}], ids=["plain", "sign"])
def test_what_a_value_bound_looks_at_are_changes_and_not_their_bytes(codec):
    """Encoded bytes are up to 255, whatever they stand for."""
    model = {"type": "async", "reads": "ahead", "value_bound": 1.0}
    run = Training(consistency=model, codec=codec)
    worker = run.worker(0)
    with worker.client as client:
        flats = client.read()
        found = [np.full_like(one, 1e-3) for one in flats]
        run.servers[0]._lock.acquire()  # nothing is acknowledged while the lock is held
        try:
            client.push(found)
            (change,) = client.under_way(0)
        finally:
            run.servers[0]._lock.release()
        np.testing.assert_allclose(change, found[0], rtol=1e-3)
    for server in run.servers:
        server.close()
