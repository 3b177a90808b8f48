from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from sharded import mapped, mesh_of

from jaxdist.collectives import (
    CollectiveError,
    Halving,
    Hierarchical,
    Ring,
    Xla,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
)
from jaxdist.collectives.algorithms.auto import FLAT, HIERARCHICAL, Auto, LinkConfig, label
from jaxdist.collectives.contract import KINDS
from jaxdist.hlo import ledger

TORUS = LinkConfig(latency_seconds=1e-6, bytes_per_second=1e10, topology="torus")
SWITCH = LinkConfig(latency_seconds=1e-3, bytes_per_second=1e9)
SLOW = LinkConfig(latency_seconds=1e-3, bytes_per_second=1e6)
TWO = {"data_dcn": 2, "data_ici": 4}


def chosen(auto, payload_bytes, sizes, on="cpu", kind="all_reduce"):
    return auto.choose(kind, payload_bytes, auto.levels(sizes, on))


def test_xla_first_and_our_best_where_xla_is_left_out():
    assert chosen(Auto(), 2**24, {"data": 8}, "v5e") == Xla()
    assert chosen(Auto(xla=False), 2**24, {"data": 8}, "v5e") == Ring(directions=2)
    assert chosen(Auto(xla=False), 2**10, {"data": 8}, "h100") == Halving()


def test_two_networks_are_taken_level_by_level():
    for on in ("v5e", "h100"):
        algorithm = chosen(Auto(), 2**24, {"data_dcn": 4, "data_ici": 8}, on)
        assert isinstance(algorithm, Hierarchical)
    assert chosen(Auto(), 2**24, {"data_dcn": 4}, "v5e") == Xla()
    assert chosen(Auto(), 2**24, {"data_dcn": 1, "data_ici": 8}, "v5e") == Xla()


def test_the_config_goes_before_the_device():
    sizes = {"data": 8}
    assert chosen(Auto(xla=False, fast=SWITCH), 2**24, sizes, "v5e") == Halving()
    assert chosen(Auto(xla=False, device="h100"), 2**24, sizes, "v5e") == Halving()
    assert chosen(Auto(xla=False, slow=SWITCH, slow_axes=("data",)), 8, sizes, "v5e") == Halving()
    levels = Auto(slow_axes=("data",)).levels({"data": 2, "x_dcn": 2}, "v5e")
    assert [level.link.bytes_per_second for level in levels] == [3.125e9, 4.5e10]


