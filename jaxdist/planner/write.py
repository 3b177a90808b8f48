"""Functions that put the settings of a plan into a config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from jaxdist.config import Document, plain_yaml, validate
from jaxdist.errors import RunError, os_errors_as
from jaxdist.experiment import ExperimentConfig
from jaxdist.planner.plan import Plan
from jaxdist.types import Json

KEPT_OF_PARALLEL = ("xla", "batch_norm")
"""The settings of `parallel` that are kept from the config. A plan replaces all other settings of
this section."""


def planned(values: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the values of a config with the settings of a plan.

    The sections `mesh`, `parallel` and `sharding` come from the plan, except for the settings in
    `KEPT_OF_PARALLEL` and the names of parameters' dims.

    >>> planned({"model": {"type": "gpt"}}, Plan(data=8))["mesh"]
    {'data': 8}
    """
    made = copy.deepcopy(values)
    for path, value in plan.settings().items():
        section, _, key = path.partition(".")
        if key:
            made.setdefault(section, {})[key] = value
        elif section == "parallel":
            made[section] = _kept(made.get(section)) | value  # pyright: ignore[reportOperatorIssue]
        elif section == "sharding":
            made[section] = _named(made.get(section)) | value  # pyright: ignore[reportOperatorIssue]
        else:
            made[section] = value
    if not made["sharding"]:
        del made["sharding"]
    model = made.get("model", {})
    if model.get("mlp_type") == "gelu" and isinstance(model.get("remat"), dict):
        # The blocks of this model have no gate, and `remat` refuses names that a model does not
        # have.
        del model["remat"]["mlp_gate"]
    return made


def _named(sharding: Json) -> dict[str, Json]:
    """Return the part of a section `sharding` that gives names to the dims of parameters.

    This part describes the model, and no plan changes it.
    """
    if not isinstance(sharding, dict) or "params" not in sharding:
        return {}
    return {"params": sharding["params"]}


def _kept(parallel: Json) -> dict[str, Json]:
    if not isinstance(parallel, dict):
        return {}
    return {name: parallel[name] for name in KEPT_OF_PARALLEL if name in parallel}


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
