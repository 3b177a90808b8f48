"""Asynchronous collectives: counted once, and told apart by what runs meanwhile."""

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import only, ring, traffic
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.hlo import ledger, ledger_of_text


def test_a_permute_beside_a_dot_is_overlapped(tpu_program):
    p = tpu_program(data=8)
    arguments = (p.array(512, 512), p.array(512, 512))

    def beside(x, w):
        return lax.ppermute(x, "data", ring(8)), jnp.tanh(w @ w)

    def after(x, w):
        w = jnp.tanh(w @ w)
        return lax.ppermute(x + w[0, 0], "data", ring(8)), w

    for function, overlapped in ((beside, True), (after, False)):
        one = only(p.ledger(function, *arguments, out=(P(), P())))
        assert (one.is_async, one.overlapped) == (True, overlapped)


@pytest.mark.full
def test_tpu_carries_gathers_on_in_fusions(tpu_program):
    """The text holds the gather of `b` three times: at the start, beside the dot, at the end."""
    p = tpu_program(data=2, tensor=4)
    x = p.array(16, 512, 1024, spec=P("data", "tensor"), dtype=jnp.bfloat16)
    a = p.array(1024, 4096, spec=P(None, "tensor"), dtype=jnp.bfloat16)
    b = p.array(4096, 1024, spec=P("tensor"), dtype=jnp.bfloat16)
    compiled = p.compile(lambda x, a, b: jnp.tanh(x @ a) @ b, x, a, b)
    assert compiled.as_text().count(" all-gather(") == 4
    found = ledger(compiled, p.mesh)
    assert found.count("all-gather") == 2
    assert found.sent_bytes("tensor") == 2 * 0.75 * 1024 * 4096 * 2
    assert [(one.is_async, one.overlapped) for one in found.collectives] == [
        (False, False),
        (True, True),
    ]


@pytest.mark.full
def test_tpu_fuses_reduce_scatters(tpu_program):
    """The text holds an all-reduce and a dynamic-slice in a fusion."""
    p = tpu_program(data=8)
    w = p.array(4, 1024, 4096, spec=P(None, "data"), dtype=jnp.bfloat16)
    x = p.array(512, 1024, spec=P("data"), dtype=jnp.bfloat16)
    v = p.array(4, 4096, 1024, spec=P(None, "data"), dtype=jnp.bfloat16)

    def loss(w, v, x):
        x, _ = lax.scan(lambda x, wv: (x + jnp.tanh(x @ wv[0]) @ wv[1], None), x, (w, v))
        return (x.astype(jnp.float32) ** 2).sum()

    def gradients(w, v, x):
        sharding = NamedSharding(p.mesh, P(None, "data"))
        by_w, by_v = jax.grad(loss, argnums=(0, 1))(w, v, x)
        constrain = lax.with_sharding_constraint
        return constrain(by_w, sharding), constrain(by_v, sharding)

    compiled = p.compile(gradients, w, v, x)
    text = compiled.as_text()
    assert text.count("calls=%all-reduce-scatter") == 1
    assert " reduce-scatter(" not in text
    found = ledger(compiled, p.mesh)
    (scatter,) = (one for one in found.collectives if one.kind == "reduce-scatter")
    assert (scatter.axes, scatter.times_low, scatter.times_high) == (("data",), 4, 4)
    assert scatter.payload_bytes == 1024 * 4096 * 2
    assert traffic(found)["reduce-scatter", ("data",)] == 4 * 7 / 8 * 1024 * 4096 * 2
    assert scatter.source.endswith("dot_general")
    assert found.count("all-reduce") == 0


