"""The parts of a training state that evaluation needs, and the parts that checkpoints hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.parts import check_patterns, taken
from jaxdist.errors import CheckpointError, ConfigError, blamed
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names
from jaxdist.types import PyTree


def evaluated_parts(program: Program) -> tuple[str, ...]:
    """Return the parts of a state that evaluation and generation need."""
    carried = ("opt_state",) * (program.optimizer.eval_params is not None)
    # If the strategy has slow weights, they are evaluated after their first move. The step number
    # shows whether they have moved.
    return ("params", "buffers", *carried, *("outer", "step") * (program.outer is not None))


def only(tree: PyTree, names: Collection[str]) -> PyTree:
    """Return the tree in which each leaf whose name is not among `names` is replaced by None."""
    kept = [leaf if name in names else None for name, leaf in flatten_with_names(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), kept)


def part_names(program: Program, patterns: Sequence[str]) -> list[str]:
    """Return the names of the leaves of a program's state that the patterns select.

    Raises:
      ConfigError: a pattern matches nothing, or the patterns together select nothing.
    """
    names = [name for name, _ in flatten_with_names(program.own_shapes)]
    try:
        check_patterns(patterns, names, of="this run's state")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return taken(patterns, names)


def check_parts(config: CheckpointConfig, strategy: str, program: Program) -> tuple[str, ...]:
    """Return notices about the parts that checkpoints hold, and the parts that a run starts from.

    Args:
      config: the settings of checkpoints, with patterns that select parts.
      strategy: the type of the strategy.

    Raises:
      ConfigError: a pattern selects no part of the state, or the config selects parts although
        the strategy's servers save the state.
    """
    given = {"parts": config.parts, "begin_with": config.begin_with and config.begin_with.parts}
    for key, patterns in given.items():
        if patterns is None:
            continue
        with blamed(key):
            if strategy == "parameter_server":
                raise ConfigError(
                    "parameter servers begin with parameters that the seed determines, and save "
                    "the state in separate files: leave the setting out, or use another "
                    "strategy.type"
                )
            part_names(program, patterns)
    if config.parts is None:
        return ()
    _check_evaluated(config.parts, program)
    listed = ", ".join(config.parts)
    return (
        f"checkpoint.parts: checkpoints hold only {listed}, so --resume is refused; leave "
        "parts out if the run may have to be resumed",
    )


def _check_evaluated(parts: Sequence[str], program: Program) -> None:
    """Refuse parts from which the parameters to evaluate cannot be derived."""
    names = [name for name, _ in flatten_with_names(program.own_shapes)]
    held = set(taken(parts, names))
    for part in evaluated_parts(program)[2:]:
        if not held.issuperset(taken((part,), names)):
            what = "optim" if part == "opt_state" else "strategy"
            raise ConfigError(
                f"parts {', '.join(parts)} do not include {part}, from which {what} computes the "
                f"parameters to evaluate: add {part}",
                setting=("parts",),
            )
