"""Train a convolutional network on images, watch the held-out accuracy, then classify with it.

    python examples/image_job.py                                # handwritten digits, 20 epochs
    python examples/image_job.py data.source=fashion-mnist train.epochs=2    # downloaded once

The program prints the accuracy of each evaluation, stops when it is good enough (0.98), and shows
some held-out images with the predicted classes. The run is in runs/image_job.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import jaxdist

CONFIG = Path(__file__).parents[1] / "configs/cnn/digits.yaml"
SETTINGS = ["mesh={data: -1}", "eval.every=100", "run.directory=runs/image_job"]
GOOD_ENOUGH = 0.98
SHADES = " .:-=+*#%@"


class Accuracy(jaxdist.Hook):
    """A hook that prints the accuracy of each evaluation, and ends the run if it is good enough."""

    def evaluation(self, run: Any, step: int, means: Any) -> None:
        run.say(f"step {step}: held-out accuracy {means['accuracy']:.3f}")
        if means["accuracy"] >= GOOD_ENOUGH:
            run.stop(f"held-out accuracy {GOOD_ENOUGH} is reached")


def classify(found: jaxdist.FitResult, count: int) -> tuple[np.ndarray, ...]:
    """Return the first held-out images, with their labels and the predicted classes."""
    assert found.experiment.heldout is not None
    with found.experiment.heldout.evaluation_batches(1) as batches:
        batch = next(batches)
    program = found.experiment.program
    module: Any = program.model.bind(found.state.params, found.state.buffers)
    module.eval()
    guess = module(batch["image"] / np.float32(255)).argmax(-1)
    return tuple(np.asarray(x)[:count] for x in (batch["image"], batch["label"], guess))


def drawn(image: np.ndarray) -> str:
    """Draw an image as text."""
    shades = (image[..., 0].astype(int) * (len(SHADES) - 1)) // 255
    return "\n".join("".join(2 * SHADES[shade] for shade in row) for row in shades)


def main(overrides: list[str]) -> float:
    """Train and classify; return the held-out accuracy."""
    found = jaxdist.fit(CONFIG, [*SETTINGS, *overrides], hooks=[Accuracy()])
    image, label, guess = classify(found, 3)
    for i in range(len(image)):
        print(f"\nlabel {label[i]}, taken for {guess[i]}\n{drawn(image[i])}")
    return found.heldout["accuracy"]


if __name__ == "__main__":
    main(sys.argv[1:])
