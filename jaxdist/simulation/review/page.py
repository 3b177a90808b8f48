"""The command `jaxdist study review`: the tables and figures of survey articles on one page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from jaxdist.columns import markdown
from jaxdist.inspect.rows import show_bytes
from jaxdist.simulation.review.efficiency import MOST_WORKERS, Point, curves
from jaxdist.simulation.review.optimizers import OptimizerRow, optimizer_rows
from jaxdist.simulation.review.patterns import MIXED, Pattern, patterns, zero_bytes
from jaxdist.simulation.review.plot import plot_review
from jaxdist.simulation.review.settings import ReviewConfig, read_review
from jaxdist.study.files import check_writable, write_study
from jaxdist.types import JsonObject


@dataclass(frozen=True)
class Review:
    """The contents of the page: points of curves, compiled programs and optimizers."""

    config: ReviewConfig
    points: tuple[Point, ...]
    patterns: tuple[Pattern, ...]
    optimizers: tuple[OptimizerRow, ...]

    def text(self) -> str:
        """Return the page in markdown."""
        parts = (self._efficiency(), self._patterns(), self._optimizers(), self._memory())
        return "\n".join(line for part in parts for line in (*part, "")).rstrip()

    def as_json(self) -> JsonObject:
        """Return the page as plain data: its lines, and every number."""
        return {
            "text": self.text().splitlines(),
            "efficiency": [asdict(point) for point in self.points],
            "measured": [point.model_dump() for point in self.config.measured],
            "patterns": [{**asdict(one), "sent": one.sent} for one in self.patterns],
            "optimizers": [asdict(row) for row in self.optimizers],
            "zero_bytes_per_parameter": {
                str(stage): {str(n): zero_bytes(stage, n) for n in self.config.devices}
                for stage in range(4)
            },
        }

    def _efficiency(self) -> Iterator[str]:
        config = self.config
        yield "## Efficiency by architecture"
        yield ""
        yield (
            "The time of a device's own work, divided by the time of a step. All devices have "
            f"equal work: {show_bytes(config.parameter_bytes)} of parameters, "
            f"{config.step_seconds:g} s of work, {config.gbits:g} Gbit/s. For up to {MOST_WORKERS} "
            f"workers, {config.servers} parameter servers are simulated; for more workers, the "
            "time follows from the bytes of the busiest network card. The cost model gives the "
            f"times of ring and ZeRO. 1F1B is simulated with {config.microbatches} microbatches "
            f"and with one stage for each layer, for up to {config.layers} layers. No message "
            "overlaps with the work, so these efficiencies are lower bounds."
        )
        yield ""
        found = {(point.architecture, point.devices): point for point in self.points}
        names = list(dict.fromkeys(point.architecture for point in self.points))
        rows = [
            [
                name,
                *(
                    f"{found[name, n].efficiency:.0%}" if (name, n) in found else ""
                    for n in config.devices
                ),
            ]
            for name in names
        ]
        yield from markdown(["devices", *map(str, config.devices)], rows)
        for one in config.measured:
            yield ""
            yield (
                f"Measured: {one.architecture}, {one.devices} devices: {one.efficiency:.0%} "
                f"({one.source})."
            )

    def _patterns(self) -> Iterator[str]:
        yield "## Communication patterns"
        yield ""
        yield (
            "The amount that the busiest device sends in a step, in units of all parameters, "
            f"read from compiled programs ({self.config.program_file.name}). A worker of parameter "
            "servers sends its gradients; the busiest server sends its parameters to each worker."
        )
        yield ""
        rows = [
            [
                one.name,
                one.axes,
                one.calls,
                f"{one.sent:.2f}",
                "" if one.server_bytes is None else f"{one.server_bytes / one.parameter_bytes:.2f}",
            ]
            for one in self.patterns
        ]
        head = ["architecture", "mesh", "calls", "sent by a device", "sent by a server"]
        yield from markdown(head, rows)

    def _optimizers(self) -> Iterator[str]:
        scaling = self.config.scaling
        yield "## Optimizers"
        yield ""
        yield (
            "The largest batch is the last batch size whose mean, like the means of all smaller "
            f"batches, is within one point of the best mean at batch {scaling.batches[0]} (for a "
            f"loss, within 1%). The stability is the mean at batch {scaling.batches[-1]}, with "
            f"its standard deviation over the seeds. Recorded: {scaling.source}."
        )
        yield ""
        rows = [
            [
                row.name,
                "none" if row.largest is None else row.largest,
                f"{row.state_bytes:.1f} B",
                _stability(row, scaling.metric),
                row.diverged,
            ]
            for row in self.optimizers
        ]
        head = ["optimizer", "largest batch", "state of a parameter", "stability", "diverged"]
        yield from markdown(head, rows)

    def _memory(self) -> Iterator[str]:
        devices = self.config.devices
        yield "## Memory by ZeRO"
        yield ""
        yield (
            f"Bytes for each parameter and device, of {MIXED:g} without ZeRO: 2 of parameters, 2 "
            "of gradients and 12 of the optimizer (mixed precision with Adam). Stage 1 saves up to "
            f"{MIXED / 4:g} times, stage 2 up to {MIXED / 2:g} times, and stage 3 as many times as "
            "there are devices."
        )
        yield ""
        rows = [[stage, *(f"{zero_bytes(stage, n):.3g}" for n in devices)] for stage in range(4)]
        yield from markdown(["stage", *map(str, devices)], rows)
        yield ""
        yield (
            "Parameters and optimizer state of the compiled programs, in bytes for each parameter "
            "of the model (float32; gradients are temporary and not counted):"
        )
        yield ""
        most = max(one.state for one in self.patterns)
        found = [
            [p.name, p.axes, f"{p.state:.2f}", f"{most / p.state:.1f}x"] for p in self.patterns
        ]
        yield from markdown(["architecture", "mesh", "bytes", "saved"], found)


def _stability(row: OptimizerRow, metric: str) -> str:
    if row.last is None:
        return "diverged"
    times, places, unit = (100, 1, "%") if metric == "accuracy" else (1, 3, "")
    spread = "" if row.spread is None else f" ± {row.spread * times:.{places}f}"
    return f"{row.last * times:.{places}f}{spread}{unit}"


def run_review(
    settings: Sequence[str],
    *,
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console,
) -> Review:
    """Compute, print, write and return the page; the same settings give the same page.

    Args:
      settings: the settings that `jaxdist.simulation.review.settings.read_review` reads.
      json_file, plot: the file for the numbers and the directory for the picture; None writes
        nothing.

    Raises:
      JaxdistError: a setting is unknown, a program cannot be compiled, or a file cannot be written.
    """
    config = read_review(settings)
    check_writable(plot, json_file)
    points, rows = tuple(curves(config)), tuple(optimizer_rows(config))
    done = Review(config, points, tuple(patterns(config)), rows)
    console.print(done.text(), soft_wrap=True, markup=False)
    write_study(json_file, done.as_json())
    if plot is not None:
        plot_review(done.points, config, plot)
    return done
