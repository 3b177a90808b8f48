"""A model that ties the rows of a batch together is found by its trace, whatever it is made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.models.adapters import from_linen
from jaxdist.models.loss import Mean


class OwnNorm(nnx.Module):
    """Subtracts the mean over rows, as no library's batch norm does it."""

    def __init__(self, rngs: nnx.Rngs):
        self.last = nnx.Linear(9, 3, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = image.reshape(image.shape[0], -1)
        return self.last(x - x.mean(0, keepdims=True))


class Flax(nnx.Module):
    """A batch norm of flax NNX, and a dropout, which draws for each row."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(9, 3, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        return self.last(self.dropout(self.norm(image.reshape(image.shape[0], -1))))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, image: jax.Array, train: bool) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train)(image.reshape(image.shape[0], -1))
        return linen.Dense(3)(x)


class Rowwise(nnx.Module):
    """Keeps rows apart, with all that may look otherwise: a scan, a norm, attention in a row."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(3, rngs=rngs)
        self.last = nnx.Linear(9, 3, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.norm(image[..., 0])
        x = jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x
        x, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(carry), None), x, None, length=2)
        return self.last(x.reshape(x.shape[0], -1))


class Repeated(Rowwise):
    """Halves all rows until no pixel of the batch is above 1."""

    def __call__(self, image: jax.Array) -> jax.Array:
        halved = jax.lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x / 2, image)
        return super().__call__(halved)


class Counted(Rowwise):
    """Divides by the number of times that the largest pixel of the batch can be halved."""

    def __call__(self, image: jax.Array) -> jax.Array:
        most = image.max()
        count = jax.lax.while_loop(lambda n: 2.0**n < most, lambda n: n + 1, 1.0)
        return super().__call__(image / count)


class Chosen(Rowwise):
    """Divides by a number that depends on the largest pixel of the batch."""

    def __call__(self, image: jax.Array) -> jax.Array:
        scale = jax.lax.cond(image.max() > 1, lambda: 2.0, lambda: 1.0)
        return super().__call__(image / scale)


class RepeatedByRow(Rowwise):
    """Halves each row until no pixel of the row is above 1."""

    def __call__(self, image: jax.Array) -> jax.Array:
        def halved(row: jax.Array) -> jax.Array:
            return jax.lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x / 2, row)

        return super().__call__(jax.vmap(halved)(image))


class Masked(Rowwise):
    """Halves each row until no pixel of the row is above 1, in one loop over all rows."""

    def __call__(self, image: jax.Array) -> jax.Array:
        def above(x: jax.Array) -> jax.Array:
            return jnp.any(x > 1, axis=(1, 2, 3), keepdims=True)

        halved = jax.lax.while_loop(
            lambda x: jnp.any(above(x)), lambda x: jnp.where(above(x), x / 2, x), image
        )
        return super().__call__(halved)


class Drawn(Rowwise):
    """Draws from a distribution for each pixel by itself; the sampler's loop runs for the last."""

    def __call__(self, image: jax.Array) -> jax.Array:
        drawn = jax.random.poisson(jax.random.key(0), jnp.abs(image))
        return super().__call__(drawn.astype(jnp.float32))


class RepeatedThrice(Rowwise):
    """Halves all rows three times."""

    def __call__(self, image: jax.Array) -> jax.Array:
        _, halved = jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / 2), (0, image)
        )
        return super().__call__(halved)


def linen_net(rngs: nnx.Rngs) -> nnx.Module:
    return from_linen(LinenNet(), jnp.zeros((1, 3, 3, 1)))(rngs)


def contrasted(module: Any, batch: Any) -> dict[str, Mean]:
    """A loss that compares each row with all others."""
    x = module(batch["image"].astype(jnp.float32))
    nats = -jnp.diag(jax.nn.log_softmax(x @ x.T))
    return {"loss": Mean((nats * batch["weight"]).sum(), batch["weight"].sum())}


def built(model: str, parallel: Any = None, loss: Any = None, **train: int) -> Experiment:
    sections = {
        "model": {"type": "import", "path": f"test_rows:{model}"},
        "data": {
            "type": "synthetic", "kind": "images", "height": 3, "width": 3, "channels": 1,
            "classes": 3, "heldout_examples": 0,
        },
        "loss": loss or {"type": "classification"},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"steps": 1, "batch_size": 16, **train},
        "mesh": {"data": 4},
        "sharding": {"params": {"*": "whole"}},
        "parallel": parallel or {},
    }  # fmt: skip
    return build(validate(Document(sections), ExperimentConfig), devices=jax.devices()[:4])


RING = {"reduce": {"type": "ring"}}
STRICT = {"deterministic": {"type": "strict", "shards": 8}}
CODEC = {"compression": {"type": "whole"}}
CONTRASTED = {"type": "import", "path": "test_rows:contrasted"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])


@pytest.mark.parametrize(
    ("model", "parallel", "loss"),
    [
        ("OwnNorm", RING, None),
        ("OwnNorm", CODEC, None),
        ("OwnNorm", {**RING, "zero": {"stage": 2}}, None),
        ("OwnNorm", STRICT, None),
        ("Flax", STRICT, None),
        ("linen_net", STRICT, None),
        ("Rowwise", RING, CONTRASTED),
        ("Repeated", RING, None),
        ("Counted", RING, None),
        ("Chosen", RING, None),
    ],
)
def test_what_would_compute_other_numbers_on_each_device_is_refused(model, parallel, loss, devices):
    with pytest.raises(
        ConfigError, match=r"computes across the examples of a batch \(\w+"
    ) as caught:
        built(model, parallel, loss)
    assert "parallel.batch_norm: local" in str(caught.value)
    # The user may want just that: statistics of each device's own rows.
    built(model, {**parallel, "batch_norm": "local"}, loss)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("Flax", RING),
        ("linen_net", RING),
        ("linen_net", CODEC),
        ("Rowwise", RING),
        ("Rowwise", STRICT),
        ("RepeatedByRow", RING),
        ("Masked", RING),
        ("Drawn", RING),
        ("RepeatedThrice", RING),
        ("OwnNorm", None),
    ],
)
def test_what_computes_the_same_numbers_is_not(model, parallel, devices):
    assert not any("ties" in notice for notice in built(model, parallel).notices)


@pytest.mark.parametrize(("model", "said"), [("Flax", 1), ("linen_net", 1), ("Rowwise", 0)])
def test_statistics_of_a_microbatch_are_told(model, said, devices):
    notices = built(model, microbatches=2).notices
    found = [notice for notice in notices if "microbatches 2: the model computes across" in notice]
    assert len(found) == said


def fixed(module: Any, batch: Any) -> dict[str, Mean]:
    """A loss that takes no number of rows but those of its user's batches."""
    assert batch["image"].shape[0] in (8, 16)
    x = module(batch["image"].astype(jnp.float32))
    return {"loss": Mean((x.sum(1) * batch["weight"]).sum(), batch["weight"].sum())}


def test_a_loss_that_takes_no_other_number_of_rows_is_told(devices):
    one = {"type": "import", "path": "test_rows:fixed"}
    (notice,) = built("Rowwise", {}, one, microbatches=2).notices
    assert notice.startswith("cannot determine whether the model computes across the")
