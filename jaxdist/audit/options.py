"""`jaxdist audit --options`: the effect of each compiler option on the train step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console
from rich.text import Text

from jaxdist.audit.step import Costs, cost_changes, costs_of, facts_of
from jaxdist.errors import first_line
from jaxdist.experiment import load
from jaxdist.hlo import compile_with_text, ledger
from jaxdist.hlo.parse import parse
from jaxdist.inspect.program import InspectedExperiment, open_subject, predicted_step_time
from jaxdist.inspect.text import program_digest
from jaxdist.metrics.report import write_json
from jaxdist.parallel.compiler import PRESETS, Options, OptionValue, preset_options

OptionVerdict = Literal["changes", "same program", "refused"]
ALL = "all of them"
NEITHER = "neither bytes nor memory nor FLOPs"


@dataclass(frozen=True)
class OptionEffect:
    """The effect of a single option of a preset, or of all options of a preset together.

    Attributes:
      preset: the name of the preset, or "options" for the options in the config's
        `parallel.xla.options`.
      option: the name of the option in XLA, or `ALL` for all options of the preset together.
      value: the option's value, or None for `ALL`.
      verdict: "changes" or "same program" for the compiled program, or "refused" if the compiler
        refuses the option.
      effect: the differences between the programs, or the compiler's error. The text
        is empty for the same program.
    """

    preset: str
    option: str
    value: OptionValue | None
    verdict: OptionVerdict
    effect: str


def audit_options(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    topology: str | None = None,
    json_file: Path | None = None,
    console: Console,
) -> tuple[OptionEffect, ...]:
    """Compile the train step with each option of each preset, and return and print the effects.

    The options of the config (`parallel.xla.options`) are included. Each program is compared with
    the program that is compiled without any options.

    Args:
      path: the configuration file, to which `overrides` are applied.
      topology: the TPUs to compile for, such as `v5e:2x4`, or None for the devices of jax.
      json_file: a file for the effects as JSON, or None to write none.
      console: the console, on which each option has a line.

    Raises:
      JaxdistError: the config or the topology is invalid, or the file cannot be written.
    """
    given = load(path, overrides)[1].parallel.xla.options
    subject = open_subject(path, overrides, topology)
    console.print(f"options of {subject.name}", soft_wrap=True, markup=False)
    found: list[OptionEffect] = []
    for effect in _effects(subject, given):
        found.append(effect)
        _print(effect, console)
    if not found:
        console.print(
            f"no preset has compiler options for {subject.device_kind}, and parallel.xla.options "
            "sets none"
        )
    if json_file is not None:
        rows = [asdict(effect) for effect in found]
        write_json(json_file, {**facts_of(subject), "options": rows}, what="audit")
    return tuple(found)


def _effects(subject: InspectedExperiment, given: Options) -> Iterator[OptionEffect]:
    # The options in the config are a separate group below, and must not apply to other groups.
    program = replace(subject.experiment.program, options={})
    mesh, device = subject.experiment.layout.mesh, subject.devices[0]
    groups = {name: preset_options(name, device) for name in PRESETS} | {"options": given}
    if not any(groups.values()):
        return
    lowered = program.train.lower(program.state_shapes, program.batch)

    def compiled(options: Options) -> tuple[str, Costs]:
        executable, text = compile_with_text(lowered, options)
        module = parse(text)
        time = predicted_step_time(subject, executable, module)
        sha256 = program_digest(text, lowered.as_text())
        return sha256, costs_of(ledger(executable, mesh, module), time)

    sha256, plain = compiled({})
    for preset, options in groups.items():
        each: list[tuple[str, OptionValue | None, Options]]
        each = [(name, value, {name: value}) for name, value in options.items()]
        if len(each) > 1:
            each.append((ALL, None, options))
        for name, value, asked in each:
            try:
                other_sha256, other = compiled(asked)
            # An option that this compiler does not know is a result, and must not end the audit.
            except jax.errors.JaxRuntimeError as error:
                yield OptionEffect(preset, name, value, "refused", first_line(error))
                continue
            same = other_sha256 == sha256
            effect = "" if same else cost_changes(plain, other) or NEITHER
            yield OptionEffect(preset, name, value, "same program" if same else "changes", effect)


def _print(effect: OptionEffect, console: Console) -> None:
    value = "" if effect.value is None else f"={str(effect.value).lower()}"
    line = Text(f"{effect.verdict:<13} {effect.preset:<18} {effect.option}{value}")
    if effect.effect:
        line.append(f": {effect.effect}")
    console.print(line, soft_wrap=True)
