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

_RESTING = "parallel.zero.offload_parameters"

ROWS: tuple[ValidityRow, ...] = (
    ValidityRow(
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary"), ("no axis splits the batch",)),
        (
            "ZeRO splits the training state over the axis that splits the batch, but no axis "
            "splits the batch"
        ),
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.zero.stage: 0",
    ),
    ValidityRow(
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary"), ("a sharding rule over data",)),
        "ZeRO would split parameters over the batch's axis, but the rule splits them over that "
        "axis already",
        "set that rule to null, or parallel.zero.stage: 0",
    ),
    ValidityRow(
        (("parallel.zero.scope: ici",), ("data on one network",)),
        (
            "the state would be split inside the fast network, but mesh.data does not say which "
            "devices a fast network connects"
        ),
        "set mesh.data: {dcn: D, ici: I}, or parallel.zero.scope: all",
    ),
    ValidityRow(
        (REDUCTIONS, ("no axis splits the batch",)),
        "an explicit reduction sums gradients over the axis that splits the batch, but no axis "
        "splits the batch",
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
            "it sums inside the fast network and then across the slow network, but mesh.data does "
            "not say which devices a fast network connects"
        ),
        "set mesh.data: {dcn: D, ici: I}, or parallel.reduce.type: ring",
    ),
    ValidityRow(
        (("reduce: hierarchical",), ("parallel.zero.scope: ici",)),
        "with scope ici, shards are already summed in two steps, inside the fast network and then "
        "across the slow network",
        "set parallel.reduce.type: ring, or parallel.zero.scope: all",
    ),
    ValidityRow(
        (("parallel.zero.prefetch",), FROZEN),
        "prefetching layers computes the gradients of all parameters, also of frozen parameters",
        "set parallel.zero.prefetch: false",
    ),
    ValidityRow(
        (("parallel.zero.secondary", "parallel.zero.prefetch"), ("stage (a pipeline)",)),
        "a stage gathers its parameters once in a step, or once in each task, and "
        "neighboring stages wait for the gather",
        "set it to false; parallel.pipeline.gather chooses between step and task",
    ),
    ValidityRow(
        (
            ("zero 2", "zero 3"),
            ("stage (a pipeline)",),
            (f"reduce: {', '.join(FLAT)}", "reduce: hierarchical"),
        ),
        "gradients are reduced within the tasks of a stage, where an algorithm of permutes would "
        "wait for devices of other stages",
        "set parallel.reduce.type: xla, or parallel.zero.stage: 1",
    ),
    ValidityRow(
        (("stage (a pipeline)",), ("a sharding rule over data",)),
        "in a pipeline an explicit reduction (of type xla by default) sums the gradients, but it "
        "cannot sum gradients of parameters that the batch's axis splits",
        "set that rule to null, or leave out mesh.stage",
    ),
    ValidityRow(
        (COMPRESSION, ("no axis splits the batch",)),
        (
            "compression acts on gradients that are summed over the axis that splits the batch, "
            "but no axis splits the batch"
        ),
        "set mesh.data (and leave sharding.rules.batch at data), or parallel.compression: null",
    ),
    ValidityRow(
        (COMPRESSION, ("a sharding rule over data",)),
        "compression acts on gradients of parameters that the batch's axis does not split",
        "set that rule to null, or parallel.compression: null",
    ),
    ValidityRow(
        (("compression over data.dcn",), ("data on one network",)),
        "only messages across the slow network would be compressed, but mesh.data names no slow "
        "network",
        "set mesh.data: {dcn: D, ici: I}, or parallel.compression.axis: data",
    ),
    ValidityRow(
        (("zero 2", "zero 3", "parallel.zero.secondary"), ("compression over data",)),
        (
            "no device has a whole gradient to compress, or the residual of a whole gradient for "
            "error feedback"
        ),
        "set mesh.data: {dcn: D, ici: I}, parallel.zero.scope: ici and parallel.compression.axis: "
        "data.dcn (exact in the fast network, messages of shards across the slow one), or "
        "parallel.zero.stage: 1, or error_feedback: false with 4 bits or more",
    ),
    ValidityRow(
        (("parallel.zero.secondary",), ("data on one network",)),
        "a second copy inside the fast network saves traffic on the slow network, but mesh.data "
        "names no slow network",
        "set mesh.data: {dcn: D, ici: I}, or parallel.zero.secondary: false",
    ),
    ValidityRow(
        (("parallel.zero.secondary",), ("parallel.zero.scope: ici",)),
        (
            "with scope ici the fast network already holds the whole state, so a second copy "
            "saves no traffic on the slow network"
        ),
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
        "with scope ici the gradients of each shard are summed inside the fast network before "
        "they are sent",
        "set parallel.compression.axis: data.dcn, or parallel.zero.scope: all",
    ),
    ValidityRow(
        (("parallel.zero.scope: all", "parallel.zero.secondary"), ("compression over data.dcn",)),
        "the state is split over both networks, but messages over data.dcn cross the slow network "
        "only",
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
        "a stage keeps the activations of its microbatches in buffers of the device, which cannot "
        "be offloaded to the host",
        "save or recompute the activations, or leave out mesh.stage",
    ),
    ValidityRow(
        (("deterministic: strict",), ("no axis splits the batch",)),
        "logical shards are parts of the batch along the axis that splits it, but no axis splits "
        "the batch",
        "set mesh.data (mesh.data: 1 is enough), and leave sharding.rules.batch at data",
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
        "a message holds the gradients of a device and not of a logical shard, so its rounding "
        "depends on the number of devices",
        "set parallel.compression: null",
    ),
    ValidityRow(
        (("deterministic: strict",), ("stage (a pipeline)",)),
        "stages add microbatches in the order of their schedule, not by logical shard",
        "leave out mesh.stage",
    ),
    ValidityRow(
        (("deterministic: strict",), ("parallel.zero.scope: ici",)),
        "with scope ici gradients are first added up inside the fast network, in the order of "
        "devices",
        "set parallel.zero.scope: all",
    ),
    ValidityRow(
        (("deterministic: strict",), ("parallel.zero.secondary",)),
        "strict mode gathers the parameters only once, at the beginning of a step, so a second "
        "copy saves nothing",
        "set parallel.zero.secondary: false",
    ),
    ValidityRow(
        (("deterministic: strict",), ("parallel.zero.offload",)),
        "the update of a state in the host's memory is divided into groups of parameters, which "
        "the compiler may round differently from an update of all parameters",
        "set parallel.zero.offload: false",
    ),
    *(
        ValidityRow(
            ((_RESTING,), features), why, instead, ("parallel", "zero", "offload_parameters")
        )
        for features, why, instead in (
            (
                (*REDUCTIONS, *COMPRESSION, "stage (a pipeline)"),
                "an explicit reduction computes with the parameters in the device's memory",
                "leave this setting out, or leave the reductions to XLA: parallel.reduce: null, "
                "without compression and stages",
            ),
            (
                ("deterministic: strict",),
                "the update is divided into groups of parameters, which the compiler may round "
                "differently from an update of all parameters",
                "leave this setting out",
            ),
            (
                ("a strategy besides synchronous", "an optimizer that evaluates other parameters"),
                "it keeps a second set of parameters, which is computed from all of them on the "
                "device",
                "leave this setting out",
            ),
        )
    ),
    ValidityRow(
        (("deterministic: strict",), ZERO_STAGES, ("tensor (or another axis)",)),
        "the norm of gradients that two axes split is added up in the order of devices",
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
        "a scalar does not show whether examples with weight 0 are left out of the mean",
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
    parallel.reduce.type hierarchical with mesh {data: 8}: it sums inside the fast network ...
    """
    return [problem for row in ROWS if (problem := row.problem(facts)) is not None]


def check(facts: Facts) -> None:
    """Check that a config has no refused combination of settings.

    Raises:
      ConfigError: a row of the table applies. There is an error for each setting that causes a
        refusal, with the path of the setting in the complete config. The first error is raised, and
        its attribute `more` has the other errors.
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
