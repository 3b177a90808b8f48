"""`jaxdist study CONFIG`: the held-out losses of variants of one config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from jaxdist.errors import ConfigError, JaxdistError, did_you_mean
from jaxdist.experiment import Experiment, build, load
from jaxdist.metrics.figure import save_figure
from jaxdist.study.comparison import VariantResult, comparison_table, loss_shown
from jaxdist.study.comparison_plot import comparison_figure
from jaxdist.study.compression import SETS, VariantSet, sent_bytes
from jaxdist.study.definition import VariantsStudy
from jaxdist.study.files import check_writable, journal_path
from jaxdist.study.runs import publish, runs_of, trained_on
from jaxdist.study.trainer import ConfigTrainer, check_comparable
from jaxdist.study.trial import OutcomeJournal, VariantTrial
from jaxdist.study.variants import AS_GIVEN, Variant, named_variants, overrides_of, parse_variants
from jaxdist.types import JsonObject


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison of variants.

    Attributes:
      caption: a description of the model and the data, and of the table's columns.
      rows: the results of each variant. The first variant is the baseline of the other variants.
    """

    caption: str
    rows: tuple[VariantResult, ...]

    def text(self) -> str:
        """Return the comparison as text: the caption, the table and the variants' settings."""
        settings = [
            f"{row.variant.name}: {' '.join(row.variant.overrides)}"
            for row in self.rows
            if row.variant.overrides
        ]
        return "\n".join([self.caption, "", comparison_table(self.rows), "", *settings])

    def as_json(self) -> JsonObject:
        """Return the results as JSON values: the caption, the table, the variants, and the runs."""
        return {
            "caption": self.caption,
            "table": comparison_table(self.rows).splitlines(),
            "variants": [row.as_json() for row in self.rows],
            "runs": [outcome.as_json() for row in self.rows for outcome in row.outcomes],
        }


def compare_variants(
    study: VariantsStudy,
    overrides: Sequence[str],
    *,
    variants: Sequence[str] = (),
    json_file: Path | None,
    plot: Path | None,
    console: Console,
) -> Comparison:
    """Train variants of a config, and return their effect on the held-out loss.

    The results are printed and written. All variants train on the same batches for the same number
    of steps, and for each seed they begin with the same parameters. Finished runs are stored next
    to the output (or in runs/), so that the same command does not repeat them.

    Args:
      study: the definition of the study.
      overrides: settings of all variants, which override the study's settings.
      variants: additional variants, as texts for `jaxdist.study.variants.parse_variants`.
      json_file: the file for the results as JSON, or None to write none.
      plot: the directory for the plot, or None for no plot.
      console: the console for the results and the progress.

    Raises:
      JaxdistError: a variant cannot be trained or compared, or the output cannot be written.
    """
    path, seeds = study.config, study.seeds
    found = _found(path, overrides, study.of)
    taken = [variant.name for variant in found.variants]
    own = ((name, overrides_of(settings)) for name, settings in study.variants.items())
    given = named_variants(own, taken=taken, what="variants")
    given += parse_variants(variants, taken=[*taken, *study.variants])
    if len(found.variants) + len(given) < 2:
        raise ConfigError(
            f"nothing to compare {path} with: add --of {'|'.join(SETS)} or --variant "
            "NAME='section.key=value'"
        )
    trainer = VariantTrainer(path, overrides, (*found.variants, *given), range(seeds))
    # The baseline is required, but other variants of a shipped set are left out if the config
    # refuses them.
    experiments, refused = trainer.check(optional=taken[1:])
    check_writable(plot, json_file)
    name = study.of or "variants"
    journal = OutcomeJournal(journal_path(path, name, json_file, plot), VariantTrial)
    for line in refused:
        console.print(line, soft_wrap=True, markup=False)
    rows = _run(trainer, experiments, journal, console)
    experiment = next(iter(experiments.values()))
    done = Comparison(_caption(experiment, rows, (*found.notes, *refused)), rows)
    publish(done.text(), done.as_json(), json_file, console)
    if plot is not None:
        title = f"{experiment.config.model.type} on {path.stem}, {experiment.total_steps:,} steps"
        figure = comparison_figure(rows, title=f"{title}, {seeds} seeds")
        save_figure(figure, plot, name, what="the study")
    return done


def _found(path: Path, overrides: Sequence[str], of: str | None) -> VariantSet:
    if of is None:
        return VariantSet((AS_GIVEN,))
    if of not in SETS:
        raise ConfigError(f"--of {of!r}: {did_you_mean(of, SETS)}")
    document, config = load(path, [*overrides, f"parallel.{of}=null"])
    return SETS[of](build(config, document))


