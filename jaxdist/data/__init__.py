"""Data sources with random access by index, and the loader that reads global batches from a source.

The loader is not imported here, so that a configuration can be read before jax starts.
"""

from typing import Annotated

from pydantic import Field

from jaxdist.data.images.dataset import ImagesConfig
from jaxdist.data.imported import ImportConfig
from jaxdist.data.recommend.clicks import ClicksConfig
from jaxdist.data.recommend.criteo import CriteoConfig
from jaxdist.data.recommend.movielens import MovieLensConfig
from jaxdist.data.records.dataset import RecordsConfig
from jaxdist.data.source import Dataset, Source
from jaxdist.data.synthetic import SyntheticConfig
from jaxdist.data.text.chat import ChatConfig
from jaxdist.data.text.dataset import TextConfig
from jaxdist.data.text.labelled import LabelledTextConfig
from jaxdist.data.text.preferences import PreferencesConfig

DataConfig = Annotated[
    TextConfig
    | LabelledTextConfig
    | ChatConfig
    | PreferencesConfig
    | ImagesConfig
    | RecordsConfig
    | MovieLensConfig
    | CriteoConfig
    | ClicksConfig
    | SyntheticConfig
    | ImportConfig,
    Field(discriminator="type"),
]

__all__ = [
    "ChatConfig",
    "ClicksConfig",
    "CriteoConfig",
    "DataConfig",
    "Dataset",
    "ImagesConfig",
    "ImportConfig",
    "LabelledTextConfig",
    "MovieLensConfig",
    "PreferencesConfig",
    "RecordsConfig",
    "Source",
    "SyntheticConfig",
    "TextConfig",
]
