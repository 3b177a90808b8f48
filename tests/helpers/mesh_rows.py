"""Plans that tests compare with one device, and plans that only `jaxdist parity` compares."""

import itertools

MESHES = ({"data": 8}, {"tensor": 8}, {"data": 2, "tensor": 4}, {"data": 4, "tensor": 2})
CELLS = [
    ("cnn", {"data": 4, "tensor": 2}),
    ("mlp", {"tensor": 8}),
    ("gpt", {"tensor": 2, "data": {"dcn": 2, "ici": 2}}),
]
FULL_CELLS = [("gpt-grouped-untied-remat", {"data": 2, "tensor": 4})]
MORE_CELLS = [row for row in itertools.product(("gpt", "cnn", "mlp"), MESHES) if row not in CELLS]
"""Rows that the rows of `CELLS` replace in quick tests."""


SPLIT = {"data": {"dcn": 2, "ici": 4}}
REDUCTIONS = [
    ("mlp", {"data": 8}, {"type": "ring"}, {}),
    ("gpt", {"data": 4, "tensor": 2}, {"type": "ring", "directions": 2}, {"microbatches": 2}),
    ("mlp", SPLIT, {"type": "hierarchical"}, {"microbatches": 2}),
    ("mlp", {"data": 2, "tensor": 4}, {"type": "tree"}, {}),
    ("cnn", {"data": 8}, {"type": "halving", "bucket_bytes": 4096}, {}),
    ("cnn", {"data": 4, "tensor": 2}, {"type": "xla", "bucket_bytes": None}, {}),
    ("mlp", {"data": 8}, {"type": "double_tree"}, {}),
    ("mlp", SPLIT, {"type": "auto"}, {}),
]


ICI = {"stage": 3, "scope": "ici"}
ZERO = [
    ("cnn", {"data": 8}, {"type": "xla"}, {"stage": 1}, {}),
    ("gpt", SPLIT, {"type": "ring"}, ICI, {"microbatches": 2}),
    ("mlp", SPLIT, {"type": "hierarchical"}, {"stage": 2}, {}),
    # The tensor axis splits the only dim of the biases, and of the last kernel, that is a multiple
    # of the axis size.
    ("mlp", {"data": 4, "tensor": 2}, {"type": "ring"}, {"stage": 2, "whole_below": 0}, {}),
    ("mlp", {"data": 4, "tensor": 2}, {"type": "xla"}, {"stage": 3, "whole_below": 0}, {}),
]
MORE_ZERO = [
    (
        "gpt-grouped-untied-remat",
        {"data": 4, "tensor": 2},
        {"type": "ring"},
        {"stage": 3, "prefetch": True},
        {"microbatches": 2},
    ),
    ("gpt-grouped-untied-remat", {"data": 2, "tensor": 4}, None, {"stage": 3}, {}),
    ("gpt", SPLIT, None, ICI, {}),
]
SLOW_ZERO = [
    ("gpt", {"data": 8}, None, {"stage": 1}, {}),
    ("gpt", {"data": 4, "tensor": 2}, {"type": "ring"}, {"stage": 1}, {"microbatches": 2}),
    ("gpt", {"data": 8}, {"type": "ring"}, {"stage": 2}, {"microbatches": 2}),
    ("gpt-grouped-untied-remat", {"data": 2, "tensor": 4}, {"type": "xla"}, {"stage": 2}, {}),
    ("gpt", {"data": 4, "tensor": 2}, {"type": "xla"}, {"stage": 3}, {"microbatches": 2}),
]
