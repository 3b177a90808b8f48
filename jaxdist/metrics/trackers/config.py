"""The section `metrics` of a configuration."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jaxdist.config.importing import call_object, load_object
from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.metrics.trackers.contract import Tracker
from jaxdist.metrics.trackers.mlflow_tracker import MlflowTracker
from jaxdist.metrics.trackers.trackio_tracker import TrackioTracker
from jaxdist.metrics.trackers.wandb_tracker import Mode, WandbTracker
from jaxdist.types import Kwargs

PROJECT = "jaxdist"


class PackagedConfig(Config):
    """A tracker that needs a package, for which jaxdist has an extra of the same name."""

    package: ClassVar[str]
    project: str = PROJECT
    """The project that the run is listed in."""
    name: str | None = None
    """The name that the run is listed under; null is the name of the run directory."""

    def check(self) -> None:
        """Refuse a tracker whose package is missing.

        Raises:
          ConfigError: the package is not installed.
        """
        if find_spec(self.package) is None:
            raise ConfigError(
                f"this tracker needs the package {self.package}, which is not installed: "
                f"pip install 'jaxdist[{self.package}]'",
                setting=("type",),
            )

    @property
    def key(self) -> str:
        """The key that distinguishes this tracker from others when the run resumes."""
        return f"{self.package}:{self.project}"


class WandbConfig(PackagedConfig):
    """Weights & Biases, with its files in the run directory."""

    package = "wandb"
    type: Literal["wandb"]
    """Selects this tracker."""
    entity: str | None = None
    """The user or team that owns the project; null is your default."""
    mode: Mode | None = None
    """Mode: online sends records, offline keeps them for `wandb sync`, disabled does neither; null
    follows the variable WANDB_MODE."""
    tags: tuple[str, ...] = ()
    """Tags of the run, by which a search finds it."""

    def build(self) -> Tracker:
        """Make the tracker."""
        return WandbTracker(self.project, self.name, self.entity, self.mode, self.tags)


class TrackioConfig(PackagedConfig):
    """Trackio, whose database is in the directory that the variable TRACKIO_DIR names."""

    package = "trackio"
    type: Literal["trackio"]
    """Selects this tracker."""
    space: str | None = None
    """The Hugging Face Space to send records to; null keeps them on this machine."""

    def build(self) -> Tracker:
        """Make the tracker."""
        return TrackioTracker(self.project, self.name, self.space)


class MlflowConfig(PackagedConfig):
    """MLflow, where `project` is the experiment."""

    package = "mlflow"
    type: Literal["mlflow"]
    """Selects this tracker."""
    uri: str | None = None
    """The tracking server or database, such as sqlite:///mlflow.db; null follows the
    variable MLFLOW_TRACKING_URI."""

    def build(self) -> Tracker:
        """Make the tracker."""
        return MlflowTracker(self.project, self.name, self.uri)


class ImportedTrackerConfig(Config):
    """A tracker of your own: a class or function whose result has the methods of a tracker."""

    type: Literal["import"]
    """Selects this tracker."""
    path: str
    """Import path of the class or function, `mypkg.module:Name`."""
    args: Kwargs = Field(default_factory=dict)
    """Keyword arguments for the class or function."""

    @property
    def key(self) -> str:
        """The key that distinguishes this tracker from others when the run resumes."""
        return f"import:{self.path}"

    def check(self) -> None:
        """Import the class or function.

        Raises:
          ConfigError: the name does not exist, or its module fails.
        """
        load_object(self.path)

    def build(self) -> Tracker:
        """Make the tracker.

        Raises:
          ConfigError: the tracker cannot be made, or lacks a method of `Tracker`.
        """
        found = call_object(self.path, load_object(self.path), self.args)
        missing = [name for name in ("start", "record", "end") if not hasattr(found, name)]
        if missing:
            raise ConfigError(
                f"{self.path!r} gives a {type(found).__name__} without {', '.join(missing)}: a "
                "tracker needs start, record and end (jaxdist.metrics.trackers.contract.Tracker)",
                setting=("path",),
            )
        return found


TrackerConfig = Annotated[
    WandbConfig | TrackioConfig | MlflowConfig | ImportedTrackerConfig,
    Field(discriminator="type"),
]


class MetricsConfig(Config):
    """Destinations of a run's numbers, besides its own metrics.jsonl and TensorBoard events."""

    trackers: tuple[TrackerConfig, ...] = ()
    """Trackers that receive every record; each has a `type`."""