def test_a_device_without_figures_is_named_with_the_remedy():
    with pytest.raises(CollectiveError, match=r"'TPU v9' for axis 'x_dcn': set `device`.*`slow:"):
        Auto(fast=TORUS).levels({"x": 2, "x_dcn": 2}, "TPU v9")
    with pytest.raises(CollectiveError, match=r"the device 'z1' for axis 'x'.*`fast:"):
        Auto(device="z1").levels({"x": 2}, "v5e")
    assert len(Auto(fast=TORUS).levels({"x": 2}, "TPU v9")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_chosen_is_the_least_of_the_table(kind):
    auto = Auto(fast=TORUS, slow=SLOW)
    levels = auto.levels(TWO, "cpu")
    found = auto.candidates(kind, 1e6, levels)
    assert len(found) == len(FLAT) + len(HIERARCHICAL)
    best = next(c for c in found if c.algorithm == auto.choose(kind, 1e6, levels))
    assert best.seconds == min(c.seconds for c in found)


def test_the_explanation_has_all_candidates_the_links_and_the_choice_first():
    auto = Auto(fast=TORUS, slow=SLOW)
    lines = auto.explain("all_reduce", 2**20, TWO, on="cpu").splitlines()
    assert lines[0] == "all_reduce of 1048576 bytes on {data_dcn: 2, data_ici: 4}"
    assert lines[1] == "  data_dcn: 1000 us latency, 0.001 GB/s, switch"
    assert lines[2] == "  data_ici: 1 us latency, 10 GB/s, torus"
    rows = lines[4:]
    assert len(rows) == len(FLAT) + len(HIERARCHICAL)
    assert rows[0].endswith(label(chosen(auto, 2**20, TWO)))
    assert "1.00x" in rows[0]
    times = [float(row.split()[0]) for row in rows]
    assert times == sorted(times)
    seconds = auto.candidates("all_reduce", 2**20, auto.levels(TWO, "cpu"))
    assert times[0] == pytest.approx(min(c.seconds for c in seconds) * 1e6, abs=0.06)


def test_the_traffic_is_that_of_the_choice():
    auto = Auto(xla=False, fast=TORUS, slow=SLOW)
    for size in (8, (2, 4), (1, 8)):
        sizes = dict(zip(("a_dcn", "b"), size, strict=True)) if size != 8 else {"b": 8}
        algorithm = chosen(auto, 2**20, sizes)
        assert auto.traffic("all_reduce", 2**20, size) == algorithm.traffic(
            "all_reduce", 2**20, size
        )
    assert auto.traffic("all_reduce", 2**20, 1).steps == 0


AUTOS = {
    "torus": Auto(xla=False, fast=TORUS, slow=SLOW),
    "switch": Auto(xla=False, fast=SWITCH, slow=SLOW),
    "default": Auto(),
}


@pytest.mark.parametrize("auto", AUTOS.values(), ids=AUTOS)
@pytest.mark.parametrize("sizes", [TWO, {"data": 5}], ids=str)
@pytest.mark.every(3)
def test_every_operation_equals_xlas(auto, sizes):
    axes, count = tuple(sizes), int(np.prod([*sizes.values()]))
    x = np.random.default_rng(0).normal(size=(count, count * 3)).astype(np.float32)

    def run(algorithm):
        def operations(block):
            return (
                all_reduce(block, axes, algorithm=algorithm),
                reduce_scatter(block, axes, algorithm=algorithm),
                all_gather(block, axes, algorithm=algorithm),
                broadcast(block, axes, root=1, algorithm=algorithm),
                reduce(block, axes, root=1, algorithm=algorithm),
                all_to_all(block, axes, algorithm=algorithm),
            )

        return mapped(operations, sizes)(x)

    for ours, reference in zip(run(auto), run(Xla()), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-5)


def test_the_choice_is_made_by_the_payload_as_traffic_counts_it(monkeypatch):
    asked = {}

    def choose(self, kind, payload_bytes, levels):
        asked[kind] = payload_bytes
        return Ring()

    monkeypatch.setattr(Auto, "choose", choose)

    def operations(x):
        for operation in (all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all):
            operation(x, "data", algorithm=Auto())
        return x

    mapped(operations, {"data": 4})(jnp.zeros((4, 8), jnp.float32))
    assert asked == dict.fromkeys(KINDS, 32) | {"all_gather": 128}


def test_the_program_holds_what_the_table_chose():
    def permutes(auto, count):
        function = mapped(lambda x: all_reduce(x, "data", algorithm=auto), {"data": 8})
        x = jnp.zeros((8, count))
        compiled = function.lower(x).compile()
        return ledger(compiled, mesh_of({"data": 8})).count("collective-permute")

    both_ways = Auto(xla=False, fast=TORUS)
    assert permutes(both_ways, 2**16) == Ring(directions=2).traffic("all_reduce", 1, 8).messages
    assert permutes(Auto(xla=False, fast=SWITCH), 8) == 6
    assert permutes(Auto(), 8) == 0


def test_the_default_finds_the_device_of_the_mesh():
    assert (
        mapped(lambda x: all_reduce(x, "data", algorithm=Auto()), {"data": 2})(
            jnp.ones((2, 3))
        ).tolist()
        == [[2.0] * 3] * 2
    )
    with pytest.raises(CollectiveError, match="the device 'nothing'"):
        mapped(lambda x: all_reduce(x, "data", algorithm=Auto(device="nothing")), {"data": 2})(
            jnp.ones((2, 3))
        )


def test_labels_leave_defaults_out():
    assert label(Hierarchical(inside=Halving(), accumulate="float32")) == (
        "{type: hierarchical, accumulate: float32, inside: {type: halving}}"
    )
    assert label(Ring(bucket_bytes=None)) == "{type: ring, bucket_bytes: null}"
