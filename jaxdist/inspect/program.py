"""The train step of an experiment, compiled ahead of time, with its actual and its ideal cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdist.cost.step_time import StepTime, can_predict, step_time
from jaxdist.errors import RunError
from jaxdist.experiment import Experiment, build, load
from jaxdist.experiment.flops import step_flops
from jaxdist.hlo import (
    Ledger,
    compile_with_text,
    is_too_large,
    ledger,
    program_text,
    refused_bytes,
)
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.ledger import device_order
from jaxdist.hlo.lockstep import Lockstep
from jaxdist.hlo.parse import Module, parse
from jaxdist.inspect.ideal import bound_notes, gradient_bound, masked_flops
from jaxdist.inspect.rows import show_bytes
from jaxdist.inspect.servers import WorkerPart, worker_part
from jaxdist.inspect.text import program_digest
from jaxdist.mesh import Device
from jaxdist.parallel.pipeline.executor.branches import lockstep
from jaxdist.parallel.pipeline.model.pipeline import Pipeline
from jaxdist.run.memory import bytes_per_device, copied_bytes, device_memory_bytes
from jaxdist.runtime.hardware import find_device
from jaxdist.runtime.topology import topology_devices
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.trees import tree_size

UNKNOWN_OPTION = "No such compile option"
"""The words with which jax refuses a compiler option that this version of libtpu does not have."""


@dataclass(frozen=True)
class Inspection:
    """The facts about a train step before it runs.

    Bytes are per device. `model_flops`, `masked_flops` and `update_flops` are for all devices
    together.

    Attributes:
      config: the path of the configuration file, with the settings that override it.
      model: the model's type and number of parameters, in which a tied head counts once.
      step: the amount of data in a step, as text.
      device_kind: the kind of device that the program is compiled for.
      ledger: the ledger of the compiled program.
      program_sha256: the digest of the program without names and order, which is equal for equal
        programs.
      model_flops: the FLOPs of the step, without recomputation (see `jaxdist.experiment.flops`).
      gradient_axes: the mesh axes that share the batch.
      gradient_bound_bytes: the least bytes that a device must send along `gradient_axes`.
      arguments: the bytes of each kind of argument.
      memory_bytes: the memory of the device, or None if it is unknown.
      compile_seconds: the time of XLA's compilation, without tracing.
      bound_notes: the assumption behind `gradient_bound_bytes`, and the settings with which devices
        send more bytes.
      step_time: the predicted time of the step, or None if the compiler writes no estimates. Only
        the compiler for TPUs writes estimates.
      masked_flops: the part of `model_flops` that attention's mask discards.
      tokens: the number of tokens in a step, or of examples if an example has no tokens.
      estimate_seconds: the wall time for reading the program and predicting the time of the step.
      worker: the worker whose step was compiled, or None without parameter servers.
      update_flops: the FLOPs of the optimizer's update in a step. The FLOPs are 0 unless the
        optimizer multiplies matrices, as Muon does.
      host_state_bytes: the bytes of the optimizer's state in the host's memory. A step copies this
        state to the device and back.
      host_parameter_bytes: the bytes of the parameters in the host's memory.
      host_parameter_copies: the bytes of these parameters that a step copies to the device and
        back.
    """

    config: str
    model: str
    step: str
    device_kind: str
    ledger: Ledger
    program_sha256: str
    model_flops: float
    gradient_axes: tuple[str, ...]
    gradient_bound_bytes: float
    arguments: Mapping[str, int]
    memory_bytes: int | None
    compile_seconds: float
    bound_notes: tuple[str, ...]
    step_time: StepTime | None = None
    masked_flops: float = 0.0
    tokens: int = 0
    estimate_seconds: float = 0.0
    worker: WorkerPart | None = None
    update_flops: float = 0.0
    host_state_bytes: int = 0
    host_parameter_bytes: int = 0
    host_parameter_copies: int = 0

    @property
    def host_copied_bytes(self) -> int:
        """The number of bytes that a step copies between the memories of host and device."""
        return 2 * self.host_state_bytes + self.host_parameter_copies

    @property
    def ideal_flops(self) -> float:
        """The FLOPs of the model and the optimizer divided by the number of devices."""
        return (self.model_flops + self.update_flops) / self.ledger.devices

    @property
    def host_seconds(self) -> float | None:
        """The seconds of the copies from the host's memory and back, one after another.

        The result is None if the bandwidth of the host's memory is unknown.
        """
        known = find_device(self.device_kind)
        rate = known.host_bytes_per_second if known else None
        return self.host_copied_bytes / rate if rate else None

    def mfu(self, *, masked: bool) -> float | None:
        """Return the model FLOPs utilization: the model's FLOPs as a fraction of the devices' peak.

        The result is None if the time of the step or the peak of the device is unknown.

        Args:
          masked: whether products that attention's mask discards count (as in PaLM, arXiv
            2204.02311, appendix B). If False, causal attention counts half.
        """
        known = find_device(self.device_kind)
        if self.step_time is None or known is None or not self.step_time.seconds:
            return None
        flops = self.model_flops - (0.0 if masked else self.masked_flops)
        peak = known.flops_per_second["bfloat16"] * self.ledger.devices
        return flops / (peak * self.step_time.seconds)


@dataclass(frozen=True)
class InspectedExperiment:
    """An experiment to inspect, which is checked and traced but not compiled.

    Attributes:
      name: the path of the configuration file, with the settings that override it.
      experiment: the experiment, built for `devices`.
      devices: the devices to compile for.
    """

    name: str
    experiment: Experiment
    devices: Sequence[Device]

    @property
    def device_kind(self) -> str:
        """The kind of the devices, such as "TPU v5 lite", as jax names it."""
        return self.devices[0].device_kind


def open_subject(
    path: Path, overrides: Sequence[str], on: str | Sequence[Device] | None = None
) -> InspectedExperiment:
    """Return the experiment of a config, built for the given devices.

    Args:
      path: the configuration file, to which `overrides` are applied.
      on: the devices to compile for, or the topology of TPUs, such as `v5e:2x4`. None means the
        devices of jax, or the first devices of jax up to the number of fake devices in the config.

    Raises:
      JaxdistError: the configuration or the topology cannot be read, or the configuration does not
        fit the devices.
    """
    given = topology_devices(on) if isinstance(on, str) else on
    document, config = load(path, overrides)
    chosen = list(jax.devices()[: config.mesh.fake_devices] if given is None else given)
    name = " ".join([str(path), *overrides])
    return InspectedExperiment(name, build(config, document, devices=chosen), chosen)


def inspect_step(
    subject: InspectedExperiment, options: Mapping[str, bool | int] | None = None
) -> Inspection:
    """Compile the train step of an experiment, and return the facts about the step.

    Neither a training state nor the devices are needed.

    Args:
      subject: the experiment.
      options: compiler options for TPUs, in addition to the options of the experiment, or None
        without such options. A compiler that does not know an option gets none of them.

    Raises:
      RunError: the program is too large for the device.
    """
    experiment, config = subject.experiment, subject.experiment.config
    program, mesh, worker = experiment.program, experiment.layout.mesh, worker_part(experiment)
    state, compiled_step, share = program.state_shapes, program.train, 1.0
    if worker is not None:
        program, state = worker.program, worker.state
        compiled_step, share = worker.compiled, worker.share
    units = int(experiment.units_per_step * share)
    arguments = _argument_bytes(state, program.batch)
    lowered = compiled_step.lower(state, program.batch)
    begun = time.perf_counter()
    compiled, text = compile_program(subject, lowered, arguments, options)
    seconds = time.perf_counter() - begun
    flops = step_flops(config, subject.devices[0])
    axes, bound_bytes = gradient_bound(experiment) or ((), 0.0)
    begun = time.perf_counter()
    module = parse(text)
    timed = predicted_step_time(subject, compiled, module)
    estimate_seconds = time.perf_counter() - begun
    return Inspection(
        config=subject.name,
        model=f"{config.model.type}, {tree_size(program.model.params):,} parameters",
        step=_step(experiment, worker, units),
        device_kind=subject.device_kind,
        ledger=ledger(compiled, mesh, module),
        program_sha256=program_digest(text, lowered.as_text()),
        model_flops=flops.model * share,
        # With parameter servers the update is not part of the worker's program.
        update_flops=0.0 if worker else flops.update,
        gradient_axes=axes,
        gradient_bound_bytes=bound_bytes,
        arguments=arguments,
        host_state_bytes=bytes_per_device(state.opt_state, host=True),
        host_parameter_bytes=bytes_per_device(state.params, host=True),
        host_parameter_copies=copied_bytes(program),
        memory_bytes=_memory_bytes(subject.devices),
        compile_seconds=seconds,
        bound_notes=bound_notes(experiment),
        step_time=timed,
        masked_flops=masked_flops(experiment) * share,
        tokens=units,
        estimate_seconds=estimate_seconds,
        worker=worker,
    )


def _step(experiment: Experiment, worker: WorkerPart | None, units: int) -> str:
    if worker is None:
        return f"{units:,} {experiment.unit}"
    return f"{units:,} of {experiment.units_per_step:,} {experiment.unit}: one worker's part"


def compile_program(
    subject: InspectedExperiment,
    lowered: jax.stages.Lowered,
    arguments: Mapping[str, int],
    options: Mapping[str, bool | int] | None = None,
) -> tuple[jax.stages.Compiled, str]:
    """Compile a program, and return the compiled program and its text.

    Args:
      subject: the experiment whose program is compiled.
      lowered: the program.
      arguments: the bytes of each kind of argument, for the message of a refusal.
      options: compiler options for TPUs, or None without such options.

    Raises:
      RunError: the program is too large for the device.
    """
    try:
        # XLA cannot print every compiled program of a TPU, but dumps its text during compilation.
        if subject.devices[0].platform == "tpu":
            return compile_with_text(lowered, options)
        compiled = lowered.compile()
        return compiled, program_text(compiled)
    except jax.errors.JaxRuntimeError as error:
        if options and UNKNOWN_OPTION in str(error):
            return compile_program(subject, lowered, arguments)
        if not is_too_large(str(error)):
            raise
        raise _refusal(subject, arguments, str(error)) from error


def predicted_step_time(
    subject: InspectedExperiment, compiled: jax.stages.Compiled, module: Module
) -> StepTime | None:
    """Return the predicted time of a step, or None if the compiler writes no estimates.

    Args:
      subject: the experiment.
      compiled: the compiled program.
      module: the parsed text of the compiled program.
    """
    if not can_predict(subject.devices):
        return None
    mesh = subject.experiment.layout.mesh
    order = device_order(compiled, mesh) or tuple(range(module.devices))
    layout, ticks = MeshLayout(dict(mesh.shape), order), branch_ticks(subject.experiment.program)
    return step_time(module, layout, list(mesh.devices.flat), ticks)


def branch_ticks(program: Program) -> Lockstep | None:
    """Return the branches that the stages of a pipeline take in each tick.

    The result is None for a program without a pipeline.
    """
    compute = program.compute
    if not isinstance(compute, Pipeline):
        return None
    return lockstep(compute.ticks, compute.cut.layers)


def _argument_bytes(state: TrainState, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
    return {
        "parameters": bytes_per_device(state.params),
        "optimizer state": bytes_per_device(state.opt_state),
        "buffers": bytes_per_device(state.buffers),
        "batch": bytes_per_device(batch),
    }


def _memory_bytes(devices: Sequence[Device]) -> int | None:
    device = devices[0]
    if device.platform == "tpu":
        known = find_device(device.device_kind)
        return known.memory_bytes if known else None
    return device_memory_bytes(device, len(devices))


def _refusal(subject: InspectedExperiment, arguments: Mapping[str, int], text: str) -> RunError:
    """Return the error for a program that XLA refuses because it is too large for the device.

    Args:
      subject: the experiment.
      arguments: the bytes of each kind of argument.
      text: the message of XLA.
    """
    name, kind = subject.name, subject.device_kind
    sizes = refused_bytes(text)
    if sizes is None:
        return RunError(f"{name}: the train step does not fit the memory of a {kind}: {text}")
    needed, limit = map(show_bytes, sizes)
    parts = ", ".join(f"{part} {show_bytes(size)}" for part, size in arguments.items() if size)
    return RunError(
        f"{name}: the train step needs {needed} on each device, but a {kind} has {limit} for a "
        f"program. The step needs {parts}; the rest is for activations and gradients. Use more "
        "train.microbatches, a smaller train.batch_size, model.remat: full where the model has "
        "it, or more devices along mesh axis tensor"
    )
