"""A row of the table: features that do not combine, and the setting that causes the refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdist.validity.features import FEATURES, FLAT, Facts, Feature
from jaxdist.validity.sections import EVERY

COMPRESSION = tuple(name for name in FEATURES if name.startswith("compression over"))
ZERO_STAGES = ("zero 1", "zero 2", "zero 3")
_FLAT = f"reduce: {', '.join(FLAT)}"
REDUCTIONS = ("reduce: xla", _FLAT, "reduce: hierarchical")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "any stage of ZeRO": ZERO_STAGES,
    "any scope of ZeRO": ("parallel.zero.scope: all", "parallel.zero.scope: ici"),
    "any reduction": REDUCTIONS,
    "reduce: a flat algorithm": (_FLAT,),
    "any compression": COMPRESSION,
    "frozen parameters": ("model.freeze", "model.lora"),
}
"""The features that `table.toml` names together."""


def members(names: Sequence[str]) -> list[str]:
    """Return the names of features, with each group's name replaced by its members' names."""
    return [member for name in names for member in GROUPS.get(name, (name,))]


@dataclass(frozen=True)
class ValidityRow:
    """A combination of features that is refused.

    Attributes:
      groups: the groups of features; a config with a feature of every group is refused.
      why, instead: the reason and the remedy, which are the two halves of a sentence.
      setting: the path, in the complete config, of the setting that causes the refusal.
      heading: the heading of the page's section that begins with the row, or an empty string.
    """

    groups: tuple[tuple[str, ...], ...]
    why: str
    instead: str
    setting: tuple[str, ...]
    heading: str = ""

    def problem(self, facts: Facts) -> str | None:
        """Return the message for the user if this row of the table refuses a config, or None."""
        found: list[list[Feature]] = []
        for group in self.groups:
            active = [EVERY[name] for name in group if EVERY[name].active(facts)]
            if not active:
                return None
            found.append(active)
        settings = " with ".join(features[0].shown(facts) for features in found)
        return f"{settings}: {self.why}; {self.instead}"
