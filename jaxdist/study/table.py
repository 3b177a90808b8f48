"""The results of a batch-scaling study, as a table and as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxdist import columns
from jaxdist.study.plan import StudyCell
from jaxdist.study.trial import with_spread

MARGIN = 0.01
"""The largest acceptable loss of quality, compared with the best result at the base batch size.

The value 0.01 means one point of accuracy, or 1% of a loss."""
CellRows = Mapping[tuple[str, bool], Sequence[StudyCell]]


def by_row(cells: Iterable[StudyCell]) -> CellRows:
    """Return rows of cells, by optimizer and `tuned`, with ascending batch sizes.

    The rows without a tuned rate come first.
    """
    rows: dict[tuple[str, bool], list[StudyCell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.tuned, cell.batch_size)):
        rows.setdefault((cell.optimizer, cell.tuned), []).append(cell)
    return rows


def metric_of(cells: Sequence[StudyCell]) -> str:
    """Return the name of the metric by which cells are compared, "accuracy" or "loss"."""
    return cells[0].outcomes[0].metric


def study_table(cells: Sequence[StudyCell]) -> str:
    """Return a table with a column for each batch size.

    The table has a row for each pair of an optimizer and a source of its learning rates. The rates
    are either tuned, or follow by a rule from the tuned rate of one batch size. A cell has the mean
    and the sample standard deviation over the seeds.
    """
    rows = by_row(cells)
    batches = [str(cell.batch_size) for cell in next(iter(rows.values()))]
    header, table = ["optimizer", "learning rate", *batches], []
    for (name, tuned), row in rows.items():
        source = "tuned" if tuned else f"by rule from {row[0].learning_rate:g}"
        table.append([name, source, *(format_cell(cell) for cell in row)])
    return "\n".join(columns.markdown(header, table, padded=True))


def format_cell(cell: StudyCell) -> str:
    """Return the mean and spread of a cell as text, in percent of accuracy or in nats of loss.

    If any runs diverged, the text has only their number.
    """
    if cell.diverged:
        return f"diverged {cell.diverged}/{len(cell.outcomes)}"
    places, times = (1, 100) if metric_of([cell]) == "accuracy" else (3, 1)
    return with_spread(f"{cell.mean * times:.{places}f}", cell.spread * times, places)


def verdict(cells: Sequence[StudyCell]) -> list[str]:
    """Return sentences about the largest batch size at which each optimizer keeps its quality.

    Let the limit be `MARGIN` worse than the best mean of all optimizers at the base batch size. An
    optimizer keeps its quality up to a batch size if no mean up to this size is worse than the
    limit.
    """
    rows = by_row(cells)
    at_base = [row[0] for row in rows.values() if not row[0].diverged]
    if not at_base:
        return [
            "every optimizer diverged at the base batch: there is nothing to compare with; "
            "begin --batches with a smaller size"
        ]
    metric = metric_of(at_base)
    accuracy = metric == "accuracy"
    best = max(at_base, key=lambda cell: cell.mean if accuracy else -cell.mean)
    limit = worst_acceptable([best.mean], metric)
    within = "one point" if accuracy else "1%"
    lines = [
        f"holds up: mean within {within} of the best at batch {best.batch_size} "
        f"({best.optimizer}, {format_cell(best)})"
    ]
    for wanted, words in ((False, "learning rate by the rule"), (True, "learning rate tuned")):
        found = [
            f"{name} {_up_to(row, limit, metric)}"
            for (name, tuned), row in rows.items()
            if tuned == wanted
        ]
        if found:
            lines.append(f"{words}: {', '.join(found)}")
    return lines


def _up_to(row: Sequence[StudyCell], limit: float, metric: str) -> str:
    means = ((cell.batch_size, None if cell.diverged else cell.mean) for cell in row)
    reached = largest_batch(means, limit, metric)
    return "at no batch" if reached is None else f"to {reached}"


def worst_acceptable(means: Iterable[float], metric: str) -> float:
    """Return the best of the means, worsened by `MARGIN`.

    Args:
      metric: "accuracy", of which a larger value is better, or "loss".
    """
    return max(means) - MARGIN if metric == "accuracy" else min(means) * (1 + MARGIN)


def largest_batch(
    means: Iterable[tuple[int, float | None]], limit: float, metric: str
) -> int | None:
    """Return the largest batch size up to which no mean is worse than the limit, if there is one.

    Args:
      means: pairs of a batch size and a mean, which is None if a run diverged, by ascending size.
      limit: the worst acceptable mean.
      metric: the metric of the means, as for `worst_acceptable`.

    >>> largest_batch([(32, 0.5), (64, 0.502), (128, 0.6)], 0.505, "loss")
    64
    """
    reached = None
    for size, mean in means:
        if mean is None or (mean < limit if metric == "accuracy" else mean > limit):
            break
        reached = size
    return reached
