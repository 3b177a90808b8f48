"""The rows of the table of validity about parameter servers, Muon, and Lookahead's slow weights."""

from __future__ import annotations

from jaxdist.validity.row import COMPRESSION, FROZEN, SCOPES, ZERO_STAGES, ValidityRow

SERVER = ("strategy: parameter_server",)
_NORM = "it needs the norm over all parameters, but each server has only its own"


def _refused(path: str, why: str, instead: str) -> ValidityRow:
    return ValidityRow(((path,), SERVER), why, instead, tuple(path.split(".")))


SERVERS: tuple[ValidityRow, ...] = (
    ValidityRow(
        (COMPRESSION, SERVER),
        "gradients go to servers, and devices of different workers exchange nothing",
        "set parallel.compression: null, and see strategy.codec",
        ("parallel", "compression"),
    ),
    ValidityRow(
        ((*ZERO_STAGES, *SCOPES, "parallel.zero.secondary", "parallel.zero"), SERVER),
        "gradients go to servers, which hold the optimizer's state",
        "leave parallel.zero out, and see strategy.servers",
        ("parallel", "zero"),
    ),
    ValidityRow(
        (("deterministic: strict",), SERVER),
        "servers add gradients in the order of workers, not by logical shard",
        "set parallel.deterministic: null (the order of what came is kept, and `jaxdist replay` "
        "has its bits)",
        ("parallel", "deterministic"),
    ),
    ValidityRow(
        (("a mesh axis besides data and tensor", "stage (a pipeline)"), SERVER),
        "the mesh belongs to one worker, with axes data and tensor",
        "leave out the axis",
        ("mesh",),
    ),
    *(
        _refused(
            path,
            ("it changes the batch within a run, but workers share no step at which to change it"),
            "leave it out",
        )
        for path in ("train.batch_ramp", "train.phases")
    ),
    *(
        _refused(path, "servers hold and update all parameters", "train all parameters")
        for path in FROZEN
    ),
    _refused(
        "train.check_replicas",
        "it compares devices that take every step together, but workers hold different parameters",
        "leave it out",
    ),
    _refused(
        "optim.clip_norm", _NORM, "set null, or use lamb or lars, whose norms are of one tensor"
    ),
    _refused(
        "optim.skip_spikes",
        _NORM,
        "set null; servers drop pushes that hold a NaN or an infinity without it",
    ),
    _refused(
        "optim.loss_scale",
        "it would have to be the same on all workers",
        "set null, and train in bfloat16 or float32",
    ),
    _refused("optim.rates", "servers have a single rate for their parameters", "leave it out"),
    _refused("optim.master_weights", "servers hold float32 parameters", "set null"),
    _refused(
        "optim.skip_nonfinite",
        "it has no effect, as servers drop pushes that hold a NaN or an infinity, and count them",
        "set false",
    ),
    _refused(
        "optim.max_grad_norm",
        "lamb clips the norm over all parameters to it, but each server has only its own",
        "set max_grad_norm: off",
    ),
    ValidityRow(
        (("optim: onebit",), SERVER),
        "it compresses what devices of one mesh exchange",
        "use adamw or lamb, and strategy.codec: {type: sign}",
        ("optim", "type"),
    ),
    ValidityRow(
        (("optim: muon",), SERVER),
        "which parameters are matrices depends on their names, and a server's rule has only dims",
        "use adamw, lamb or lars, or strategy.type: synchronous",
        ("optim", "type"),
    ),
    ValidityRow(
        (("optim: muon",), ("deterministic: strict",)),
        "the products of its matrices would have other bits on another number of devices",
        "use adamw, sgd, lamb or lars, or set parallel.deterministic: null",
        ("optim", "type"),
    ),
    ValidityRow(
        (("an optimizer that evaluates other parameters",), SERVER),
        "workers evaluate the parameters that they train",
        "use another optimizer, or strategy.type: synchronous",
        ("optim",),
    ),
    ValidityRow(
        (("an optimizer that evaluates other parameters",), ("optim.rates",)),
        "the parameters that it evaluates follow from updates at a single rate",
        "leave optim.rates out",
        ("optim", "rates"),
    ),
    ValidityRow(
        (("state of the model besides parameters",), ("strategy.codec",)),
        "running statistics are pushed with the gradients, and a codec would distort them",
        "set strategy.codec: null",
        ("strategy", "codec"),
    ),
    ValidityRow(
        (("state of the model besides parameters",), ("strategy.consistency.value_bound",)),
        "it bounds gradients times the learning rate, and running statistics move without one",
        "leave strategy.consistency.value_bound out",
        ("strategy", "consistency", "value_bound"),
    ),
    ValidityRow(
        (("state of the model besides parameters",), ("strategy.consistency.delay_compensation",)),
        "it corrects gradients by the change of parameters, and running statistics have none",
        "set strategy.consistency.delay_compensation: null",
        ("strategy", "consistency", "delay_compensation"),
    ),
    ValidityRow(
        (("strategy.codec",), ("strategy.consistency: elastic",)),
        "a worker pushes the difference that it moves by, and a push that leaves something out "
        "makes the two diverge",
        "set strategy.codec: null",
        ("strategy", "codec"),
    ),
    ValidityRow(
        (("strategy.aggregation: racks",), ("strategy.consistency: elastic",)),
        "a rack sends a mean, and elastic adds up what workers send",
        "set strategy.aggregation.type: direct",
        ("strategy", "aggregation", "type"),
    ),
    ValidityRow(
        (("strategy.aggregation: racks",), ("strategy.consistency.value_bound",)),
        "value_bound limits the outstanding changes of each worker, which racks combine",
        "leave strategy.consistency.value_bound out, or set strategy.aggregation.type: direct",
        ("strategy", "aggregation", "type"),
    ),
    ValidityRow(
        (("strategy.aggregation: secure",), ("strategy.consistency besides bsp",)),
        "masks cancel only in the sum of a round, and other models apply pushes one by one",
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
        "it moves the parameters between steps, but the next step would restore them from the "
        "copy of optim.master_weights",
        "drop one of the two",
        ("strategy",),
    ),
    ValidityRow(
        (("strategy: lookahead",), ("an optimizer that evaluates other parameters",)),
        "evaluation uses the strategy's slow weights, and optim has an average of its own",
        "drop one of the two",
        ("strategy",),
    ),
)
"""The refused combinations with a parameter server, with Muon, or with Lookahead."""
