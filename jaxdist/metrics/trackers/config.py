"""The section `metrics` of a configuration."""

from __future__ import annotations

from collections.abc import Callable
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
    """A tracker that needs a package, which an extra of jaxdist with the same name installs."""

    package: ClassVar[str]
    tracker: ClassVar[Callable[..., Tracker]]
    project: str = PROJECT
    """The project in which the run is listed."""
    name: str | None = None
    """The name under which the project lists the run; null uses the name of the run directory."""

    def check(self) -> None:
        """Check that the package of the tracker is installed.

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
        """The key that distinguishes this tracker from other trackers when the run resumes."""
        return f"{self.package}:{self.project}"

    def build(self) -> Tracker:
        """Return the tracker, whose fields have the names of these settings."""
        return self.tracker(**{name: value for name, value in self if name != "type"})


class WandbConfig(PackagedConfig):
    """A tracker that sends to Weights & Biases, with its files in the run directory."""

    package = "wandb"
    tracker = WandbTracker
    type: Literal["wandb"]
    """The name that selects this tracker in a config."""
    entity: str | None = None
    """The user or team that owns the project; null uses your default."""
    mode: Mode | None = None
    """The mode: online sends records, offline keeps records for `wandb sync`, disabled does
    neither; null follows the variable WANDB_MODE."""
    tags: tuple[str, ...] = ()
    """The tags of the run, for searches."""


class TrackioConfig(PackagedConfig):
    """A tracker that writes to Trackio, in the database folder that TRACKIO_DIR names."""

    package = "trackio"
    tracker = TrackioTracker
    type: Literal["trackio"]
    """The name that selects this tracker in a config."""
    space: str | None = None
    """The Hugging Face Space to which records are sent; null keeps the records on this machine."""


class MlflowConfig(PackagedConfig):
    """A tracker that sends to MLflow, whose experiment is `project`."""

    package = "mlflow"
    tracker = MlflowTracker
    type: Literal["mlflow"]
    """The name that selects this tracker in a config."""
    uri: str | None = None
    """The tracking server or database, such as sqlite:///mlflow.db; null follows the variable
    MLFLOW_TRACKING_URI.
    """


class ImportedTrackerConfig(Config):
    """A tracker of the user's: a class or a function whose result has the methods of `Tracker`."""

    type: Literal["import"]
    """The name that selects this tracker in a config."""
    path: str
    """The import path of the class or function, `mypkg.module:Name`."""
    args: Kwargs = Field(default_factory=dict)
    """The keyword arguments for the class or function."""

    @property
    def key(self) -> str:
        """The key that distinguishes this tracker from other trackers when the run resumes."""
        return f"import:{self.path}"

    def check(self) -> None:
        """Check that the class or function can be imported.

        Raises:
          ConfigError: the name does not exist, or its module fails during the import.
        """
        load_object(self.path)

    def build(self) -> Tracker:
        """Return the tracker that the user's class or function makes.

        Raises:
          ConfigError: the class or function raises an error, or its result lacks a method of
            `Tracker`.
        """
        found = call_object(self.path, load_object(self.path), self.args)
        missing = [name for name in ("start", "record", "end") if not hasattr(found, name)]
        if missing:
            raise ConfigError(
                f"{self.path!r} returned a {type(found).__name__} without {', '.join(missing)}: a "
                "tracker needs the methods start, record and end "
                "(jaxdist.metrics.trackers.contract.Tracker)",
                setting=("path",),
            )
        return found


TrackerConfig = Annotated[
    WandbConfig | TrackioConfig | MlflowConfig | ImportedTrackerConfig, Field(discriminator="type")
]


class MetricsConfig(Config):
    """The receivers of a run's numbers besides its files, metrics.jsonl and TensorBoard events."""

    trackers: tuple[TrackerConfig, ...] = ()
    """The trackers that receive every record; each tracker has a `type`."""
