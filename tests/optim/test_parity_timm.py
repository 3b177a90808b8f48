"""`variant="timm"` against timm's own LAMB and LARS, where torch and timm are installed.

timm itself imports torchvision and more, its optimizers need torch alone: they are loaded without
the rest, so that `pip install --no-deps timm` is enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.optim.lamb import lamb
from jaxdist.optim.lars import lars

STEPS = 20
DECAY = 0.05
SHAPES = {
    "embedding": (50, 16),
    "kernel": (16, 32),
    "bias": (32,),
    "scale": (32,),
    "convolution": (3, 3, 4, 8),
    "temperature": (),
}
RATES = np.linspace(0.1, 0.01, STEPS, dtype=np.float32)


@pytest.fixture
def optimizers(monkeypatch):
    """Imports a module of timm.optim below empty packages."""
    pytest.importorskip("torch")
    timm = importlib.util.find_spec("timm")
    if timm is None or timm.origin is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    folder = Path(timm.origin).parent
    for name, path in (("timm", folder), ("timm.optim", folder / "optim")):
        empty = ModuleType(name)
        empty.__path__ = [str(path)]
        monkeypatch.setitem(sys.modules, name, empty)
    return lambda name: importlib.import_module(f"timm.optim.{name}")


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=s), np.float32) for name, s in SHAPES.items()}


@pytest.fixture
def gradients():
    """Every other one is smaller than the global norm that LAMB clips to."""
    rng = np.random.default_rng(1)
    return [
        {name: np.asarray(size * rng.normal(size=s), np.float32) for name, s in SHAPES.items()}
        for size in [1.0, 0.01] * (STEPS // 2)
    ]


def run_ours(transform, weights, gradients):
    weights = jax.tree.map(jnp.asarray, weights)
    state = transform.init(weights)
    step = jax.jit(transform.update)
    for gradient in gradients:
        updates, state = step(gradient, state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


def run_timm(optimizer, weights, gradients, **settings):
    """timm leaves it to its caller to exempt vectors from decay."""
    import torch

    tensors = {k: torch.nn.Parameter(torch.from_numpy(w.copy())) for k, w in weights.items()}
    matrices, vectors = ([t for t in tensors.values() if (t.ndim > 1) is m] for m in (True, False))
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = optimizer(groups, lr=1.0, **settings)
    for rate, gradient in zip(RATES, gradients, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        for name, tensor in tensors.items():
            tensor.grad = torch.from_numpy(gradient[name].copy())
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def schedule(count):
    return jnp.asarray(RATES)[count]


def close(found, expected, weights, *, rtol):
    for name, value in expected.items():
        assert np.abs(value - weights[name]).max() > 0.01, name
        atol = rtol * np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def test_lamb(optimizers, weights, gradients):
    ours = run_ours(lamb(schedule, weight_decay=DECAY, variant="timm"), weights, gradients)
    close(ours, run_timm(optimizers("lamb").Lamb, weights, gradients), weights, rtol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars(optimizers, weights, gradients, nesterov):
    transform = lars(schedule, 0.9, DECAY, 0.05, 1e-8, variant="timm", nesterov=nesterov)
    settings = {"momentum": 0.9, "trust_coeff": 0.05, "eps": 1e-8, "nesterov": nesterov}
    theirs = run_timm(optimizers("lars").Lars, weights, gradients, **settings)
    close(run_ours(transform, weights, gradients), theirs, weights, rtol=1e-5)
