import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.models.functional import functional, nest, pick


class Noisy(nnx.Module):
    """Batch statistics, dropout, a list of layers: all kinds of state."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


X = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_nest_and_pick_are_inverse():
    paths = [("a", 0, "w"), ("a", 10, "w"), ("b",)]
    tree = nest(paths, [1, 2, 3])
    assert tree == {"a": {"0": {"w": 1}, "10": {"w": 2}}, "b": 3}
    assert pick(paths, tree) == [1, 2, 3]


def test_bound_module_computes_what_the_module_computes():
    model = functional(Noisy)
    params, buffers = model.init(jax.random.key(5))
    bound, original = model.bind(params, buffers), Noisy(nnx.Rngs(jax.random.key(5)))
    for module in (bound, original):
        module.eval()
    np.testing.assert_array_equal(bound(X), original(X))


def test_buffers_follow_the_forward_pass_and_parameters_do_not():
    model = functional(Noisy)
    params, buffers = model.init(jax.random.key(0))

    @jax.jit
    def forward(params, buffers):
        module = model.bind(params, buffers)
        module.train()
        module(X)
        return model.buffers_of(module)

    after = forward(params, buffers)
    assert jax.tree.structure(after) == jax.tree.structure(buffers)
    assert np.abs(after["norm"]["mean"] - buffers["norm"]["mean"]).max() > 0


def test_randomness_is_a_function_of_the_key():
    model = functional(Noisy)
    params, buffers = model.init(jax.random.key(0))

    def forward(seed):
        module = model.bind(params, buffers, jax.random.key(seed))
        module.train()
        return np.asarray(module(X))

    np.testing.assert_array_equal(forward(1), forward(1))
    assert (forward(1) != forward(2)).any()


def test_shapes_are_known_without_computing():
    model = functional(Noisy)
    assert isinstance(model.params["layers"]["10"]["kernel"], jax.ShapeDtypeStruct)
    params, buffers = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.params)
    assert jax.tree.map(jnp.shape, buffers) == jax.tree.map(jnp.shape, model.buffers)


def test_flax_logical_names_serve_as_dims():
    def make(rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        return nnx.Linear(4, 8, kernel_init=init, use_bias=False, rngs=rngs)

    assert functional(make).dims == {"kernel": ("embed", "mlp")}
