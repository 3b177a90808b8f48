"""`type: auto` of codecs: what it picks on links of all kinds, and why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from pydantic import ValidationError

from jaxdist.collectives.algorithms.auto import LinkConfig
from jaxdist.compression import Cast, LowRank, PerParameter, Quantize, Sign, TopK, WholeCodec
from jaxdist.compression.auto import AutoCodec, candidates, explain_candidates, resolve
from jaxdist.config.document import Document
from jaxdist.config.schema import validate
from jaxdist.errors import CollectiveError, CompressionError

LEAVES = {
    "kernel": jax.ShapeDtypeStruct((1024, 512), jnp.float32),
    "bias": jax.ShapeDtypeStruct((512,), jnp.float32),
}
SLOW = LinkConfig(latency_seconds=1e-4, bytes_per_second=1e6)
FAST = LinkConfig(latency_seconds=1e-6, bytes_per_second=1e12)
LATE = LinkConfig(latency_seconds=1.0, bytes_per_second=1e12)


def picked(link, sizes=None, **fields):
    return resolve(AutoCodec(fast=link, **fields), LEAVES, sizes or {"data": 8}, "cpu")


def test_extreme_links():
    assert picked(SLOW) == Quantize(bits=4)
    assert picked(SLOW, candidates=(Sign(), LowRank())).type == "lowrank"
    assert picked(FAST) == WholeCodec()  # coding costs more than bytes
    assert picked(LATE) == WholeCodec()  # fewest messages


def test_it_is_the_least_of_the_predictions():
    auto = AutoCodec(fast=SLOW)
    found = candidates(auto, LEAVES, {"data": 8}, "cpu")
    assert [one.codec for one in found] == list(auto.candidates)
    best = min(found, key=lambda one: one.seconds)
    assert resolve(auto, LEAVES, {"data": 8}, "cpu") == best.codec


def test_of_equals_the_first():
    assert picked(SLOW, {"data": 1}, candidates=(Sign(), Sign(block=8))) == Sign()


def test_other_candidates_and_other_choices_for_parameters():
    few = (WholeCodec(), Cast(), TopK(fraction=1e-3))
    assert picked(SLOW, candidates=few) == few[2]
    everything = resolve(
        AutoCodec(fast=SLOW, candidates=(LowRank(), Sign())), LEAVES, {"data": 8}, "cpu",
        choice_of=lambda codec: PerParameter(otherwise=codec, vectors="otherwise"),
    )  # fmt: skip
    assert everything == Sign()  # a bias has no rank


def test_inside_the_fast_network_sums_are_exact():
    sizes = {"data_dcn": 2, "data_ici": 4}
    auto = AutoCodec(fast=FAST, slow=SLOW)
    (whole, *_), (whole_inside, *_) = (
        candidates(auto, LEAVES, sizes, "cpu", inside=inside) for inside in (False, True)
    )
    assert whole_inside.seconds < whole.seconds / 2
    assert resolve(auto, LEAVES, sizes, "cpu", inside=True) == Quantize(bits=4)


def test_figures_of_a_device_that_is_not_here():
    assert resolve(AutoCodec(), LEAVES, {"data_dcn": 4}, "TPU v5 lite") == resolve(
        AutoCodec(device="v5e"), LEAVES, {"data_dcn": 4}, "cpu"
    )
    with pytest.raises(
        CollectiveError, match="does not know the links of the device 'abacus' for axis 'data'"
    ):
        resolve(AutoCodec(), LEAVES, {"data": 4}, "abacus")


def test_what_no_candidate_encodes():
    vector = {"bias": LEAVES["bias"]}
    auto = AutoCodec(fast=SLOW, candidates=(LowRank(), LowRank(rank=2)))
    with pytest.raises(CompressionError, match=r"no candidate can encode .*bias.* lowrank needs"):
        resolve(auto, vector, {"data": 4}, "cpu", choice_of=lambda codec: codec)


def test_the_table():
    table = explain_candidates(AutoCodec(fast=SLOW), LEAVES, {"data": 8}, "cpu").splitlines()
    assert table[0] == "reduction of 524,800 gradients on {data: 8}"
    assert table[1] == "  data: 100 us latency, 0.001 GB/s, switch"
    assert table[3].endswith("{type: quantize, bits: 4}")
    assert table[-1].endswith("{type: whole}")
    assert len(table) == 3 + len(AutoCodec().candidates)


def test_in_a_config():
    text = {"type": "auto", "candidates": [{"type": "whole"}, {"type": "sign", "block": 8}]}
    assert validate(Document(text), AutoCodec).candidates == (WholeCodec(), Sign(block=8))
    with pytest.raises(ValidationError, match="candidates is empty: name at least one codec"):
        AutoCodec(candidates=())