STARTS = """HloModule starts, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%wrapped (p: f32[16]) -> f32[4] {{
  %p = f32[16]{{0}} parameter(0)
  ROOT %scatter = f32[4]{{0}} reduce-scatter(%p), channel_id=9, replica_groups=[1,4]<=[4], use_global_device_ids=true, dimensions={{0}}, to_apply=%add
}}, execution_thread="parallel"

ENTRY %main (x: f32[16], y: f32[64]) -> f32[64] {{
  %x = f32[16]{{0}} parameter(0)
  %y = f32[64]{{0}} parameter(1)
  %start = {start}
  {between}
  %done = f32[64]{{0}} {done}
  ROOT %out = f32[64]{{0}} sine(%y)
}}
"""  # noqa: E501  (HLO has one instruction a line)
GROUPS = "channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true"
COMPUTE = "%work = f32[64]{0} cosine(%y)"
SPELLINGS = {
    "all-reduce": (f"f32[16]{{0}} all-reduce-start(%x), {GROUPS}, to_apply=%add", 64, 96),
    "all-gather": (
        f"(f32[16]{{0}}, f32[64]{{0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}",
        256,
        192,
    ),
    "collective-permute": (
        "(f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, "
        "source_target_pairs={{0,1},{1,2}}",
        64,
        64,
    ),
    "reduce-scatter": (
        "((f32[16]{0}), f32[4]{0}, u32[]) async-start(%x), "
        'async_execution_thread="parallel", calls=%wrapped',
        64,
        48,
    ),
    "all-to-all": (f"((f32[16]{{0}}), f32[16]{{0}}) all-to-all-start(%x), {GROUPS}", 64, 48),
    "collective-broadcast": (
        f"((f32[16]{{0}}), f32[16]{{0}}) collective-broadcast-start(%x), {GROUPS}",
        64,
        64,
    ),
}


@pytest.mark.parametrize("kind", SPELLINGS)
@pytest.mark.parametrize(
    ("between", "overlapped"),
    [
        (COMPUTE, True),
        ("%one = s32[] constant(1)\n  %two = s32[] add(%one, %one)", False),
        ("%moved = f32[64]{0} copy(%y)", False),
    ],
    ids=["compute", "scalar", "copy"],
)
def test_start_and_done(kind, between, overlapped):
    start, payload, sent = SPELLINGS[kind]
    done = "async-done(%start)" if "async-start" in start else f"{kind}-done(%start)"
    text = STARTS.format(start=start, between=between, done=done)
    one = only(ledger_of_text(text, {"data": 4}))
    assert (one.kind, one.axes, one.group_size) == (kind, ("data",), 4)
    assert (one.payload_bytes, one.sent_bytes) == (payload, sent)
    assert (one.is_async, one.overlapped) == (True, overlapped)


@pytest.mark.parametrize(("between", "overlapped"), [(COMPUTE, True), ("", False)])
def test_an_async_update_is_no_end(between, overlapped):
    start = SPELLINGS["reduce-scatter"][0]
    update = f"%update = ((f32[16]{{0}}), f32[4]{{0}}, u32[]) async-update(%start)\n  {between}"
    text = STARTS.format(start=start, between=update, done="async-done(%update)")
    assert only(ledger_of_text(text, {"data": 4})).overlapped == overlapped


def test_a_loop_meanwhile_is_compute():
    start = SPELLINGS["all-reduce"][0]
    text = STARTS.format(
        start=start,
        between="%more = f32[64]{0} call(%y), to_apply=%idle",
        done="all-reduce-done(%start)",
    )
    idle = "%idle (q: f32[64]) -> f32[64] {\n  ROOT %q = f32[64]{0} parameter(0)\n}\n\nENTRY"
    assert only(ledger_of_text(text.replace("ENTRY", idle), {"data": 4})).overlapped


FUSED = """HloModule fused, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%all-reduce-scatter (p: f32[16]) -> f32[4] {{
  %p = f32[16]{{0}} parameter(0)
  %all = f32[16]{{0}} all-reduce(%p), channel_id=1, replica_groups={{{{0,1,2,3}}}}, use_global_device_ids=true, to_apply=%add
  %i = u32[] partition-id()
  ROOT %part = f32[4]{{0}} {use}
}}

ENTRY %main (x: f32[16]) -> f32[4] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %out = f32[4]{{0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
}}
"""  # noqa: E501  (HLO has one instruction a line)


@pytest.mark.parametrize(
    ("use", "kind", "sent"),
    [
        ("dynamic-slice(%all, %i), dynamic_slice_sizes={4}", "reduce-scatter", 48),
        ("slice(%all), slice={[0:4]}", "all-reduce", 96),
    ],
)
def test_only_a_cut_of_the_own_part_is_a_scatter(use, kind, sent):
    one = only(ledger_of_text(FUSED.format(use=use), {"data": 4}))
    assert (one.kind, one.payload_bytes, one.sent_bytes) == (kind, 64, sent)