class VariantTrainer(ConfigTrainer[VariantTrial]):
    """A trainer that runs a variant of a config with a seed.

    Args:
      path: the path of the config.
      overrides: settings of all variants.
      variants: the variants to train.
      seeds: the numbers that are added to the config's seed; each sum is the seed of a run.
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        variants: Sequence[Variant],
        seeds: Sequence[int],
    ) -> None:
        super().__init__(path, overrides)
        self.variants = {variant.name: variant for variant in variants}
        _, config = load(path, overrides)
        self.seeds = tuple(config.seed + seed for seed in seeds)

    def settings(self, trial: VariantTrial) -> Sequence[str]:
        """Return the settings of a trial's variant, and the seed.

        Raises:
          ConfigError: the variant sets the seed.
        """
        own = self.variants[trial.variant].overrides
        for override in own:
            if override.partition("=")[0].strip() == "seed":
                raise ConfigError(
                    f"variant {trial.variant!r} sets the seed, which a study varies itself: leave "
                    "the seed out, and use --seeds"
                )
        return (*own, f"seed={trial.seed}")

    def check(self, *, optional: Sequence[str]) -> tuple[Mapping[str, Experiment], tuple[str, ...]]:
        """Return the experiments of variants by name, and a sentence about each omitted variant.

        Args:
          optional: the names of variants that are left out if they cannot be built.

        Raises:
          JaxdistError: a required variant cannot be built, or all optional variants cannot be
            built.
          ConfigError: a variant changes a setting that all variants must share, or equals another
            variant.
        """
        found: dict[str, Experiment] = {}
        refused: dict[str, JaxdistError] = {}
        for name in self.variants:
            try:
                found[name] = self.experiment(VariantTrial(name, self.seeds[-1]))
            except JaxdistError as error:
                if name not in optional:
                    raise
                refused[name] = error
        if refused and len(refused) == len(optional):
            raise next(iter(refused.values()))
        first = next(iter(found.values()))
        check_comparable(first, self._path)
        for name, experiment in found.items():
            check_alike(name, experiment, first, "strategy")
        self._check_different(found)
        told = [f"left out: {name}, since {error}" for name, error in refused.items()]
        return found, tuple(told)

    def _check_different(self, names: Mapping[str, Experiment]) -> None:
        seen: dict[str, str] = {}
        for name in names:
            other = seen.setdefault(self.identity(VariantTrial(name, self.seeds[0])), name)
            if other != name:
                raise ConfigError(
                    f"variants {other!r} and {name!r} have the same settings: change or remove "
                    "either variant"
                )


def check_alike(
    name: str, experiment: Experiment, first: Experiment, shared: Literal["seed", "strategy"]
) -> None:
    """Check that a variant takes as many steps as the first variant, on the same batches.

    Args:
      name: the name of the variant.
      shared: another setting that the variants must share.

    Raises:
      ConfigError: the variant changes the data, the batch size, the number of steps or `shared`.
    """
    mine, other = experiment.config, first.config
    pairs = {
        "data": (mine.data, other.data),
        "train.batch_size": (mine.train.batch_size, other.train.batch_size),
        "the number of steps": (experiment.total_steps, first.total_steps),
        shared: (getattr(mine, shared), getattr(other, shared)),
    }
    changed = [what for what, (one, two) in pairs.items() if one != two]
    if changed or len(experiment.stages) > 1:
        raise ConfigError(
            f"variant {name!r} changes {' and '.join(changed) or 'the batch within a run'}: all "
            "variants must train on the same batches for equal steps; set these values for all "
            "variants, outside of --variant"
        )


def _run(
    trainer: VariantTrainer,
    experiments: Mapping[str, Experiment],
    journal: OutcomeJournal[VariantTrial],
    console: Console,
) -> tuple[VariantResult, ...]:
    rows: list[VariantResult] = []
    with runs_of(trainer, journal, [1] * len(experiments), console) as runs:
        for name, experiment in experiments.items():
            sent = sent_bytes(experiment)
            outcomes = tuple(runs(VariantTrial(name, seed)) for seed in trainer.seeds)
            first = rows[0] if rows else None
            base = first.outcomes if first else outcomes
            base_bytes = first.sent_bytes if first else sent
            rows.append(VariantResult(trainer.variants[name], sent, base_bytes, outcomes, base))
            runs.watch.done(f"{name}: {rows[-1].verdict or 'loss'} {loss_shown(rows[-1])}")
    return tuple(rows)


def _caption(experiment: Experiment, rows: Sequence[VariantResult], notes: Sequence[str]) -> str:
    first = rows[0]
    return "\n".join(
        [
            trained_on(
                experiment, f"{experiment.config.optim.type}, {experiment.total_steps:,} steps"
            ),
            f"Held-out loss in nats: mean ± sample standard deviation over {len(first.outcomes)} "
            "seeds.",
            f"Change against {first.variant.name!r}, seed by seed; '?' where not all seeds agree "
            "with the verdict.",
            "Bytes that a device sends in a step after any warm-up, relative to the "
            f"{first.sent_bytes:,.0f} bytes of {first.variant.name!r}.",
            *notes,
        ]
    )
