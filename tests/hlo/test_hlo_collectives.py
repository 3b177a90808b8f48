"""Each collective of a real compiled program, on CPU and on TPU compiled without a TPU."""

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import only, ring, traffic
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.hlo import LedgerError, ledger

BYTES = 1024 * 256 * 4


@pytest.mark.parametrize(
    ("axes", "size"),
    [("data", 2), ("tensor", 4), (("data", "tensor"), 8)],
)
def test_all_reduce(program, axes, size):
    p = program(data=2, tensor=4)
    one = only(p.ledger(lambda x: lax.psum(x, axes), p.array(1024, 256)))
    assert one.kind == "all-reduce"
    assert one.axes == ((axes,) if isinstance(axes, str) else axes)
    assert (one.group_size, one.payload_bytes, one.dtypes) == (size, BYTES, ("f32",))
    assert one.sent_bytes == pytest.approx(2 * (size - 1) / size * BYTES)
    assert (one.times_low, one.times_high) == (1, 1)
    assert not one.is_async
    assert one.source.endswith("psum")


def test_axes_that_are_not_neighbours(program):
    p = program(data=2, tensor=2, expert=2)
    one = only(p.ledger(lambda x: lax.psum(x, ("data", "expert")), p.array(1024)))
    assert one.axes == ("data", "expert")
    assert one.groups == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_combined_all_reduces(program):
    p = program(data=8)
    one = only(
        p.ledger(
            lambda x, y: (lax.psum(x, "data"), lax.psum(y, "data")),
            p.array(1024),
            p.array(333),
            out=(P(), P()),
        )
    )
    assert one.dtypes == ("f32", "f32")
    assert one.payload_bytes == 4 * (1024 + 333)


@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter(program, dim):
    p = program(data=2, tensor=4)
    one = only(
        p.ledger(
            lambda x: lax.psum_scatter(x, "tensor", scatter_dimension=dim, tiled=True),
            p.array(1024, 256),
            out=P("tensor") if dim == 0 else P(None, "tensor"),
        )
    )
    assert (one.kind, one.axes) == ("reduce-scatter", ("tensor",))
    assert (one.payload_bytes, one.sent_bytes) == (BYTES, 0.75 * BYTES)


def test_all_gather(program):
    p = program(data=2, tensor=4)
    argument = p.array(1024, 256, spec=P("tensor"))
    one = only(p.ledger(lambda x: lax.all_gather(x, "tensor", tiled=True), argument))
    assert (one.kind, one.axes, one.dtypes) == ("all-gather", ("tensor",), ("f32",))
    assert (one.payload_bytes, one.sent_bytes) == (BYTES, 0.75 * BYTES)


