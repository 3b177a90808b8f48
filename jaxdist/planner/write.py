"""Functions that put the settings of a plan into a config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from jaxdist.config import Document, plain_yaml, validate
from jaxdist.errors import RunError, os_errors_as
from jaxdist.experiment import ExperimentConfig
from jaxdist.planner.plan import Plan

KEPT_SETTINGS = {"parallel": ("xla", "batch_norm"), "sharding": ("params",)}
"""The settings that are kept from the config, by section. They describe the model or the compiler.
A plan replaces all other settings of these sections."""


def planned(values: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the values of a config with the settings of a plan.

    The sections `mesh`, `parallel` and `sharding` come from the plan, except for the settings in
    `KEPT_SETTINGS`.

    >>> planned({"model": {"type": "gpt"}}, Plan(data=8))["mesh"]
    {'data': 8}
    """
    made = copy.deepcopy(values)
    for path, value in plan.settings().items():
        section, _, key = path.partition(".")
        if key:
            made.setdefault(section, {})[key] = value
        else:
            old, names = made.get(section), KEPT_SETTINGS.get(section, ())
            kept = {n: old[n] for n in names if n in old} if isinstance(old, dict) else {}
            made[section] = {**kept, **value}
    if not made["sharding"]:
        del made["sharding"]
    model = made.get("model", {})
    if model.get("mlp_type") == "gelu" and isinstance(model.get("remat"), dict):
        # The blocks of this model have no gate, and `remat` refuses names that a model does not
        # have.
        del model["remat"]["mlp_gate"]
    return made


def write_config(document: Document, plan: Plan, path: Path) -> None:
    """Validate a config with the settings of a plan, and write the config to a file.

    Raises:
      ConfigError: the config does not accept the plan.
      RunError: the file cannot be written.
    """
    values = planned(document.values, plan)
    validate(Document(values), ExperimentConfig)
    head = f"# command:  jaxdist train {path}\n# plan:     {plan.words()}\n"
    with os_errors_as(RunError, f"cannot write the plan to {path}", "choose another file"):
        path.write_text(head + plain_yaml(values), encoding="utf-8")
