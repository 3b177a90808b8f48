"""The schedule played through, on programs written by hand, where every time is known."""

import dataclasses
import math
import random

import pytest

from jaxdist.hlo.account import account
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.parse import parse
from jaxdist.hlo.timeline import play

LAYOUT = MeshLayout({"data": 4}, (0, 1, 2, 3))
GROUPS = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"


@dataclasses.dataclass(frozen=True)
class Seconds:
    """A cycle is a second; a collective takes as many as its first operand has elements."""

    def cycles(self, count):
        return float(count)

    def transfer(self, collective):
        return collective.payload_bytes / 4 / max(1, 4 * (collective.kind == "all-gather")), {0}

    def copy(self, size_bytes, *, host):
        return size_bytes / 4 * (10 if host else 1)

    def work(self, effort):
        return 7.0, f"assumed {effort.what}"


def program(*lines, other=""):
    body = "\n".join(f"  {line}" for line in lines)
    return parse(
        f"HloModule m, num_partitions=4\n\n{other}\nENTRY %main () -> f32[1] {{\n{body}\n}}\n"
    )


def work(name, cycles, operand="p"):
    config = f'backend_config={{"estimated_cycles":"{cycles}"}}'
    return f'%{name} = f32[8] copy(%{operand}), metadata={{op_name="jit(f)/{name}"}}, {config}'


def timeline(module, **options):
    found = play(module, LAYOUT, Seconds(), **options)
    waited = math.fsum(entry.waited_seconds for entry in found.entries.values())
    assert waited == pytest.approx(found.seconds)  # every second belongs to one instruction
    return found


P = "%p = f32[8] parameter(0)"


def test_instructions_follow_each_other():
    found = timeline(program(P, work("a", 3), work("b", 4), "ROOT %r = (f32[8]) tuple(%b)"))
    assert found.seconds == 7


def test_a_collective_in_one_piece_is_waited_for():
    reduce = f"%r = f32[8] all-reduce(%p), channel_id=1, {GROUPS}, to_apply=%sum"
    found = timeline(program(P, work("a", 3), reduce, "ROOT %t = (f32[8]) tuple(%r)"))
    assert found.seconds == 3 + 8
    assert found.entries["r"].axes == ("data",)
    assert found.entries["r"].waited_seconds == 8


@pytest.mark.parametrize(("beside", "waited"), [(0, 8), (5, 3), (8, 0), (20, 0)])
def test_what_runs_beside_hides_it(beside, waited):
    lines = [
        P,
        f"%s = (f32[8], f32[8]) all-reduce-start(%p), channel_id=1, {GROUPS}, to_apply=%sum",
        work("a", beside),
        "%d = f32[8] all-reduce-done(%s)",
        "ROOT %t = (f32[8]) tuple(%d)",
    ]
    found = timeline(program(*lines))
    assert found.entries["s"].waited_seconds == waited
    assert found.entries["s"].seconds == 8
    assert found.seconds == beside + waited


def test_two_on_the_same_links_go_one_after_the_other():
    lines = [
        P,
        f"%s = (f32[8], f32[8]) all-reduce-start(%p), channel_id=1, {GROUPS}, to_apply=%sum",
        f"%u = (f32[8], f32[8]) all-reduce-start(%p), channel_id=2, {GROUPS}, to_apply=%sum",
        "%d = f32[8] all-reduce-done(%s)",
        "%e = f32[8] all-reduce-done(%u)",
        "ROOT %t = (f32[8]) tuple(%e)",
    ]
    assert timeline(program(*lines)).seconds == 16


def test_what_nobody_waits_for_is_waited_for_at_the_end():
    start = f"%s = (f32[8], f32[8]) all-reduce-start(%p), channel_id=1, {GROUPS}, to_apply=%sum"
    found = timeline(program(P, start, work("a", 3), "ROOT %t = (f32[8]) tuple(%a)"))
    assert found.seconds == 8


def test_what_has_no_estimate_is_assumed_and_named():
    unknown = 2**63 - 1
    kernel = '%k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call"'
    found = timeline(program(P, kernel, work("a", unknown), "ROOT %t = (f32[8]) tuple(%k)"))
    assert found.seconds == 14
    assert found.entries["k"].basis == found.entries["a"].basis == "assumed"
    assert found.entries["k"].what == "assumed tpu_custom_call k"


LOOP = """
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %q = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %p = f32[8] get-tuple-element(%q), index=1
  {work}
  ROOT %n = (s32[], f32[8]) tuple(%i, %w)
}}

%condition (s: (s32[], f32[8])) -> pred[] {{
  %cq = (s32[], f32[8]) parameter(0)
  %ci = s32[] get-tuple-element(%cq), index=0
  %limit = s32[] constant(80)
  ROOT %less = pred[] compare(%ci, %limit), direction=LT
}}
"""


