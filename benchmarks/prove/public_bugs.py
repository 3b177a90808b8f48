"""Public reports of wrong numbers in other frameworks, as steps on 4 devices with the mistake.

Each mistake also has the correct step of one device, for comparison.

The inner function sees a device's rows (or shard) along the axis d. Its arguments are `w`, the
parameters, and the rows `x` [B, 8], `y` [B] and weights `m` [B].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

ROWS, WIDTH, DEVICES = 16, 8, 4
F = Callable[..., Any]


class Bug(NamedTuple):
    """A public report of a mistake.

    Attributes:
      wrong: the function (w, x, y, m) -> (new w, value) of a device, with the mistake.
      right: the correct function on one device.
      split: how `w` is sharded.
      rows: how the batch is sharded.
    """

    wrong: F
    right: F
    split: P = P()
    rows: P = P("d")


def losses(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ w) - y) ** 2


def total(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> jax.Array:
    return (losses(w, x, y) * m).sum()


def safe(weight: jax.Array) -> jax.Array:
    return jnp.maximum(weight, 1e-6)


def mean(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = jax.value_and_grad(total)(w, x, y, m)
    return loss / safe(m.sum()), grad / safe(m.sum())


def plain(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = mean(w, x, y, m)
    return w - 0.1 * grad, loss


def summed(w: jax.Array, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the correct loss and gradient of all rows."""
    loss, grad = jax.value_and_grad(total)(w, *rows)
    weight = safe(lax.psum(rows[2].sum(), "d"))
    return lax.psum(loss, "d") / weight, lax.psum(grad, "d") / weight


def mean_of_means(w: jax.Array, *rows: jax.Array) -> Any:
    loss, grad = mean(w, *rows)
    return w - 0.1 * lax.pmean(grad, "d"), lax.pmean(loss, "d")


