"""The function that makes the hooks that a config names: the user's hooks and trackers."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Document
from jaxdist.config.importing import call_object, load_object
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig
from jaxdist.experiment.config import at_setting
from jaxdist.run.hooks.contract import Hook
from jaxdist.run.hooks.track import Track


def named_hooks(config: ExperimentConfig, document: Document) -> Iterator[Hook]:
    """Yield the hooks that `run.hooks` and `metrics.trackers` of a config name.

    Raises:
      ConfigError: a hook cannot be imported or made, or is not a hook; a package is missing.
    """
    for at, one in enumerate(config.run.hooks):
        with at_setting(document, "run", "hooks", at):
            hook = call_object(one.path, load_object(one.path), one.args)
            if not isinstance(hook, Hook):
                raise ConfigError(
                    f"{one.path!r} returned a {type(hook).__name__}, but must return a "
                    "jaxdist.Hook",
                    setting=("path",),
                )
        yield hook
    for at, tracker in enumerate(config.metrics.trackers):
        with at_setting(document, "metrics", "trackers", at):
            tracker.check()
            yield Track(tracker.build(), tracker.key)