def looped(trips):
    count = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return program(
        "%s0 = (s32[], f32[8]) parameter(0)",
        f"ROOT %l = (s32[], f32[8]) while(%s0), condition=%condition, body=%body{count}",
        other=LOOP.format(work=work("w", 3)),
    )


SLICE = """
%slice (h: f32[8,2], i: s32[], j: s32[]) -> f32[1,2] {
  %h = f32[8,2]S(5) parameter(0)
  %i = s32[] parameter(1)
  %j = s32[] parameter(2)
  ROOT %r = f32[1,2] dynamic-slice(%h, %i, %j), dynamic_slice_sizes={1,2}
}
"""


@pytest.mark.parametrize(
    ("start", "done", "moved"),
    [
        ("((f32[8,2]S(5), s32[], s32[]), f32[1,2], u32[]) dynamic-slice-start(%h, %i, %i)",
         "f32[1,2] dynamic-slice-done(%s)", 2),
        ("((f32[8,2]S(5), f32[1,2], s32[], s32[]), f32[8,2]S(5), u32[]) "
         "dynamic-update-slice-start(%h, %u, %i, %i)",
         "f32[8,2]S(5) dynamic-update-slice-done(%s)", 2),
        ("((f32[8,2]S(5), s32[], s32[]), f32[1,2], u32[]) async-start(%h, %i, %i), calls=%slice",
         "f32[1,2] async-done(%s)", 2),
        ("(f32[8,2], f32[8,2]S(5), u32[]) copy-start(%h)", "f32[8,2] copy-done(%s)", 16),
    ],
)  # fmt: skip
def test_only_the_slice_of_an_array_on_the_host_is_moved(start, done, moved):
    given = ("%h = f32[8,2]S(5) parameter(0)", "%u = f32[1,2] parameter(1)",
             "%i = s32[] parameter(2)")  # fmt: skip
    lines = *given, f"%s = {start}", f"%d = {done}", "ROOT %t = (u32[]) tuple()"
    found = timeline(program(*lines, other=SLICE))
    assert found.seconds == 10 * moved


def test_a_loop_counts_its_turns():
    found = timeline(looped(80))
    assert (found.seconds, found.entries["w"].times, found.unknown_loops) == (240, 80, ())


def test_a_loop_of_unknown_length_is_named_and_never_taken_for_one_turn():
    found = timeline(looped(None))
    assert found.unknown_loops == ("l",)


NAMED_IN_PLACE = """
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %q = (s32[], f32[8]{{0:T(8)}}) parameter(0)
  %one = s32[] constant(1)
  %i = s32[] add(%q#0, %one)
  {work}
  ROOT %n = (s32[], f32[8]) tuple(%i, %w)
}}

%condition (s: (s32[], f32[8])) -> pred[] {{
  %cq = (s32[], f32[8]) parameter(0)
  %limit = s32[] constant(80)
  ROOT %less = pred[] compare(%cq#0, %limit), direction=LT
}}
"""


def test_elements_that_are_named_in_place_count_a_loop_too():
    """As jax 0.11 and newer print them: `%q#0` for a get-tuple-element."""
    module = program(
        P,
        "%zero = s32[] constant(0)",
        "%s0 = (s32[], f32[8]) tuple(%zero, %p)",
        "ROOT %l = (s32[], f32[8]) while(%s0), condition=%condition, body=%body",
        other=NAMED_IN_PLACE.format(work=work("w", 3, "q#1")),
    )
    found = timeline(module)
    assert (found.seconds, found.entries["w"].times, found.unknown_loops) == (240, 80, ())


CARRIED = """
%body (s: ((f32[8], f32[8]), f32[8])) -> ((f32[8], f32[8]), f32[8]) {{
  %q = ((f32[8], f32[8]), f32[8]) parameter(0)
  %under = (f32[8], f32[8]) get-tuple-element(%q), index=0
  %p = f32[8] get-tuple-element(%q), index=1
  {before}
  %d = f32[8] all-reduce-done(%under)
  %s = (f32[8], f32[8]) all-reduce-start(%d), channel_id=1, {groups}, to_apply=%sum
  {after}
  ROOT %n = ((f32[8], f32[8]), f32[8]) tuple(%s, %a)
}}
"""


def test_what_begins_in_one_turn_is_waited_for_in_the_next():
    other = CARRIED.format(before=work("b", 2), after=work("a", 1), groups=GROUPS)
    module = program(
        "%s0 = ((f32[8], f32[8]), f32[8]) parameter(0)",
        "%l = ((f32[8], f32[8]), f32[8]) while(%s0), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"10"}}',
        "%g = (f32[8], f32[8]) get-tuple-element(%l), index=0",
        "ROOT %last = f32[8] all-reduce-done(%g)",
        other=other,
    )
    # Each turn but the first waits 8 - 1 - 2 for the one before; the last is waited for outside.
    assert timeline(module).seconds == 10 * 3 + 9 * 5 + (8 - 1)


