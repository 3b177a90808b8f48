"""Two small models in parts, and their gradients on one device.

Dims: M microbatches, R rows, L sequence, D embed, V vocab.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.hlo import ledger
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.functional import functional
from jaxdist.models.gpt import GptConfig
from jaxdist.models.hints import no_hint
from jaxdist.models.layers import scan_blocks
from jaxdist.models.loss import Mean, next_token
from jaxdist.parallel.pipeline.executor.execute import evaluate_pipeline, run_pipeline
from jaxdist.parallel.pipeline.executor.model_fns import (
    GradientsAndSums,
    ModelFns,
    StageSpecs,
    Visit,
)
from jaxdist.parallel.pipeline.executor.stage import StageContext
from jaxdist.parallel.pipeline.model.chunks import from_stages, to_stages
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.trees import flatten_with_names

LAYERS, ROWS, LENGTH, D, VOCAB = 8, 4, 8, 16, 32
GPT = GptConfig(type="gpt", layers=LAYERS, embed=D, heads=2, mlp=32, vocab_multiple=VOCAB)


def mlp(hint=no_hint, *, dropout=0.0, remat=False):
    """Return a model of residual tanh layers between a table and the same table, transposed."""

    def blocks(params, x_RLD, visit):
        keys = None
        if dropout and visit.key is not None:
            keys = jax.random.split(visit.key, len(params["up"]))

        def layer(x_RLD, own):
            weights, key = own
            h_RLD = jnp.tanh(x_RLD @ weights["up"])
            if key is not None:
                kept = jax.random.bernoulli(key, 1 - dropout, h_RLD.shape)
                h_RLD = jnp.where(kept, h_RLD / (1 - dropout), 0)
            return x_RLD + hint(h_RLD, "batch", "seq", "mlp") @ weights["down"], None

        policy = jax.checkpoint_policies.dots_saveable
        run = jax.checkpoint(layer, policy=policy) if remat else layer
        return jax.lax.scan(run, x_RLD, (params, keys))[0]

    def head(shared, x_RLD, visit):
        targets = shared["table"][visit.rows["tokens"][:, 1:]]
        off = jnp.sum((x_RLD - targets) ** 2)
        return off, {"loss": Mean(off, jnp.float32(ROWS)), "rows": jnp.float32(len(targets))}

    def params(key):
        up, down, table = jax.random.split(key, 3)
        shape = (LAYERS, D, D)
        layers = {
            "up": jax.random.normal(up, shape) * 0.3,
            "down": jax.random.normal(down, shape) * 0.3,
        }
        return layers, {"table": jax.random.normal(table, (VOCAB, D))}

    dims = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}, {"table": (None, None)}

    def embed(shared, visit):
        return shared["table"][visit.rows["tokens"][:, :-1]]

    return ModelFns(embed, blocks, head), params, dims


def gpt(hint=no_hint, config=GPT):
    """Return the decoder of `jaxdist.models.gpt` with a tied head."""
    model = functional(lambda rngs: config.build(rngs, vocab_size=VOCAB, hint=hint))

    def taken_apart(tree):
        shared = dict(tree)
        return shared.pop("blocks"), shared

    layers, rest = taken_apart(model.params)

    def bind(layers, shared):
        return model.bind({**shared, "blocks": layers}, {})

    def absent(shapes):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def embed(shared, visit):
        return bind(absent(layers), shared).embed(visit.rows["tokens"][:, :-1])

    def blocks(params, x, visit):
        return scan_blocks(bind(params, absent(rest)).blocks, x, None, remat=config.remat)

    def head(shared, x, visit):
        module = bind(absent(layers), shared)
        batch = {**visit.rows, "segments": None, "weight": jnp.ones(len(x), jnp.float32)}
        sums = next_token(lambda tokens, segments: module.head(x), batch)
        return sums["loss"].total, sums

    def params(key):
        made = model.init(key)[0]
        # The size is 1, because the first norm would otherwise magnify the rounding of its
        # gradient.
        return taken_apart({**made, "embedding": made["embedding"] / 0.02})

    names = [name for name, _ in flatten_with_names(model.params)]
    structure = jax.tree.structure(model.params)
    dims = structure.unflatten([model.dims[name] for name in names])
    return ModelFns(embed, blocks, head), params, taken_apart(dims)


MODELS = {
    "mlp": mlp,
    "mlp dots": partial(mlp, remat=True),
    "gpt": gpt,
    "wide gpt": partial(gpt, config=GPT.model_copy(update={"embed": 64, "mlp": 128})),
    "gpt dots": partial(gpt, config=GPT.model_copy(update={"remat": "dots"})),
    "gpt named": partial(gpt, config=GPT.model_copy(update={"remat": {"query": "save"}})),
    "dropout": partial(mlp, dropout=0.2),
}


def batch(microbatches):
    tokens = jax.random.randint(jax.random.key(7), (microbatches, ROWS, LENGTH + 1), 0, VOCAB)
    return {"tokens": tokens}


@cache
def alone(name, microbatches):
    """Return the parameters, and (layer gradients, shared gradients, total loss) on one device."""
    parts, params, _ = MODELS[name]()
    layers, shared = jax.jit(params)(jax.random.key(0))

    def total(layers, shared):
        found = 0.0
        for m in range(microbatches):
            rows = jax.tree.map(lambda leaf, m=m: leaf[m], batch(microbatches))
            visit = Visit(rows, jnp.int32(0), None)
            found += parts.head(
                shared, parts.blocks(layers, parts.embed(shared, visit), visit), visit
            )[0]
        return found

    value, grads = jax.jit(jax.value_and_grad(total, (0, 1)))(layers, shared)
    return (layers, shared), (*grads, value)


def on_mesh(sizes, devices=None):
    count = int(np.prod([*sizes.values()]))
    mesh = build_mesh(MeshConfig(**sizes), (devices or jax.devices())[:count])
    return make_layout(ShardingConfig(), mesh)


def to_chunks(layers, ticks):
    """Reshape leaves `[layers, ...]` to `[chunks, layers of a chunk, ...]`, ordered by stage."""
    chunks = jax.tree.map(lambda x: x.reshape(ticks.chunks, -1, *x.shape[1:]), layers)
    return to_stages(chunks, ticks.placement)


def from_chunks(places, ticks):
    chunks = from_stages(places, ticks.placement)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), chunks)


def specs_of(layout, dims, *lead):
    """Return partition specs for named dims; the dims in `lead` come first and are not split."""

    def spec(found):
        return layout.spec((*(None for _ in lead), *(d for d in found if d not in lead)))

    return jax.tree.map(spec, dims, is_leaf=lambda d: isinstance(d, tuple))


def structs(tree, shardings):
    """Return shapes with shardings, as `jax.device_put` returns arrays with shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def program(name, ticks, layout, key=None):
    """Return a jitted step of (chunk params, shared, batch), and a function that shards these."""
    parts, _, dims = MODELS[name](layout)
    data = tuple(axis for axis in ("data",) if axis in layout.mesh.axis_names)
    everywhere, chunks = PartitionSpec(), PartitionSpec("stage")

    specs = StageSpecs(
        specs_of(layout, dims[0], "layers"), specs_of(layout, dims[1]), PartitionSpec()
    )

    def local(params, shared, rows):
        own = key if ticks.trains else None
        stage = StageContext(ticks, parts, params, shared, rows, "stage", own, specs)
        return jax.lax.psum((run_pipeline if ticks.trains else evaluate_pipeline)(stage), data)

    function = jax.shard_map(
        local,
        mesh=layout.mesh,
        axis_names={"stage", *data},
        in_specs=(chunks, everywhere, PartitionSpec(None, data)),
        out_specs=GradientsAndSums(chunks, everywhere, everywhere) if ticks.trains else everywhere,
        check_vma=False,
    )

    def shardings(lead, specs):
        return jax.tree.map(
            lambda spec: NamedSharding(layout.mesh, PartitionSpec(*lead, *spec)),
            specs,
            is_leaf=lambda spec: isinstance(spec, PartitionSpec),
        )

    def place(params, shared, rows, put=jax.device_put):
        return (
            put(params, shardings(("stage",), specs.chunk)),
            put(shared, shardings((), specs.shared)),
            put(rows, shardings((None, data), jax.tree.map(lambda _: PartitionSpec(), rows))),
        )

    return jax.jit(function), place


def executable(name, ticks, layout):
    """Compile the step of a model ahead of time."""
    step, place = program(name, ticks, layout)
    layers, shared = jax.eval_shape(MODELS[name]()[1], jax.random.key(0))
    chunks = jax.eval_shape(lambda layers: to_chunks(layers, ticks), layers)
    rows = jax.eval_shape(lambda: batch(ticks.microbatches))
    return step.lower(*place(chunks, shared, rows, put=structs)).compile()


def compiled(name, ticks, layout):
    """Return the ledger of the compiled step of a model."""
    return ledger(executable(name, ticks, layout), layout.mesh)
