"""A row of the table: features that do not combine, and the setting that causes the refusal."""

from __future__ import annotations

from dataclasses import dataclass

from jaxdist.validity.features import FEATURES, FLAT, Facts, Feature
from jaxdist.validity.sections import EVERY

COMPRESSION = tuple(name for name in FEATURES if name.startswith("compression over"))
FROZEN = ("model.freeze", "model.lora")
SCOPES = ("parallel.zero.scope: all", "parallel.zero.scope: ici")
ZERO_STAGES = ("zero 1", "zero 2", "zero 3")
REDUCTIONS = ("reduce: xla", f"reduce: {', '.join(FLAT)}", "reduce: hierarchical")


@dataclass(frozen=True)
class ValidityRow:
    """A combination of features that is refused.

    Attributes:
      groups: the groups of features; a config that has a feature of each group is refused.
      why, instead: the reason and the remedy, which are the two halves of a sentence.
      setting: the path, in the complete config, of the setting that causes the refusal.
    """

    groups: tuple[tuple[str, ...], ...]
    why: str
    instead: str
    setting: tuple[str, ...] = ("parallel",)

    def problem(self, facts: Facts) -> str | None:
        """Return the message for the user if the row refuses a config, or None if it does not."""
        found: list[list[Feature]] = []
        for group in self.groups:
            active = [EVERY[name] for name in group if EVERY[name].active(facts)]
            if not active:
                return None
            found.append(active)
        settings = " with ".join(features[0].shown(facts) for features in found)
        return f"{settings}: {self.why}; {self.instead}"
