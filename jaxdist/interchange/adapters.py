"""Low-rank adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

A file has lora_A `[rank, inputs]` and lora_B `[outputs, rank]` for each module. The name of a
module is the name of the base model's tensor in the table of the model's family, without `.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config.files import read_json
from jaxdist.errors import ConfigError, DataError, os_errors_as, some_of
from jaxdist.interchange import safetensors, source
from jaxdist.interchange.family import Row
from jaxdist.interchange.layouts import WeightLayout
from jaxdist.interchange.leaves import names_of
from jaxdist.interchange.tensors import Tensor
from jaxdist.models.tuning.lora import Adapter
from jaxdist.models.tuning.part import LoraConfig
from jaxdist.types import JsonObject

SETTINGS, TENSORS = source.ADAPTERS, "adapter_model.safetensors"
_PREFIX, _A, _B, _WEIGHT = "base_model.model.", ".lora_A.weight", ".lora_B.weight", ".weight"
_OFF: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "layers_to_transform": (None,),
    "trainable_token_indices": (None,),
}
"""The settings of PEFT that change what adapters compute, with the values that jaxdist supports."""
_NUMBERS = ("r", "lora_alpha", "lora_dropout")
_LISTED = 4


class Files(NamedTuple):
    """The settings and tensors of a folder's adapters; the tensors' elements are not read yet."""

    folder: Path
    settings: JsonObject
    tensors: Mapping[str, Tensor]


def open_adapters(folder: Path) -> Files:
    """Open a folder in PEFT's form.

    Raises:
      DataError: the folder has no adapters, its files are damaged, or jaxdist does not support the
        kind of the adapters.
    """
    if (folder / SETTINGS).is_file() and not (folder / TENSORS).is_file():
        source.refuse_pickles(folder, TENSORS, "PEFT")
    for name in (SETTINGS, TENSORS):
        if not (folder / name).is_file():
            raise DataError(
                f"{folder} does not hold adapters in PEFT's format: it lacks {name}. Give a folder "
                "that PEFT's save_pretrained has written"
            )
    with os_errors_as(DataError, f"{folder / SETTINGS} cannot be read", also=(ValueError,)):
        settings: Any = read_json(folder / SETTINGS)
    other = [
        f"{key} {settings[key]!r}"
        for key, off in _OFF.items()
        if key in settings and settings[key] not in off
    ]
    if other:
        raise DataError(
            f"{folder / SETTINGS}: {', '.join(other)} is not supported, because each of jaxdist's "
            "adapters is a product of two matrices, with the same rank for every kernel. Merge "
            "these adapters with PEFT (merge_and_unload), and import the model"
        )
    return Files(folder, settings, safetensors.read_header(folder / TENSORS))


def settings_of(files: Files, rows: Mapping[str, Row]) -> JsonObject:
    """Return the section `model.lora` for a folder's adapters.

    Args:
      rows: the rows of the base model's table, by parameter.

    Raises:
      ConfigError: the base model does not have a module of the adapters.
      DataError: the folder's settings lack the rank or alpha, or have a string instead of a number.
    """
    own = {row.tensor.removesuffix(_WEIGHT): name for name, row in rows.items()}
    found, unknown = set[str](), list[str]()
    for name in files.tensors:
        module = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        parts = ["{layer}" if part.isdecimal() else part for part in module.split(".")]
        kernel = own.get(".".join(parts))
        if kernel is None:
            unknown.append(name)
        else:
            found.add(kernel)
    if unknown:
        raise ConfigError(
            f"{files.folder} has adapters of another base model: {some_of(unknown, _LISTED)} "
            "belong to no kernel of this model. Give the run of the adapters' base model with "
            "--base"
        )
    given: Any = files.settings
    lacking = [key for key in ("r", "lora_alpha") if given.get(key) is None]
    if lacking:
        raise DataError(
            f"{files.folder / SETTINGS} lacks {', '.join(lacking)}: download the adapters' own "
            f"{SETTINGS}"
        )
    odd = [key for key in _NUMBERS if type(given.get(key) or 0) not in (int, float)]
    if odd:
        listed = ", ".join(f"{key} {given[key]!r}" for key in odd)
        raise DataError(
            f"{files.folder / SETTINGS}: {listed} is not a number; write it without quotes"
        )
    return {
        "rank": given["r"],
        "alpha": float(given["lora_alpha"]),
        "targets": sorted(found),
        "rslora": bool(given.get("use_rslora")),
        "dropout": float(given.get("lora_dropout") or 0.0),
    }


def read_adapters(
    files: Files, adapters: Sequence[Adapter], rows: Mapping[str, Row]
) -> dict[str, np.ndarray]:
    """Return the parameters of adapters by name, in float32.

    Args:
      rows: the rows of the base model's table, by parameter.

    Raises:
      ConfigError: tensors are missing, their shapes do not fit the base model's kernels, or they
        belong to layers that the base model does not have.
    """
    values: dict[str, np.ndarray] = {}
    problems: list[str] = []
    left = set(files.tensors)
    for adapter in adapters:
        for name, shape, end in zip(adapter.names, adapter.shapes, (_A, _B), strict=True):
            layers = []
            for module in _modules(adapter, rows[adapter.name]):
                tensor = files.tensors.get(f"{_PREFIX}{module}{end}")
                left.discard(f"{_PREFIX}{module}{end}")
                wanted = _file_shape(adapter, end)
                if tensor is None or tensor.shape != wanted:
                    what = "missing" if tensor is None else f"{list(tensor.shape)}"
                    problems.append(f"{module}{end} is {what}, where {adapter.name} takes {wanted}")
                    continue
                layers.append(np.asarray(tensor.open(), np.float32).T)
            if not problems:
                values[name] = np.stack(layers).reshape(shape)
    problems += [f"{name.removeprefix(_PREFIX)} belongs to no layer" for name in sorted(left)]
    if problems:
        raise ConfigError(
            f"{files.folder} has adapters of another base model: "
            f"{some_of(problems, _LISTED, '; ')}. Give the run of the adapters' base model with "
            "--base"
        )
    return values


def write_adapters(
    out: Path,
    config: LoraConfig,
    adapters: Sequence[Adapter],
    rows: Mapping[str, Row],
    values: Mapping[str, np.ndarray],
    *,
    base: str,
) -> JsonObject:
    """Write adapters to a folder in PEFT's form, and return the settings in adapter_config.json.

    Args:
      config: the settings of the adapters.
      rows: the rows of the base model's table, by parameter.
      values: the parameters of the adapters, by name.
      base: the name or path of the base model.

    Raises:
      ConfigError: PEFT cannot hold adapters of this kind, for example of an embedding or of a part
        of a module.
      OSError: the folder cannot be written.
    """
    odd = [one.name for one in adapters if rows[one.name].part is not None or one.layers is None]
    if odd:
        raise ConfigError(
            f"PEFT cannot hold the adapters of {some_of(odd, _LISTED)}, which is an embedding or a "
            "part of a module: export the merged model (--to hf)"
        )
    arrays: dict[str, np.ndarray] = {}
    modules: set[str] = set()
    for adapter in adapters:
        for name, shape, end in zip(adapter.names, adapter.shapes, (_A, _B), strict=True):
            layers = values[name].reshape(-1, *shape[len(shape) - len(_own(adapter, end)) :])
            for module, layer in zip(_modules(adapter, rows[adapter.name]), layers, strict=True):
                modules.add(module.rpartition(".")[2])
                file_shape = _file_shape(adapter, end)
                array = layer.reshape(file_shape[::-1]).T
                arrays[f"{_PREFIX}{module}{end}"] = np.ascontiguousarray(array, np.float32)
    settings: JsonObject = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": any(_first_in(one, rows[one.name]) for one in adapters),
        "inference_mode": True,
    }
    entries = [(name, array.shape, array.dtype) for name, array in sorted(arrays.items())]
    safetensors.write(out / TENSORS, entries, lambda name: arrays[name])
    return settings


def _modules(adapter: Adapter, row: Row) -> list[str]:
    return [name.removesuffix(_WEIGHT) for name in names_of(row.tensor, adapter.layers)]


def _own(adapter: Adapter, end: str) -> tuple[int, ...]:
    """Return the shape of A or B for a single layer, as `end` selects."""
    ins, outs = adapter.shape[: adapter.inputs], adapter.shape[adapter.inputs :]
    return (*ins, adapter.rank) if end == _A else (adapter.rank, *outs)


def _file_shape(adapter: Adapter, end: str) -> tuple[int, int]:
    own = _own(adapter, end)
    if end == _A:
        return adapter.rank, int(np.prod(own[:-1]))
    return int(np.prod(own[1:])), adapter.rank


def _first_in(adapter: Adapter, row: Row) -> bool:
    """Return whether the input is the first dim of a kernel's tensor (transformers' Conv1D)."""
    layout = WeightLayout(row.layout, row.part)
    inputs = [name for dim in layout.own[: adapter.inputs] for name in dim]
    return list(layout.file[0]) == inputs
