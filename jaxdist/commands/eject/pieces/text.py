"""Data: the source of Python's standard library, one token per byte."""

import hashlib
import os
from pathlib import Path

import numpy as np

WINDOW = 128  # tokens that an example predicts
HELDOUT_FRACTION = 0.01  # fraction of the files that is held out


def load_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return windows of tokens int32 [N, WINDOW + 1] for training, and held-out windows."""
    root, draws = Path(os.__file__).parent, {}
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if {"site-packages", "dist-packages", "__pycache__"} & {*name.split("/")}:
            continue
        content = (root / name).read_bytes().removeprefix(b"\xef\xbb\xbf")
        # A few files are deliberately not valid text, since they test Python's errors.
        if content and content.decode(errors="ignore").encode() == content:
            # The split depends only on a file's name; of files with equal content the first counts.
            digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()
            draws.setdefault(content, int.from_bytes(digest, "big") / 2**48)
    ordered = sorted(draws.values())
    threshold = min(max(HELDOUT_FRACTION, ordered[0]), ordered[-2])  # neither split is empty
    train = windows([content for content in draws if draws[content] > threshold])
    return train, windows([content for content in draws if draws[content] <= threshold])


def windows(documents: list[bytes]) -> dict[str, np.ndarray]:
    """Return windows of one stream; token 256 precedes each document and ends the stream."""
    tokens = [np.frombuffer(document, np.uint8).astype(np.int32) for document in documents]
    stream = np.concatenate([part for one in tokens for part in ([256], one)] + [[256]])
    # Windows overlap by one token, so that each token is predicted once.
    view = np.lib.stride_tricks.sliding_window_view(stream.astype(np.int32), WINDOW + 1)
    return {"tokens": view[::WINDOW]}
