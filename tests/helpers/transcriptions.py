"""LAMB and LARS in float64 numpy, written from the papers' formulas; each leaf is one layer."""

import numpy as np


def norm(x):
    return float(np.sqrt(np.sum(np.square(np.asarray(x, np.float64)))))


def lamb_paper(weights, grads, *, lr, b1, b2, eps, decay):
    """Return the weights after each gradient, by algorithm 2 with the identity as phi."""
    w, m, v = np.asarray(weights, np.float64), 0.0, 0.0
    for t, g in enumerate(np.asarray(grads, np.float64), 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w
        ratio = norm(w) / norm(r) if norm(w) and norm(r) else 1.0
        w = w - lr * ratio * r
    return w


def lars_paper(weights, grads, *, lr, momentum, eta, decay):
    """Return the weights after each gradient, by the following formulas.

    lambda = eta |w| / (|g| + decay |w|); v = momentum v + lr lambda (g + decay w); w -= v
    """
    w, v = np.asarray(weights, np.float64), 0.0
    for g in np.asarray(grads, np.float64):
        defined = norm(w) and norm(g)
        ratio = eta * norm(w) / (norm(g) + decay * norm(w)) if defined else 1.0
        v = momentum * v + lr * ratio * (g + decay * w)
        w = w - v
    return w


def lamb_timm(weights, grads, *, lr, b1, b2, eps, decay, max_grad_norm):
    """Return the weights by timm's `Lamb` (always_adapt off, no trust clip), with decay by name."""
    w = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    m, v = dict.fromkeys(w, 0.0), dict.fromkeys(w, 0.0)
    for t, given in enumerate(grads, 1):
        total = np.sqrt(sum(norm(g) ** 2 for g in given.values()))
        scale = max(total / max_grad_norm, 1.0)
        for name in w:
            g = np.asarray(given[name], np.float64) / scale
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g * g
            root = np.sqrt(v[name]) / np.sqrt(1 - b2**t) + eps
            update = m[name] / (1 - b1**t) / root
            if decay[name] != 0:
                update = update + decay[name] * w[name]
                if norm(w[name]) > 0 and norm(update) > 0:
                    update = update * norm(w[name]) / norm(update)
            w[name] = w[name] - lr * update
    return w


def lars_timm(weights, grads, *, lr, momentum, eta, eps, decay, nesterov=False):
    """Return the weights by timm's `Lars` (always_adapt off, no trust clip).

    The learning rate is applied after the momentum.
    """
    w, buffer = np.asarray(weights, np.float64), None
    for rate, g in zip(lr, np.asarray(grads, np.float64), strict=True):
        if decay != 0:
            ratio = 1.0
            if norm(w) > 0 and norm(g) > 0:
                ratio = eta * norm(w) / (norm(g) + norm(w) * decay + eps)
            g = (g + decay * w) * ratio
        buffer = g if buffer is None else momentum * buffer + g
        w = w - rate * (g + momentum * buffer if nesterov else buffer)
    return w
