"""Data: the source of Python's standard library, a byte a token."""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

WINDOW = 128  # tokens that an example predicts
HELDOUT_FRACTION = 0.01  # of the files


def load_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Windows of tokens int32 [N, WINDOW + 1], to train on and held out."""
    root, draws = Path(sysconfig.get_paths()["stdlib"]), {}
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if {"site-packages", "dist-packages", "__pycache__"} & {*name.split("/")}:
            continue
        content = (root / name).read_bytes().removeprefix(b"\xef\xbb\xbf")
        # A few files are not text, to test Python's own errors.
        if content and content.decode(errors="ignore").encode() == content:
            # The split depends on a file's name alone; of equal files the first one counts.
            digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()
            draws.setdefault(content, int.from_bytes(digest, "big") / 2**48)
    ordered = sorted(draws.values())
    threshold = min(max(HELDOUT_FRACTION, ordered[0]), ordered[-2])  # neither split is empty
    train = windows([content for content in draws if draws[content] > threshold])
    return train, windows([content for content in draws if draws[content] <= threshold])


def windows(documents: list[bytes]) -> dict[str, np.ndarray]:
    """Windows of one stream; the token 256 stands before each document and at the end."""
    tokens = [np.frombuffer(document, np.uint8).astype(np.int32) for document in documents]
    stream = np.concatenate([part for one in tokens for part in ([256], one)] + [[256]])
    # A window ends with the token that the next one begins with: each is predicted once.
    view = np.lib.stride_tricks.sliding_window_view(stream.astype(np.int32), WINDOW + 1)
    return {"tokens": view[::WINDOW]}