def test_the_dtype_is_that_on_the_wire(program, backend):
    """XLA:CPU sends bfloat16 as float32, and the ledger says so."""
    p = program(data=8)
    argument = p.array(1024, 256, dtype=jnp.bfloat16)
    one = only(p.ledger(lambda x: lax.psum(x, "data"), argument))
    dtype, size = {"cpu": ("f32", 4), "tpu": ("bf16", 2)}[backend]
    assert (one.dtypes, one.payload_bytes) == ((dtype,), 1024 * 256 * size)


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (1, 0)])
def test_all_to_all(program, split, concat):
    """XLA:CPU writes it as a tuple of blocks, XLA:TPU as one array."""
    p = program(data=2, tensor=4)
    one = only(
        p.ledger(
            lambda x: lax.all_to_all(x, "tensor", split, concat, tiled=True),
            p.array(1024, 256, spec=P(("data", "tensor"))),
            out=P(("data", "tensor")),
        )
    )
    assert (one.kind, one.axes) == ("all-to-all", ("tensor",))
    assert (one.payload_bytes, one.sent_bytes) == (BYTES // 8, 0.75 * BYTES / 8)


@pytest.mark.parametrize(("axis", "size"), [("data", 2), ("tensor", 4)])
def test_permute(program, backend, axis, size):
    p = program(data=2, tensor=4)
    one = only(p.ledger(lambda x: lax.ppermute(x, axis, ring(size)), p.array(1024, 256)))
    assert (one.kind, one.axes, one.group_size) == ("collective-permute", (axis,), size)
    assert one.payload_bytes == one.sent_bytes == BYTES
    assert one.is_async == (backend == "tpu")
    assert not one.overlapped
    step = 4 if axis == "data" else 1
    assert (0, step) in one.groups
    assert len(one.groups) == 8


def test_a_permute_over_two_axes(program):
    p = program(data=2, tensor=4)
    one = only(p.ledger(lambda x: lax.ppermute(x, ("data", "tensor"), ring(8)), p.array(64)))
    assert (one.axes, one.group_size) == (("data", "tensor"), 8)


def test_groups_within_an_axis_have_no_axes(program):
    p = program(data=8)
    one = only(
        p.ledger(
            lambda x: lax.all_gather(
                x, "data", axis_index_groups=[[0, 3, 4, 7], [1, 2, 5, 6]], tiled=True
            ),
            p.array(1024, spec=P("data")),
            out=P("data"),
        )
    )
    assert one.axes is None
    assert one.group_size == 4
    assert one.groups == ((0, 3, 4, 7), (1, 2, 5, 6))
    assert one.sent_bytes == 0.75 * 4 * 128 * 4


def test_another_order_of_the_devices(program):
    """The text counts positions of the program's own mesh; the ledger names axes of the given."""
    p = program(data=2, tensor=4)
    compiled = p.compile_local(lambda x: lax.psum(x, "tensor"), p.array(1024))
    swapped = Mesh(p.mesh.devices.T, ("tensor", "data"), axis_types=(AxisType.Auto,) * 2)
    assert only(ledger(compiled, swapped)).axes == ("tensor",)


def test_shardings_give_collectives_too(program):
    """Auto axes: XLA writes these groups as iotas and as axes of a mesh of its own."""
    p = program(data=2, tensor=4)
    w = p.array(512, 2048, spec=P("data", "tensor"))
    x = p.array(256, 512, spec=P("data", None))
    found = ledger(p.compile(lambda x, w: (x @ w).sum(), x, w), p.mesh)
    sent = traffic(found)
    assert ("all-gather", ("data",)) in sent
    assert all(axes for _, axes in sent)
    # The sum's scalar apart, this is the gather of w's columns on the device.
    gathered = sum(bytes for (kind, _), bytes in sent.items() if kind == "all-gather")
    assert gathered in (512 * 512 * 4 / 2, 512 * 512 * 2 / 2)


def test_totals(program):
    p = program(data=2, tensor=4)
    found = p.ledger(lambda x: lax.psum(lax.ppermute(x, "tensor", ring(4)), "data"), p.array(1024))
    assert found.devices == 8
    assert found.axes == {"data": 2, "tensor": 4}
    assert found.sent_bytes("tensor") == found.sent_bytes("data") == 4096
    assert found.sent_bytes() == 8192
    assert found.sent_bytes("stage") == 0
    assert (found.count("all-reduce"), found.count("all-to-all")) == (1, 0)
    plain = found.to_json()
    assert plain["collectives"][0]["times_high"] == 1
    assert set(plain) >= {"flops_low", "flops_high", "memory", "devices", "axes", "unknown_loops"}


def test_one_device(devices):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:1])
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()
    found = ledger(compiled, mesh)
    assert (found.collectives, found.devices, found.flops_low) == ((), 1, 2 * 64**3)


@pytest.mark.every(2)
def test_memory(program):
    """XLA:CPU keeps twice the argument behind the barrier; whether a TPU does is its version's."""
    p = program(data=8)
    local = 2**26 * 4

    def function(x):
        twice = lax.optimization_barrier(2 * x)
        return twice + jnp.sin(twice).sum()

    compiled = p.compile_local(function, p.array(2**26))
    memory, stats = ledger(compiled, p.mesh).memory, compiled.memory_analysis()
    assert (memory.argument_bytes, memory.output_bytes) == (local, local)
    assert (memory.alias_bytes, memory.temp_bytes) == (0, stats.temp_size_in_bytes)
    assert memory.code_bytes == stats.generated_code_size_in_bytes
    assert memory.temp_bytes >= local or p.mesh.devices.flat[0].platform == "tpu"
    assert memory.peak_bytes >= 2 * local + memory.temp_bytes


def test_memory_of_a_donated_argument(program):
    p = program(data=8)
    jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
    memory = ledger(jitted.lower(p.array(2**24, spec=P("data"))).compile(), p.mesh).memory
    assert memory.alias_bytes == memory.argument_bytes == 2**23
    assert 2**23 <= memory.peak_bytes < 1.5 * 2**23


def test_a_mesh_of_another_size_is_refused(cpu_program, devices):
    p = cpu_program(data=8)
    compiled = p.compile_local(lambda x: lax.psum(x, "data"), p.array(8))
    other = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:4])
    with pytest.raises(
        LedgerError, match=r"\[0, 1, 2, 3, 4, 5, 6, 7\].*the mesh has \[0, 1, 2, 3\]"
    ):
        ledger(compiled, other)
