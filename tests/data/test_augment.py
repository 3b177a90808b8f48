"""Random changes of images: what they keep, and what they depend on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.data.augment import AugmentConfig
from jaxdist.data.draws import Draws
from jaxdist.data.loader import Loader
from jaxdist.data.source import ArraySource, Dataset
from jaxdist.data.transform import transformed
from jaxdist.errors import DataError
from jaxdist.models.loss import classification

IMAGE = np.arange(40 * 6 * 5, dtype=np.uint8).reshape(40, 6, 5, 1)
LABEL = np.arange(40, dtype=np.int32) % 7


def dataset(**settings: Any) -> Dataset:
    source = ArraySource(image=IMAGE, label=LABEL)
    plain = Dataset(source, source, None, 7, "images")
    config = AugmentConfig.model_validate({"type": "augment", "std": 1.0, **settings})
    return transformed(plain, config)


def loader(data: Dataset, **settings: Any) -> Loader:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return Loader(data.train, sharding=lambda *_: sharding, **{"batch_size": 8, **settings})


def images(data: Dataset, step: int, **settings: Any) -> np.ndarray:
    return np.asarray(loader(data, **settings).batch(step)["image"])


def test_a_crop_is_a_window_of_its_image_and_every_window_occurs() -> None:
    data = dataset(crop=4)
    found = set()
    for step in range(60):
        for image in images(data, step):
            windows = [
                (i, r, c)
                for i in range(40)
                for r in range(3)
                for c in range(2)
                if (IMAGE[i, r : r + 4, c : c + 4] == image).all()
            ]
            assert windows
            found |= {window[1:] for window in windows}
    assert found == {(r, c) for r in range(3) for c in range(2)}


def test_a_border_without_a_crop_moves_images_by_up_to_its_width() -> None:
    data = dataset(pad=1)
    keys = np.arange(40, dtype=np.uint64)
    image = data.train.draw(np.full(40, 3), keys)["image"]  # type: ignore[attr-defined]
    padded = np.pad(IMAGE[3], ((1, 1), (1, 1), (0, 0)))
    moved = [padded[r : r + 6, c : c + 5] for r in range(3) for c in range(3)]
    assert all(any((window == one).all() for window in moved) for one in image)
    assert len(np.unique(image, axis=0)) > 5


def test_a_flip_mirrors_about_half_of_the_images() -> None:
    data = dataset(flip=True)
    indices = np.arange(40)
    mirrored = 0
    for step in range(50):
        keys = np.arange(step * 40, step * 40 + 40, dtype=np.uint64)
        image = data.train.draw(indices, keys)["image"]  # type: ignore[attr-defined]
        same = (image == IMAGE).all((1, 2, 3))
        other = (image == IMAGE[:, :, ::-1]).all((1, 2, 3))
        assert (same | other).all()
        mirrored += int((other & ~same).sum())
    assert 0.46 < mirrored / 2000 < 0.54


def test_cutout_sets_a_square_to_the_mean() -> None:
    data = dataset(cutout=2, mean=-1.0)  # no pixel of these images is the mean
    keys = np.arange(40, dtype=np.uint64)
    image = data.train.draw(np.arange(40), keys)["image"]  # type: ignore[attr-defined]
    cut = (image == 0).sum((1, 2, 3))
    assert set(cut) <= {1, 2, 4}
    assert (cut == 4).any()
    kept = image != 0
    np.testing.assert_array_equal(image[kept], (IMAGE + 1.0)[kept])


def test_the_same_places_give_the_same_images_in_any_batch_and_after_a_resume() -> None:
    data = dataset(crop=5, pad=1, flip=True, cutout=2, mixup=0.4)
    whole = images(data, 0, batch_size=16)
    np.testing.assert_array_equal(images(data, 1), whole[8:])
    later = loader(data).resized(8, start_example=8).batch(0)["image"]
    np.testing.assert_array_equal(np.asarray(later), whole[8:])
    rows = loader(data, batch_size=16).part(4, 8).batch(0)["image"]
    np.testing.assert_array_equal(np.asarray(rows), whole[4:12])


def test_epochs_and_seeds_differ() -> None:
    data = dataset(crop=4, pad=2, flip=True)
    first, later = (images(data, step, shuffle=False) for step in (0, 5))
    assert (first != later).any()
    assert (first != images(data, 0, shuffle=False, seed=1)).any()


def test_mixup_mixes_labels_as_it_mixes_images() -> None:
    data = dataset(mixup=1.0)
    keys = np.arange(4000, dtype=np.uint64)
    indices = np.arange(4000) % 40
    found = data.train.draw(indices, keys)  # type: ignore[attr-defined]
    share = found["mixed_share"]
    # Beta(1, 1) is uniform; the smaller of x and 1 - x is uniform up to a half.
    assert share.min() >= 0
    assert share.max() <= 0.5
    assert abs(share.mean() - 0.25) < 0.01
    partner = next(
        i
        for i in range(40)
        if np.allclose((1 - share[7]) * IMAGE[7] + share[7] * IMAGE[i], found["image"][7])
    )
    assert found["mixed_label"][7] == LABEL[partner]


def test_the_loss_of_a_mixed_image_is_that_of_its_labels_in_their_shares() -> None:
    logits = jax.random.normal(jax.random.key(0), (3, 7))
    batch = {"image": jnp.zeros((3, 2, 2, 1)), "weight": jnp.ones(3)}

    def nats(**fields: jax.Array) -> float:
        sums = classification(lambda image: logits, {**batch, **fields}, label_smoothing=0.0)
        return float(sums["loss"][0])

    one, two, share = jnp.array([1, 2, 3]), jnp.array([4, 2, 0]), jnp.full(3, 0.25)
    mixed = nats(label=one, mixed_label=two, mixed_share=share)
    np.testing.assert_allclose(mixed, 0.75 * nats(label=one) + 0.25 * nats(label=two), rtol=1e-6)


def test_held_out_images_are_cropped_at_their_centre_and_not_changed() -> None:
    data = dataset(crop=4, pad=1, flip=True, cutout=2, mixup=0.5)
    assert data.heldout is not None
    for split in (data.heldout, data.train):
        found = split[3]
        np.testing.assert_array_equal(found["image"], IMAGE[3, 1:5, 0:4])
        assert (found["mixed_share"], found["mixed_label"]) == (0, LABEL[3])


def test_numbers_of_different_keys_and_calls_are_unrelated() -> None:
    draws = Draws(np.arange(20_000, dtype=np.uint64))
    first, second = draws.uniform(), draws.uniform()
    for values in (first, second):
        assert abs(values.mean() - 0.5) < 0.01
        assert values.min() >= 0
        assert values.max() < 1
    for a, b in ((first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_a_crop_beyond_the_image_is_refused() -> None:
    with pytest.raises(DataError, match=r"crop 7 exceeds images of 6 x 5 pixels.*at most 5"):
        loader(dataset(crop=7))
