"""The options of XLA's compiler that a config sets (`parallel.xla`): a preset and single options.

An option may have no effect: `jaxdist audit CONFIG --topology T --options` compiles with and
without each option and reports whether the program changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.mesh import Device
from jaxdist.runtime.hardware import find_device

OptionValue = bool | int | float | str
Options = Mapping[str, OptionValue]
PresetName = Literal["default", "none", "overlap", "collective_matmul"]

PLATFORM = "tpu"
"""The platform that every preset except `default` and `none` needs."""
_FUSION = "xla_tpu_enable_async_collective_fusion"
# Without a high threshold XLA gathers an operand in parts, between small matmuls. Gathering whole
# operands is predicted to be faster in every step of `jaxdist bench tpu`, by up to a sixth.
_WHOLE: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""The name of the option that limits the vector memory of a fusion or kernel, in KiB. With libtpu's
default limit, large matmuls read their operands more often. `jaxdist/cost/products.json` has the
fractions of the peak that matmuls reach with the default limit and with the limit of the presets.
"""
_SCOPED: Options = {SCOPED_VMEM: 65536}
PRESETS: Mapping[PresetName, Options] = {
    "default": {**_WHOLE, **_SCOPED},
    "none": {},
    "overlap": {
        **_WHOLE,
        **_SCOPED,
        "xla_tpu_enable_latency_hiding_scheduler": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
        "xla_enable_async_collective_permute": True,
        _FUSION: True,
        f"{_FUSION}_fuse_all_gather": True,
        f"{_FUSION}_multiple_steps": True,
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
    },
    "collective_matmul": {
        "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
        "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
    },
}
"""The options of each preset. `overlap` has the options that MaxText sets for v5e and v5p. Current
versions of libtpu set most of these options by default, so the preset may change no program."""
ONLY_ON: Mapping[str, tuple[str, ...]] = {
    f"{_FUSION}_fuse_all_gather": ("v5e",),
    SCOPED_VMEM: ("v5e", "v5p", "v6e", "tpu7x"),
}
"""The devices on which a preset sets an option; all TPUs get the options that are not listed here.
On v5p, libtpu 0.0.52 refuses to compile a program that the first option would change. On v4,
libtpu's default limit is already all of the vector memory."""
PASSES = "xla_disable_hlo_passes"
"""The name of an option whose value is a list of passes, separated by commas."""


class XlaConfig(Config):
    """Options for the compiler of the train step and of the evaluation."""

    preset: PresetName = "default"
    """The set of options for TPUs. `default` gathers whole operands of matmuls. `overlap` also runs
    collectives during computation. `collective_matmul` lets XLA cut a matmul into parts that run
    during the collective of its operand or result; a tensor axis has such collectives with
    `residual_seq: tensor` (compare `sharding.collective_matmul`). `none` sets no options."""
    options: dict[str, OptionValue] = Field(default_factory=dict)
    """The options to set in addition to the preset, by XLA's names without leading dashes. An
    option that is set here overrides the same option of the preset."""


def compiler_options(config: XlaConfig, devices: Sequence[Device]) -> dict[str, OptionValue]:
    """Return the options that a config sets, and check that the devices' compiler accepts them.

    The check compiles a tiny program with the options. If the compiler refuses the `default`
    preset, the result lacks the preset's options. Without options nothing is compiled.

    Raises:
      ConfigError: the preset is for other devices, or the compiler of these devices refuses an
        option or its value.
    """
    device = devices[0]
    if config.preset not in ("default", "none") and device.platform != PLATFORM:
        raise ConfigError(
            f"preset {config.preset} is for TPUs, but the mesh has {device.platform} devices: use "
            "preset: default, and set XLA's options in options"
        )
    preset = preset_options(config.preset, device)
    if config.preset == "default" and options_refusal(preset, device) is not None:
        preset = {}  # The user did not ask for the default preset, so it must not fail a run.
    found = {**preset, **config.options}
    problem = options_refusal(found, device)
    if problem is not None:
        raise ConfigError(_told(found, device) or problem)
    return found


def preset_options(preset: PresetName, device: Device) -> dict[str, OptionValue]:
    """Return the options that a preset sets on a device, or {} if the device is not a TPU."""
    if device.platform != PLATFORM:
        return {}
    known = find_device(device.device_kind)
    name = known.name if known else ""
    return {
        option: value
        for option, value in PRESETS[preset].items()
        if name in ONLY_ON.get(option, (name,))
    }


def merged_options(options: Options, more: Options) -> dict[str, OptionValue] | None:
    """Merge two sets of options, or return None if both are empty.

    The result is an argument of `jax.jit`, which expects None instead of an empty set.

    An option in `more` replaces the same option in `options`, but two lists of passes are joined.

    >>> merged_options({PASSES: "a"}, {PASSES: "b", "xla_x": True})
    {'xla_disable_hlo_passes': 'a,b', 'xla_x': True}
    """
    found = {**options, **more}
    if PASSES in options and PASSES in more:
        found[PASSES] = f"{options[PASSES]},{more[PASSES]}"
    return found or None


def options_refusal(options: Options, device: Device) -> str | None:
    """Return the compiler's error about the options, or None if the compiler accepts them."""
    if not options:
        return None
    shape = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative, compiler_options=dict(options)).lower(shape).compile()
    except (jax.errors.JaxRuntimeError, TypeError) as error:
        return str(error)
    return None


def _told(options: Options, device: Device) -> str | None:
    """Compile with each option alone, and describe the first option that the compiler refuses.

    Returns:
      A sentence with the compiler's error, or None if the compiler accepts each option alone.
    """
    known = {name for preset in PRESETS.values() for name in preset}
    for name, value in options.items():
        problem = options_refusal({name: value}, device)
        if problem is None:
            continue
        near = f"; {did_you_mean(name, sorted(known))}" if name not in known else ""
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"the compiler for {device.device_kind} refuses {name}: {shown} ({problem}){near}"
    return None
