"""The table of refused combinations, with the features, the reason and the remedy of each.

A config is refused if it has a feature of each group of a row. The table is therefore both the
check of a config and the source of the matrix in the docs, which `python -m jaxdist.validity`
prints.
"""

from __future__ import annotations

from jaxdist.errors import ConfigError
from jaxdist.models.mean import AS_MEAN, OPAQUE
from jaxdist.validity.context import CONTEXT
from jaxdist.validity.experts import EXPERTS
from jaxdist.validity.features import FLAT, Facts
from jaxdist.validity.hybrid import HYBRIDS
from jaxdist.validity.messages import MESSAGES
from jaxdist.validity.row import COMPRESSION, FROZEN, REDUCTIONS, SCOPES, ZERO_STAGES, ValidityRow
from jaxdist.validity.servers import SERVERS

ROWS: tuple[ValidityRow, ...] = (
    ValidityRow(
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary"), ("no axis splits the batch",)),
        ("ZeRO splits the training state over the axis that splits the batch, and there is none"),
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.zero.stage: 0",
    ),
    ValidityRow(
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary"), ("a sharding rule over data",)),
        "ZeRO would split over the axis of the batch what that axis splits already",
        "set that rule to null, or parallel.zero.stage: 0",
    ),
    ValidityRow(
        (("parallel.zero.scope: ici",), ("data on one network",)),
        ("the state would be split inside the fast network, but the axis names only one network"),
        "set mesh.data: {dcn: D, ici: I}, or parallel.zero.scope: all",
    ),
    ValidityRow(
        (REDUCTIONS, ("no axis splits the batch",)),
        "gradients are summed over the axis that splits the batch, and there is none",
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.reduce: null",
    ),
    ValidityRow(
        (REDUCTIONS, ("a sharding rule over data",)),
        "an explicit reduction needs parameters that are not split along the axis of the batch",
        "set that rule to null, or parallel.reduce: null",
    ),
    ValidityRow(
        (("reduce: hierarchical",), ("data on one network",)),
        (
            "it sums inside a fast network and then across a slow one, but the axis names only "
            "one network"
        ),
        "set mesh.data: {dcn: D, ici: I}, or parallel.reduce.type: ring",
    ),
    ValidityRow(
        (("reduce: hierarchical",), ("parallel.zero.scope: ici",)),
        "shards are already summed in two steps, inside the fast network and across the slow "
        "network",
        "set parallel.reduce.type: ring, or parallel.zero.scope: all",
    ),
    ValidityRow(
        (("parallel.zero.prefetch",), FROZEN),
        "fetching layers ahead computes the gradients of all their parameters",
        "set parallel.zero.prefetch: false",
    ),
    ValidityRow(
        (("parallel.zero.secondary", "parallel.zero.prefetch"), ("stage (a pipeline)",)),
        "a stage gathers parameters once a step, or in each task, which its neighbours wait for",
        "set it to false; parallel.pipeline.gather says when",
    ),
    ValidityRow(
        (
            ("zero 2", "zero 3"),
            ("stage (a pipeline)",),
            (f"reduce: {', '.join(FLAT)}", "reduce: hierarchical"),
        ),
        "gradients are reduced within a stage's tasks, where a permute waits for the devices of "
        "the other stages",
        "set parallel.reduce.type: xla, or parallel.zero.stage: 1",
    ),
    ValidityRow(
        (("stage (a pipeline)",), ("a sharding rule over data",)),
        "an explicit reduction (xla by default) sums the gradients of stages, which needs "
        "parameters that are not split along the axis of the batch",
        "set that rule to null, or leave out mesh.stage",
    ),
    ValidityRow(
        (COMPRESSION, ("no axis splits the batch",)),
        ("messages hold gradients that are summed over the axis of the batch, and there is none"),
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.compression: null",
    ),
    ValidityRow(
        (COMPRESSION, ("a sharding rule over data",)),
        "messages hold gradients that are not split along the axis of the batch",
        "set that rule to null, or parallel.compression: null",
    ),
    ValidityRow(
        (("compression over data.dcn",), ("data on one network",)),
        "messages would cross the slow of two networks, but the axis names only one network",
        "set mesh.data: {dcn: D, ici: I}, or parallel.compression.axis: data",
    ),
    ValidityRow(
        (("zero 2", "zero 3", "parallel.zero.secondary"), ("compression over data",)),
        (
            "no device ever has a whole gradient to compress, or the state to keep what a "
            "message left out"
        ),
        "set mesh.data: {dcn: D, ici: I}, parallel.zero.scope: ici and parallel.compression.axis: "
        "data.dcn (exact in the fast network, messages of shards across the slow one), or "
        "parallel.zero.stage: 1, or error_feedback: false with 4 bits or more",
    ),
    ValidityRow(
        (("parallel.zero.secondary",), ("data on one network",)),
        "a second copy inside the fast network spares the slow network, but the axis names only "
        "one network",
        "set mesh.data: {dcn: D, ici: I}, or parallel.zero.secondary: false",
    ),
    ValidityRow(
        (("parallel.zero.secondary",), ("parallel.zero.scope: ici",)),
        ("the state is inside the fast network already, and no parameter crosses the slow network"),
        "set parallel.zero.scope: all, or parallel.zero.secondary: false",
    ),
    ValidityRow(
        (("parallel.zero.secondary",), ("reduce: hierarchical",)),
        "gradients are already summed in two steps, inside the fast network and across the slow "
        "network",
        "set parallel.reduce.type: ring, or parallel.zero.secondary: false",
    ),
    ValidityRow(
        (("parallel.zero.scope: ici",), COMPRESSION[:2]),
        "each part of the state is summed inside the fast network first",
        "set parallel.compression.axis: data.dcn, or parallel.zero.scope: all",
    ),
    ValidityRow(
        (("parallel.zero.scope: all", "parallel.zero.secondary"), ("compression over data.dcn",)),
        "the state is split over both networks, and messages of shards cross one",
        "set parallel.zero.scope: ici, or parallel.compression.axis: data",
    ),
    ValidityRow(
        (("compression over data.dcn",), ("reduce: hierarchical",)),
        "gradients are already summed in two steps, inside the fast network and across the slow "
        "network",
        "set parallel.reduce.type: ring",
    ),
    ValidityRow(
        (("model.remat: {...: offload}",), ("stage (a pipeline)",)),
        "a stage keeps activations of its microbatches in buffers of its own, in the device's "
        "memory",
        "save or recompute them, or leave out mesh.stage",
    ),
    ValidityRow(
        (("deterministic: strict",), ("no axis splits the batch",)),
        "its logical shards divide the batch along its axis, and there is none",
        "set mesh.data (1 will do; and leave sharding.rules.batch at data)",
    ),
    ValidityRow(
        (("deterministic: strict",), ("a sharding rule over data",)),
        "a logical shard needs parameters that are not split along the axis of the batch",
        "set that rule to null; parallel.zero splits the training state and keeps the bits",
    ),
    ValidityRow(
        (("deterministic: strict",), REDUCTIONS),
        "logical shards are added up in an order of their own, which no other reduction keeps",
        "set parallel.reduce: null",
    ),
    ValidityRow(
        (("deterministic: strict",), COMPRESSION),
        "messages hold a device's own sum of gradients, and they leave out some of it",
        "set parallel.compression: null",
    ),
    ValidityRow(
        (("deterministic: strict",), ("stage (a pipeline)",)),
        "stages add microbatches in the order of their schedule, not by logical shard",
        "leave out mesh.stage",
    ),
    ValidityRow(
        (("deterministic: strict",), ("parallel.zero.scope: ici",)),
        "shards inside the fast network are added up there first, in the order of its devices",
        "set parallel.zero.scope: all",
    ),
    ValidityRow(
        (("deterministic: strict",), ("parallel.zero.secondary",)),
        "parameters are gathered once, at the beginning of a step, with no second copy to keep",
        "set parallel.zero.secondary: false",
    ),
    ValidityRow(
        (("deterministic: strict",), ZERO_STAGES, ("tensor (or another axis)",)),
        "gradients that two axes split have a norm that is added up in the order of devices",
        "set parallel.zero.stage: 0, or keep data alone in mesh",
    ),
    ValidityRow(
        (
            ("a scalar as loss",),
            (
                "train.microbatches",
                "stage (a pipeline)",
                *REDUCTIONS,
                *COMPRESSION,
                "deterministic: strict",
                "workers of a parameter server",
            ),
        ),
        f"each part of the batch is computed by itself, and {OPAQUE}",
        AS_MEAN,
        ("loss",),
    ),
    ValidityRow(
        (("a scalar as loss",), ("weights in the data",)),
        "a scalar does not show whether rows that weigh 0 are left out",
        AS_MEAN,
        ("loss",),
    ),
    ValidityRow(
        (("a scalar as loss",), ("a held-out split in several batches",)),
        f"a scalar is evaluated in one batch without padding, because {OPAQUE}",
        AS_MEAN,
        ("loss",),
    ),
    *MESSAGES,
    *SERVERS,
    *EXPERTS,
    *HYBRIDS,
    *CONTEXT,
)
"""The rows for all combinations that are refused."""


def violations(facts: Facts) -> list[str]:
    """Return a sentence for each refused combination of a config: settings, reason and remedy.

    >>> from jaxdist.collectives.algorithms.hierarchical import Hierarchical
    >>> print(*violations(Facts({"data": 8}, ("data",), Hierarchical(type="hierarchical"))))
    ... # doctest: +ELLIPSIS
    parallel.reduce.type hierarchical with mesh {data: 8}: it sums inside a fast network ...
    """
    return [problem for row in ROWS if (problem := row.problem(facts)) is not None]


def check(facts: Facts) -> None:
    """Check that a config has no refused combination of settings.

    Raises:
      ConfigError: a row of the table applies. There is an error for each setting that causes a
        refusal, with the path of the setting in the whole config. The first error is raised, and
        has the others as `more`.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        problem = row.problem(facts)
        if problem is not None:
            found.setdefault(row.setting, []).append(problem)
    errors = [ConfigError("\n".join(lines), setting=path) for path, lines in found.items()]
    if errors:
        first, *more = errors
        raise ConfigError(str(first), setting=first.setting, more=more)