def empty_is_nan(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    grad = jax.grad(lambda w: total(w, x, y, m) / m.sum())(w)
    share = m.sum() / safe(lax.psum(m.sum(), "d"))
    return w - 0.1 * lax.psum(grad * share, "d"), share * 0


def norm_of_a_shard(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    clip = 1 / safe(jnp.sqrt((w * w).sum()))
    return w * jnp.minimum(1, clip), m.sum()


def counted_on_each(w: jax.Array, *rows: jax.Array) -> Any:
    _, grad = summed(w, *rows)
    norm = jnp.sqrt(lax.psum((grad * grad).sum(), "d"))
    return w - 0.1 * grad / safe(norm), norm


def by_norm(w: jax.Array, *rows: jax.Array) -> Any:
    _, grad = mean(w, *rows)
    norm = jnp.sqrt((grad * grad).sum())
    return w - 0.1 * grad / safe(norm), norm


def logged_by_root(w: jax.Array, *rows: jax.Array) -> Any:
    loss, grad = summed(w, *rows)
    return w - 0.1 * grad, loss * jnp.sqrt(1.0 * DEVICES)


def inside(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    """Differentiate a loss that is summed over devices, and sum the gradients a second time."""
    weight = safe(lax.psum(m.sum(), "d"))
    grad = jax.grad(lambda w: lax.psum(total(w, x, y, m), "d"))(w)
    return w - 0.1 * lax.psum(grad, "d") / weight, weight


def noise(w: jax.Array, shape: Any) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(0), jnp.int32(w.shape[0]))
    return jax.random.bernoulli(key, 0.5, shape).astype(w.dtype)


def same_mask(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    _, grad = summed(w, x * noise(w, x.shape), y, m)
    return w - 0.1 * grad, m.sum() * 0


def whole_mask(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    _, grad = mean(w, x * noise(w, x.shape), y, m)
    return w - 0.1 * grad, m.sum() * 0


def last_microbatch(w: jax.Array, *rows: jax.Array) -> Any:
    pieces = [leaf.reshape(2, -1, *leaf.shape[1:]) for leaf in rows]
    grads = [jax.grad(total)(w, *(leaf[i] for leaf in pieces)) for i in range(2)]
    return w - 0.1 * lax.psum(grads[-1], "d") / safe(lax.psum(rows[2].sum(), "d")), grads[0][0] * 0


def no_value(w: jax.Array, *rows: jax.Array) -> Any:
    return plain(w, *rows)[0], rows[2].sum() * 0


def with_auxiliary(w: jax.Array, *rows: jax.Array) -> Any:
    loss, grad = summed(w, *rows)
    head = jax.grad(lambda w: total(w * 2, *rows) / safe(rows[2].sum()))(w)
    return w - 0.1 * (grad + lax.pmean(head, "d")), loss


def right_auxiliary(w: jax.Array, *rows: jax.Array) -> Any:
    loss, grad = mean(w, *rows)
    head = jax.grad(lambda w: total(w * 2, *rows) / safe(rows[2].sum()))(w)
    return w - 0.1 * (grad + head), loss


def log_total(logits: jax.Array) -> jax.Array:
    """Return the logarithm of the sum of exponentials over all shards of a vocabulary."""
    most = lax.pmax(lax.stop_gradient(logits.max(1)), "d")
    return jnp.log(lax.psum(jnp.exp(logits - most[:, None]).sum(1), "d")) + most


def gathered_logits(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    logits = x @ lax.all_gather(w, "d", axis=1, tiled=True)
    return w, (log_total(logits) * m).sum()


def whole_logits(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    return w, (jax.nn.logsumexp(x @ w, axis=1) * m).sum()


def smoothed_by_a_shard(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    """Smooth labels over the columns of a device instead of over all columns."""
    logits = x @ w
    return w, ((log_total(logits) - logits.mean(1)) * m).sum()


def smoothed(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    return w, ((jax.nn.logsumexp(x @ w, axis=1) - (x @ w).mean(1)) * m).sum()


def recomputed_of_others(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    """Keep some columns of an activation on each device, and gather columns of other rows."""
    size = WIDTH // DEVICES
    own = lax.dynamic_slice_in_dim(jnp.tanh(x * w[None]), lax.axis_index("d") * size, size, 1)
    activation = lax.all_gather(own, "d", axis=1, tiled=True)
    return w - 0.1 * lax.psum((activation * x * m[:, None]).sum(0), "d"), m.sum() * 0


def recomputed(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    return w - 0.1 * (jnp.tanh(x * w[None]) * x * m[:, None]).sum(0), m.sum() * 0


def masked_by_others(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    other = lax.ppermute(m, "d", [(i, (i + 1) % DEVICES) for i in range(DEVICES)])
    return plain_sum(w, x, y, other)


def half_batches(rows: Any, shards: int) -> list[Any]:
    """Return two microbatches: the first and the second half of the rows of each device."""
    halves = [leaf.reshape(shards, 2, -1, *leaf.shape[1:]).swapaxes(0, 1) for leaf in rows]
    return [[leaf[i].reshape(-1, *leaf.shape[3:]) for leaf in halves] for i in range(2)]


def means_of_microbatches(w: jax.Array, *rows: jax.Array) -> Any:
    first, second = (mean(w, *half)[1] for half in half_batches(rows, 1))
    return w - 0.1 * lax.pmean((first + second) / 2, "d"), rows[2].sum() * 0


def whole_microbatches(w: jax.Array, *rows: jax.Array) -> Any:
    first, second = (mean(w, *half)[1] for half in half_batches(rows, DEVICES))
    return w - 0.1 * (first + second) / 2, rows[2].sum() * 0


def scaled_by_all(w: jax.Array, *rows: jax.Array) -> Any:
    """Multiply the mean over a device's rows by the count of all rows instead of its own rows."""
    count = lax.psum(rows[2].sum(), "d")
    return w - 0.1 * lax.psum(mean(w, *rows)[1] * count, "d"), count * 0


def summed_once(w: jax.Array, *rows: jax.Array) -> Any:
    return w - 0.1 * jax.grad(total)(w, *rows), rows[2].sum() * 0


def scale_of_heads(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    """Compute some of the heads (rows of `x`) on each device; all heads share the scale `w`."""
    out = lax.psum((jnp.tanh(x) * w[None]).sum(), "d")
    return w - 0.01 * 2 * (out - 1) * jnp.tanh(x).sum(0), out


def scale_of_all_heads(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    out = (jnp.tanh(x) * w[None]).sum()
    return w - 0.01 * 2 * (out - 1) * jnp.tanh(x).sum(0), out


def padded_vocabulary(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    logits = jnp.pad(x @ w, ((0, 0), (0, 1)))
    return w, (jnp.log(lax.psum(jnp.exp(logits).sum(1), "d")) * m).sum()


def sink_in_the_norm(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    """Count a parameter that is split over heads in the norm as if each device had all heads."""
    norm = jnp.sqrt((w * w).sum() + lax.psum((x * x).sum(), "d") / DEVICES)
    return w / norm, lax.pmean(norm, "d")


def whole_sink(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    norm = jnp.sqrt((w * w).sum() + (x * x).sum())
    return w / norm, norm


def replica_statistics(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    return 0.9 * w + 0.1 * x.mean(0), m.sum() * 0


def own_variance(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    return 0.9 * w + 0.1 * lax.pmean(x.var(0), "d"), lax.psum(m.sum(), "d")


def trust(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    update = 0.1 * jnp.sign(w)
    ratio = jnp.sqrt((w * w).sum()) / safe(jnp.sqrt((update * update).sum()))
    return w - ratio * update * jnp.arange(1.0, 1 + w.shape[0])[:, None], m.sum() * 0


def orthogonal(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    """Take one Newton-Schulz step on each shard, as if the shard were the whole matrix."""
    g = w / safe(jnp.sqrt((w * w).sum()))
    return w - 0.1 * (1.5 * g - 0.5 * g @ (g.T @ g)), m.sum() * 0


def factored(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    rows, columns = (w * w).mean(1, keepdims=True), (w * w).mean(0, keepdims=True)
    return w / jnp.sqrt(rows * columns / (w * w).mean() + 1e-3), m.sum() * 0


def noise_on_each(w: jax.Array, *rows: jax.Array) -> Any:
    _, grad = jax.value_and_grad(total)(w, *rows)
    return w - 0.1 * lax.psum(grad + noise(w, w.shape), "d"), rows[2].sum() * 0


def noise_once(w: jax.Array, *rows: jax.Array) -> Any:
    _, grad = jax.value_and_grad(total)(w, *rows)
    return w - 0.1 * (grad + noise(w, w.shape)), rows[2].sum() * 0


def rolled_labels(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    return plain_sum(w, x, jnp.roll(y, -1), m)


def plain_sum(w: jax.Array, *rows: jax.Array) -> Any:
    loss, grad = summed(w, *rows)
    return w - 0.1 * grad, loss


def whole_roll(w: jax.Array, x: jax.Array, y: jax.Array, m: jax.Array) -> Any:
    return plain(w, x, jnp.roll(y, -1), m)


def auxiliary_on_each(w: jax.Array, *rows: jax.Array) -> Any:
    def objective(w: jax.Array) -> jax.Array:
        return total(w, *rows) + 0.5 * (w * w).sum()

    return w - 0.1 * lax.psum(jax.grad(objective)(w), "d"), rows[2].sum() * 0


def auxiliary_once(w: jax.Array, *rows: jax.Array) -> Any:
    return w - 0.1 * (jax.grad(total)(w, *rows) + w), rows[2].sum() * 0


def evaluated_too_often(w: jax.Array, *rows: jax.Array) -> Any:
    loss, grad = summed(w, *rows)
    return w - 0.1 * grad, lax.psum(loss, "d")


def first_of_two_uses(w: jax.Array, *rows: jax.Array) -> Any:
    """Use a parameter twice, and sum only the gradient of its first use."""
    one, other = jax.grad(lambda a, b: total(a + b, *rows), argnums=(0, 1))(w / 2, w / 2)
    return w - 0.1 * (lax.psum(one, "d") + other), rows[2].sum() * 0


def both_uses(w: jax.Array, *rows: jax.Array) -> Any:
    return w - 0.2 * jax.grad(total)(w, *rows), rows[2].sum() * 0


def counts_examples(w: jax.Array, *rows: jax.Array) -> Any:
    loss, grad = summed(w, *rows)
    return w - 0.1 * grad, lax.psum(jnp.float32(rows[2].size), "d") + 0 * loss


def counts_weights(w: jax.Array, *rows: jax.Array) -> Any:
    return plain(w, *rows)[0], rows[2].sum()


def decays_stacks(w: jax.Array, *rows: jax.Array) -> Any:
    new, loss = plain_sum(w, *rows)
    return new - 0.01 * w, loss


COLUMNS, NO_ROWS = P(None, "d"), P()
BUGS: dict[str, Bug] = {
    "Megatron-LM#7452, 1: smoothing": Bug(smoothed_by_a_shard, smoothed, COLUMNS, NO_ROWS),
    "Megatron-LM#7452, 2: gathered logits": Bug(gathered_logits, whole_logits, COLUMNS, NO_ROWS),
    "Megatron-LM#7452, 3: head by local counts": Bug(with_auxiliary, right_auxiliary),
    "Megatron-LM#7452, 4: recomputed of other rows": Bug(recomputed_of_others, recomputed),
    "Megatron-LM#7452, 5: mask of another group": Bug(masked_by_others, plain),
    "Megatron-LM#7452, 8: norm of sinks": Bug(sink_in_the_norm, whole_sink, P("d")),
    "Megatron-LM#7452, 9: counts of microbatches": Bug(means_of_microbatches, whole_microbatches),
    "Megatron-LM#7452, 10: count of all tokens": Bug(scaled_by_all, summed_once),
    "Megatron-LM#7452, 11: scale of heads": Bug(scale_of_heads, scale_of_all_heads),
    "torchtitan#2206: mean of means": Bug(mean_of_means, plain),
    "Automodel#3796: an empty shard is NaN": Bug(empty_is_nan, no_value),
    "AReaL#312: norm of a shard": Bug(
        norm_of_a_shard, lambda w, x, y, m: norm_of_a_shard(w, x, y, m), P("d"), NO_ROWS
    ),
    "torchtitan#766: replicas in the norm": Bug(counted_on_each, by_norm),
    "miles_diffusion#35: logged by a root": Bug(logged_by_root, plain),
    "jax#3970: gradient of a psum": Bug(inside, lambda w, *r: (plain(w, *r)[0], safe(r[2].sum()))),
    "flax#2593: one mask on all shards": Bug(same_mask, whole_mask),
    "Automodel#3530: the last microbatch": Bug(last_microbatch, no_value),
    "unsloth#10616: padded vocabulary": Bug(padded_vocabulary, whole_logits, COLUMNS, NO_ROWS),
    "flax#2417: statistics of a replica": Bug(
        replica_statistics, lambda w, x, y, m: (0.9 * w + 0.1 * x.mean(0), m.sum() * 0)
    ),
    "pytorch#13711: mean of variances": Bug(
        own_variance, lambda w, x, y, m: (0.9 * w + 0.1 * x.var(0), m.sum())
    ),
    "mosaicml/composer#967: trust ratio of a shard": Bug(trust, trust, COLUMNS, NO_ROWS),
    "DeepSpeed#8437: a shard made orthogonal": Bug(orthogonal, orthogonal, COLUMNS, NO_ROWS),
    "a factored moment of a shard": Bug(factored, factored, COLUMNS, NO_ROWS),
    "jax_privacy: noise on each shard": Bug(noise_on_each, noise_once),
    "verl#4250: labels at the edge of shards": Bug(rolled_labels, whole_roll),
    "Megatron-LM#3769: scale of a regularizer": Bug(auxiliary_on_each, auxiliary_once),
    "transformers#48167: evaluation times devices": Bug(evaluated_too_often, plain),
    "a tied gradient that is summed once": Bug(first_of_two_uses, both_uses),
    "a log of another counter": Bug(counts_examples, counts_weights),
    "jaxformer#28: decay of what is not decayed": Bug(decays_stacks, plain),
    "a weight that a shard divides by": Bug(
        lambda w, *r: (w - 0.1 * lax.psum(mean(w, *r)[1], "d"), r[2].sum() * 0), no_value
    ),
}


def steps_of(bug: Bug, mesh: Mesh) -> tuple[Any, Any, Any, Any]:
    """Return the step with the mistake, the correct step, the state and the batch."""
    random = np.random.default_rng(3)
    shape = (WIDTH, WIDTH) if bug.split == COLUMNS else (WIDTH,)
    sharded = {"x": bug.rows, "y": bug.rows, "m": bug.rows}

    def spread(x: Any, spec: P) -> jax.Array:
        return jax.device_put(np.float32(x), jax.sharding.NamedSharding(mesh, spec))

    def local(state: Any, batch: Any) -> Any:
        w, value = bug.wrong(state["w"], batch["x"], batch["y"], batch["m"])
        return {"w": w}, {"value": value}

    def right(state: Any, batch: Any) -> Any:
        w, value = bug.right(state["w"], batch["x"], batch["y"], batch["m"])
        return {"w": w}, {"value": value}

    specs = {"w": bug.split}
    wrong = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, sharded), out_specs=(specs, P()), check_vma=False
    )
    batch = {"x": random.normal(size=(ROWS, WIDTH)), "y": random.normal(size=ROWS)}
    batch["m"] = np.ones(ROWS)
    state = {"w": spread(random.normal(size=shape), bug.split)}
    return wrong, right, state, {n: spread(a, sharded[n]) for n, a in batch.items()}
