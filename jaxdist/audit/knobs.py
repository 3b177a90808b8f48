"""Functions that list, remove and change the knobs of a configuration.

A knob is a single setting, or a section whose presence is a setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

from jaxdist.config import Document, KeyPath, dotted, value_at
from jaxdist.errors import ConfigError
from jaxdist.types import Json

NOT_IN_THE_STEP: Mapping[str, str] = {
    "data": "defines what is learned, not how",
    "run": "names files",
    "seed": "draws parameters and the data's order",
    "eval": "evaluates between steps",
    "checkpoint": "saves between steps",
    "strategy": "exchanges parameters between steps or processes",
    "mesh.fake_devices": "chooses the devices to compile for",
    "train.log_every": "prints between steps",
    "train.check_replicas": "compares replicas between steps",
    "train.prefetch": "loads batches while a step runs",
    "train.batch_ramp.ramp_examples": "determines when the batch grows, not what a step computes",
    "optim.max_skipped": "ends a run between steps",
}
"""The purpose of each setting or section that is not part of a train step."""


def reason_not_in_the_step(path: KeyPath) -> str | None:
    """Return the purpose of a knob that is not part of the train step.

    The result is None for a knob that must change the step.

    >>> reason_not_in_the_step(("eval", "every")), reason_not_in_the_step(("optim", "b2"))
    ('evaluates between steps', None)
    """
    prefixes = (dotted(path[:length]) for length in range(1, len(path) + 1))
    return next((NOT_IN_THE_STEP[name] for name in prefixes if name in NOT_IN_THE_STEP), None)


def written_settings(values: Mapping[str, Json], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every path that a configuration sets.

    The path of a section precedes the paths of its content. A list is a value, and its elements
    have no paths.

    Args:
      values: the values of a section, or of the configuration.
      path: the path of the section, which is empty for the configuration.

    >>> list(written_settings({"train": {"steps": 3}, "seed": 1}))
    [('train',), ('train', 'steps'), ('seed',)]
    """
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from written_settings(value, (*path, key))


def without(document: Document, path: KeyPath) -> Document:
    """Return the configuration without the setting or section at `path`, which must be set.

    >>> without(Document({"a": {"b": 1, "c": 2}}), ("a", "b")).values
    {'a': {'c': 2}}
    """
    values = deepcopy(document.values)
    del value_at(values, path[:-1])[path[-1]]
    return replace(document, values=values)


def with_value(document: Document, path: KeyPath, value: Json) -> Document:
    """Return the configuration with another value at `path`, which the configuration must set.

    >>> with_value(Document({"a": {"b": 1, "c": 2}}), ("a", "b"), 3).values
    {'a': {'b': 3, 'c': 2}}
    """
    values = deepcopy(document.values)
    value_at(values, path[:-1])[path[-1]] = value
    return replace(document, values=values)


def knob_neighbours(value: Json) -> tuple[Json, ...]:
    """Return other values near a setting's value, which show whether a step reads the setting.

    The tuple is empty for text, lists and null.

    >>> knob_neighbours(6), knob_neighbours(0.5), knob_neighbours(True), knob_neighbours("a")
    ((3, 12), (0.25, 1.0), (False,), ())
    """
    # This test comes before the test for `int`, since `bool` is a subclass of `int`.
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value // 2, value * 2
    return (value / 2, value * 2) if isinstance(value, float) else ()


def config_refusal(error: ConfigError) -> str:
    """Return the first problem of a refused configuration, without the file and line number.

    >>> config_refusal(ConfigError("1 problem in a.yaml:\\n  optim.b2 = 1 (a.yaml:3): below 1"))
    'below 1'
    """
    first, *problems = str(error).splitlines()
    line = problems[0] if problems else first
    return line.partition("): ")[2] or line.strip()
