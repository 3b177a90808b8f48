"""The rows of the table of validity about parameter servers, Muon, and Lookahead's slow weights."""

from __future__ import annotations

from jaxdist.validity.row import COMPRESSION, FROZEN, SCOPES, ZERO_STAGES, ValidityRow

SERVER = ("strategy: parameter_server",)
_NORM = (
    "it needs the norm over all parameters, but each server has only its shard of the parameters"
)


def _refused(path: str, why: str, instead: str) -> ValidityRow:
    return ValidityRow(((path,), SERVER), why, instead, tuple(path.split(".")))


SERVERS: tuple[ValidityRow, ...] = (
    ValidityRow(
        (COMPRESSION, SERVER),
        "workers send gradients to servers and not to one another, so parallel.compression "
        "compresses no message",
        "set parallel.compression: null, and compress the pushes with strategy.codec",
        ("parallel", "compression"),
    ),
    ValidityRow(
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary", "parallel.zero"), SERVER),
        "the servers hold the optimizer's state, so workers have no state to split",
        "leave parallel.zero out; strategy.servers splits the state over servers",
        ("parallel", "zero"),
    ),
    ValidityRow(
        (("deterministic: strict",), SERVER),
        "servers add up gradients by worker, not by logical shard",
        "set parallel.deterministic: null. `jaxdist replay` repeats a run to the bit, from the "
        "recorded order of pushes",
        ("parallel", "deterministic"),
    ),
    ValidityRow(
        (("a mesh axis besides data and tensor", "stage (a pipeline)"), SERVER),
        "the mesh of a worker has only the axes data and tensor",
        "remove the axis from mesh",
        ("mesh",),
    ),
    *(
        _refused(
            path,
            (
                "it changes the batch size during a run, but workers have no common step at which "
                "to change the size"
            ),
            "leave the setting out",
        )
        for path in ("train.batch_ramp", "train.phases")
    ),
    *(
        _refused(
            path,
            "servers hold and update all parameters, so no parameter can be frozen",
            "leave the setting out, which trains all parameters",
        )
        for path in FROZEN
    ),
    _refused(
        "train.check_replicas",
        "it compares replicas that take every step together, but workers hold different parameters",
        "leave the setting out",
    ),
    _refused(
        "optim.clip_norm",
        _NORM,
        "set optim.clip_norm: null, or use lamb or lars, which need only the norm of each tensor",
    ),
    _refused(
        "optim.skip_spikes",
        _NORM,
        "set optim.skip_spikes: null; servers drop every push with a NaN or an infinity in any "
        "case",
    ),
    _refused(
        "optim.loss_scale",
        "the loss scale would have to be equal on all workers, which do not exchange it",
        "set optim.loss_scale: null, and train in bfloat16 or float32",
    ),
    _refused(
        "optim.rates",
        "a server has a single learning rate for all its parameters",
        "leave the setting out",
    ),
    _refused("optim.master_weights", "servers hold the parameters in float32 already", "set null"),
    _refused(
        "optim.skip_nonfinite",
        "it has no effect, because servers drop and count every push with a NaN or an infinity",
        "set false",
    ),
    _refused(
        "optim.max_grad_norm",
        "lamb clips the gradient's norm over all parameters, but each server has only its shard "
        "of the parameters",
        "set optim.max_grad_norm: off",
    ),
    ValidityRow(
        (("optim: onebit",), SERVER),
        "it compresses the messages between devices of a mesh, but workers send gradients only to "
        "servers",
        "use adamw or lamb, and strategy.codec: {type: sign}",
        ("optim", "type"),
    ),
    ValidityRow(
        (("optim: muon",), SERVER),
        "muon chooses the matrices that it orthogonalizes by the names of parameters, which "
        "servers do not know",
        "use adamw, lamb or lars, or strategy.type: synchronous",
        ("optim", "type"),
    ),
    ValidityRow(
        (("optim: muon",), ("deterministic: strict",)),
        "the rounding of muon's matrix products depends on the number of devices",
        "use adamw, sgd, lamb or lars, or set parallel.deterministic: null",
        ("optim", "type"),
    ),
    ValidityRow(
        (("an optimizer that evaluates other parameters",), SERVER),
        "this optimizer evaluates an average of parameters, but workers evaluate the parameters "
        "that they train",
        "use an optimizer without such an average, such as adamw, or set strategy.type: "
        "synchronous",
        ("optim",),
    ),
    ValidityRow(
        (("an optimizer that evaluates other parameters",), ("optim.rates",)),
        "the average that this optimizer evaluates is computed with a single learning rate",
        "leave optim.rates out",
        ("optim", "rates"),
    ),
    ValidityRow(
        (("state of the model besides parameters",), ("strategy.codec",)),
        "workers push running statistics with the gradients, and a codec would round the "
        "statistics",
        "set strategy.codec: null",
        ("strategy", "codec"),
    ),
    ValidityRow(
        (("state of the model besides parameters",), ("strategy.consistency.value_bound",)),
        "the bound applies to the gradient times the learning rate, but running statistics change "
        "without a learning rate",
        "leave strategy.consistency.value_bound out",
        ("strategy", "consistency", "value_bound"),
    ),
    ValidityRow(
        (("state of the model besides parameters",), ("strategy.consistency.delay_compensation",)),
        "it corrects gradients for the change of parameters since a worker read them, but running "
        "statistics have no gradients",
        "set strategy.consistency.delay_compensation: null",
        ("strategy", "consistency", "delay_compensation"),
    ),
    ValidityRow(
        (("strategy.codec",), ("strategy.consistency: elastic",)),
        "worker and server change by the same difference, and a compressed push would make the "
        "two diverge",
        "set strategy.codec: null",
        ("strategy", "codec"),
    ),
    ValidityRow(
        (("strategy.aggregation: racks",), ("strategy.consistency: elastic",)),
        "a rack pushes the mean of its workers' pushes, but elastic needs the sum of all pushes",
        "set strategy.aggregation.type: direct",
        ("strategy", "aggregation", "type"),
    ),
    ValidityRow(
        (("strategy.aggregation: racks",), ("strategy.consistency.value_bound",)),
        "value_bound limits the unacknowledged changes of each worker, but a rack combines the "
        "changes of its workers",
        "leave strategy.consistency.value_bound out, or set strategy.aggregation.type: direct",
        ("strategy", "aggregation", "type"),
    ),
    ValidityRow(
        (("strategy.aggregation: secure",), ("strategy.consistency besides bsp",)),
        "masks cancel only in the sum of a round, which no other type of consistency computes",
        "set strategy.consistency: {type: bsp}, or strategy.aggregation.type: direct",
        ("strategy", "consistency", "type"),
    ),
    ValidityRow(
        (("strategy.aggregation: secure",), ("strategy.consistency.backups",)),
        "each round waits for the keys of all workers, so that it cannot leave slow workers out",
        "set strategy.consistency.backups: 0 (workers that end are strategy.aggregation.dropouts)",
        ("strategy", "consistency", "backups"),
    ),
    ValidityRow(
        (("strategy.aggregation: secure",), ("strategy.codec",)),
        "servers add masked integers, and cannot decode pushes that they cannot read",
        "set strategy.codec: null, or strategy.aggregation.type: direct",
        ("strategy", "codec"),
    ),
    ValidityRow(
        (("strategy: lookahead",), ("optim.master_weights",)),
        "lookahead changes the parameters between steps, but the next step would restore the "
        "parameters from the copy of optim.master_weights",
        "leave either setting out",
        ("strategy",),
    ),
    ValidityRow(
        (("strategy: lookahead",), ("an optimizer that evaluates other parameters",)),
        "lookahead evaluates its slow weights, but this optimizer evaluates an average of its own",
        "leave either setting out",
        ("strategy",),
    ),
)
"""The refused combinations with a parameter server, with Muon, or with Lookahead."""