BRANCHES = """
%one (x: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %a = f32[8] copy(%p), backend_config={{"estimated_cycles":"3"}}
}}

%two (x: f32[8]) -> f32[8] {{
  %p.2 = f32[8] parameter(0)
  ROOT %b = f32[8] copy(%p.2), backend_config={{"estimated_cycles":"11"}}
}}
"""


def test_a_branch_is_the_dearest_or_the_cheapest():
    module = program(
        P,
        "%which = s32[] parameter(1)",
        "ROOT %c = f32[8] conditional(%which, %p, %p), branch_computations={%one, %two}",
        other=BRANCHES.format(),
    )
    assert timeline(module).seconds == 11
    assert timeline(module, dearest=False).seconds == 3
    assert timeline(module).has_branches


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_agree_with_a_plain_simulation(seed):
    rng = random.Random(seed)
    lines, events, open_starts = [P], [], []
    for number in range(30):
        roll = rng.random()
        if roll < 0.4:
            cycles = rng.randrange(12)
            lines.append(work(f"w{number}", cycles))
            events.append(("work", cycles))
        elif roll < 0.7 or not open_starts:
            size = rng.randrange(1, 20)
            lines.append(f"%x{number} = f32[{size}] parameter({number})")
            lines.append(
                f"%s{number} = (f32[{size}], f32[{size}]) all-reduce-start(%x{number}), "
                f"channel_id={number}, {GROUPS}, to_apply=%sum"
            )
            events.append(("start", number, size))
            open_starts.append(number)
        else:
            chosen = open_starts.pop(rng.randrange(len(open_starts)))
            lines.append(f"%d{chosen} = f32[8] all-reduce-done(%s{chosen})")
            events.append(("done", chosen))
    for chosen in open_starts:
        lines.append(f"%d{chosen} = f32[8] all-reduce-done(%s{chosen})")
        events.append(("done", chosen))
    lines.append("ROOT %t = () tuple()")
    now, link, ends = 0.0, 0.0, {}
    for kind, *rest in events:
        if kind == "work":
            now += rest[0]
        elif kind == "start":
            link = ends[rest[0]] = max(now, link) + rest[1]
        else:
            now = max(now, ends[rest[0]])
    assert timeline(program(*lines)).seconds == now


SPARSE = f"""
%called (q: f32[8]) -> f32[8] {{
  %q = f32[8] parameter(0)
  ROOT %inner = f32[8] all-reduce(%q), channel_id=1, {GROUPS}, to_apply=%sum
}}, execution_thread="sparsecore"

%async (o: f32[8]) -> f32[8] {{
  %o = f32[8] parameter(0)
  ROOT %c = f32[8] custom-call(%o), custom_call_target="sparse", called_computations={{%called}}
}}, execution_thread="sparsecore"
"""


@pytest.mark.parametrize(("beside", "waited"), [(0, 8), (5, 3), (20, 0)])
def test_a_collective_on_sparse_cores_begins_when_it_is_given_operands(beside, waited):
    lines = [
        P,
        '%s = ((), (), (s32[99])) async-start(), async_execution_thread="sparsecore", calls=%async',
        "%before = f32[8] negate(%p)",  # 7 s
        "%u = ((f32[8]), f32[8], (s32[99])) async-update(%s, %before)",
        work("a", beside),
        "%d = f32[8] async-done(%u)",
        "ROOT %t = (f32[8]) tuple(%d)",
    ]
    module = program(*lines, other=SPARSE)
    found = timeline(module)
    assert found.seconds == 7 + beside + waited
    assert found.entries["u"].waited_seconds == waited
    assert found.entries["u"].axes == ("data",)
    (one,) = account(module, LAYOUT).collectives
    assert (one.kind, one.sent_bytes, one.is_async) == ("all-reduce", 1.5 * 32, True)
    assert not one.overlapped  # what stands before its update does not run beside it


def test_other_work_of_sparse_cores_is_of_the_operands_that_it_is_given():
    other = SPARSE.replace("all-reduce(%q)", "negate(%q)")
    lines = [
        P,
        '%s = ((), (), (s32[99])) async-start(), async_execution_thread="sparsecore", calls=%async',
        "%u = ((f32[8]), f32[8], (s32[99])) async-update(%s, %p)",
        work("a", 5),
        "%d = f32[8] async-done(%u)",
        "ROOT %t = (f32[8]) tuple(%d)",
    ]
    found = timeline(program(*lines, other=other))
    assert found.entries["u"].what == "memory"
    assert found.seconds == 8
