"""The files of Fashion-MNIST, which are found on the machine or downloaded, and always verified."""

from __future__ import annotations

import http.client
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxdist.config.files import replace_bytes
from jaxdist.data.cache import cache_directory, check_published
from jaxdist.data.images.idx import read_idx_content, unpack_gzip
from jaxdist.errors import DataError

HOME = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
TIMEOUT_SECONDS = 30

# These are digests of the unpacked contents, so they do not depend on the compression.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def fashion_mnist() -> dict[str, bytes]:
    """Return the unpacked contents of the four IDX files, by name.

    The files are searched for under share/datasets (where Debian's dataset-fashion-mnist puts them)
    and in the cache directory; if they are not found, they are downloaded into the cache directory.

    Raises:
      DataError: the files are neither found nor downloaded, or their content differs from the
        published content.
    """
    folder = find_folder(candidate_folders(os.environ))
    if folder is None:
        folder = cache_directory() / "fashion-mnist"
        _download(folder)
    paths = {name: _file(folder, name) for name in SHA256}
    return {
        name: check_published(read_idx_content(path), SHA256[name], str(path))
        for name, path in paths.items()
    }


def candidate_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the folders that may have Fashion-MNIST, beginning with the most likely folder."""
    shares = [Path(sys.prefix, "share"), Path("/usr/local/share"), Path("/usr/share")]
    if home := environ.get("XDG_DATA_HOME"):
        shares.append(Path(home))
    shares += [Path(part) for part in environ.get("XDG_DATA_DIRS", "").split(":") if part]
    for share in shares:
        yield share / "datasets" / "fashion-mnist"
    yield cache_directory(environ) / "fashion-mnist"


def find_folder(folders: Iterator[Path]) -> Path | None:
    """Return the first folder with all four files of Fashion-MNIST, or None if no folder has them.

    The files may be packed or unpacked.
    """
    for folder in folders:
        if all(_file(folder, name).is_file() for name in SHA256):
            return folder
    return None


def _file(folder: Path, name: str) -> Path:
    packed = folder / f"{name}.gz"
    return packed if packed.exists() else folder / name


def _download(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in SHA256:
            if not _file(folder, name).exists():
                _fetch(name, folder / f"{name}.gz")
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"data: Fashion-MNIST is not on this machine and cannot be fetched from {HOME}: "
            f"{error}. Install Debian's package dataset-fashion-mnist, or put "
            f"{', '.join(f'{name}.gz' for name in SHA256)} into {folder}, or use source: digits "
            "(small, from scikit-learn)"
        ) from error


def _fetch(name: str, target: Path) -> None:
    with urllib.request.urlopen(f"{HOME}{target.name}", timeout=TIMEOUT_SECONDS) as response:
        packed = response.read()
    # The digest also protects the download, which is by plain HTTP.
    source = f"{HOME}{target.name}"
    check_published(unpack_gzip(packed, source), SHA256[name], source)
    replace_bytes(target, packed)
