"""`jaxdist audit`: the check that each knob of a config changes the train step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxdist.audit.knobs import written_settings
from jaxdist.audit.step import AuditedStep, KnobEffect, facts_of, judge_knob
from jaxdist.config.importing import foreign_code
from jaxdist.experiment import load
from jaxdist.inspect.program import open_subject
from jaxdist.metrics.report import write_json

_STYLES = {"ok": "green", "NO EFFECT": "bold red"}


def audit(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    topology: str | None = None,
    full: bool = False,
    json_file: Path | None = None,
    console: Console,
) -> tuple[KnobEffect, ...]:
    """Compare the train step with the step without each knob, and return and print the effects.

    A knob has no effect if both steps have the same StableHLO, compiler options and initial state.
    If the StableHLO or the options differ, a knob of the sections `jaxdist.audit.step.LAYOUT` is
    judged by the compiled programs, and any other knob has an effect. With `full`, all knobs are
    judged by the compiled programs. Differences that the compiler optimizes away then do not count.

    Args:
      path: the configuration file, to which `overrides` are applied.
      topology: the TPUs to compile for, such as `v5e:2x4`, or None for the devices of jax.
      full: whether to compile the step without each knob, and print the change in bytes, memory and
        FLOPs.
      json_file: a file for the effects as JSON, or None to write none.
      console: the console, on which each knob has a line.

    Raises:
      JaxdistError: the config or the topology is invalid, the step is too large for the device, or
        the file cannot be written.
    """
    document, config = load(path, overrides)
    for text in foreign_code(document.values):
        console.print(f"code   {text}", soft_wrap=True, markup=False)
    step = AuditedStep(document, config, open_subject(path, overrides, topology))
    console.print(f"audit of {step.subject.name}", soft_wrap=True, markup=False)
    findings: list[KnobEffect] = []
    for knob in written_settings(document.values):
        finding = judge_knob(step, knob, full=full)
        if finding is not None:
            findings.append(finding)
            _print(finding, console)
    _print_count(findings, console)
    if json_file is not None:
        own = {"full": full, "passed": not has_no_effect(findings)}
        report = {**facts_of(step.subject), **own, "knobs": [asdict(one) for one in findings]}
        write_json(json_file, report, what="audit")
    return tuple(findings)


def has_no_effect(findings: Sequence[KnobEffect]) -> bool:
    """Return whether any knob among the findings has no effect."""
    return any(finding.verdict == "NO EFFECT" for finding in findings)


def _print(finding: KnobEffect, console: Console) -> None:
    """Print a knob's effect in a single line, which is cut off at the width of the terminal."""
    line = Text(f"{finding.verdict:<16}", style=_STYLES.get(finding.verdict, "dim"))
    line.append(f"{finding.knob:<31} ", style="default")
    line.append(finding.effect, style="default")
    line.truncate(console.width, overflow="ellipsis")
    console.print(line, no_wrap=True)


def _print_count(findings: Sequence[KnobEffect], console: Console) -> None:
    counts = Counter(finding.verdict for finding in findings)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    for finding in findings:
        if finding.verdict == "NO EFFECT":
            console.print(
                f"{finding.knob} = {finding.value!r} ({finding.origin}) has no effect: without the "
                "setting, the compiled program, its bytes and its memory are the same. Remove the "
                "setting, or fix the code that should read it",
                soft_wrap=True,
                markup=False,
            )
