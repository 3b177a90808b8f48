"""Data: scikit-learn's handwritten digits."""

import importlib.util
from pathlib import Path

import numpy as np


def load_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the training and held-out split: image uint8 [N, 8, 8, 1] and label int32 [N]."""
    # The file is read directly, because importing scikit-learn takes longer than the training.
    package = importlib.util.find_spec("sklearn")
    assert package is not None, "pip install scikit-learn"
    file = Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    table = table[np.random.RandomState(0).permutation(len(table))]
    image = np.round(table[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    label = table[:, -1].astype(np.int32)
    cut = len(label) - len(label) // 5
    train = {"image": image[:cut], "label": label[:cut]}
    return train, {"image": image[cut:], "label": label[cut:]}
