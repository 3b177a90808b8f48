from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from jaxdist.collectives import Halving, Hierarchical, Ring, Xla
from jaxdist.collectives.algorithms.auto import FLAT, Auto, LinkConfig
from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.config.document import Document
from jaxdist.config.schema import Config, validate
from jaxdist.errors import ConfigError


class Section(Config):
    reduce: ReduceConfig


def parse(values):
    return validate(Document({"reduce": values}), Section).reduce


@pytest.mark.parametrize(
    ("values", "algorithm"),
    [
        ({"type": "xla"}, Xla()),
        (
            {"type": "ring", "directions": 2, "bucket_bytes": 33554432},
            Ring(directions=2, bucket_bytes=33554432),
        ),
        ({"type": "ring", "bucket_bytes": None}, Ring(bucket_bytes=None)),
        (
            {"type": "hierarchical", "inside": {"type": "halving"}, "accumulate": "float32"},
            Hierarchical(inside=Halving(), accumulate="float32"),
        ),
        (
            {"type": "auto", "device": "v5e", "slow_axes": ["data"], "xla": False},
            Auto(device="v5e", slow_axes=("data",), xla=False),
        ),
        (
            {"type": "auto", "slow": {"latency_seconds": 1e-4, "bytes_per_second": 1e8}},
            Auto(slow=LinkConfig(latency_seconds=1e-4, bytes_per_second=1e8)),
        ),
    ],
)
def test_a_config_is_the_algorithm(values, algorithm):
    found = parse(values)
    assert found == algorithm
    assert hash(found) == hash(algorithm)


@pytest.mark.parametrize("algorithm", [*FLAT, Hierarchical(), Auto()], ids=lambda a: a.type)
def test_every_algorithm_can_be_chosen_and_written_again(algorithm):
    adapter = TypeAdapter(ReduceConfig)
    assert adapter.validate_json(adapter.dump_json(algorithm)) == algorithm
    assert parse({"type": algorithm.type}) == type(algorithm)()


@pytest.mark.parametrize("size", [0, -1])
def test_a_bucket_without_room_is_refused(size):
    with pytest.raises(ConfigError, match=rf"reduce.bucket_bytes = {size} .*: .*(>= 1|at least 1)"):
        parse({"type": "ring", "bucket_bytes": size})
    with pytest.raises(
        ValueError, match=rf"bucket_bytes(.|\n)*greater than or equal to 1.*={size}"
    ):
        Ring(bucket_bytes=size)


def test_an_unknown_algorithm_is_named_with_the_closest():
    with pytest.raises(ConfigError, match=r"reduce.type = 'rng' .*did you mean 'ring'"):
        parse({"type": "rng"})


@pytest.mark.parametrize("field", ["latency_seconds", "bytes_per_second"])
def test_a_link_that_cannot_be_is_refused(field):
    link = {"latency_seconds": 1e-5, "bytes_per_second": 1e9, field: -1.0}
    with pytest.raises(ConfigError, match=rf"reduce.fast.{field} = -1.0"):
        parse({"type": "auto", "fast": link})
