"""A loop of ticks: its branches as a schedule takes them, on programs written by hand."""

import dataclasses
import math

import numpy as np
import pytest
from tick_programs import branch, conditional, ticked

from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.lockstep import (
    ConditionalDecision,
    Lockstep,
    conditional_name,
    mismatch,
    tick_loops,
)
from jaxdist.hlo.parse import parse, parse_instruction
from jaxdist.hlo.timeline import play

LAYOUT = MeshLayout({"stage": 4}, (0, 1, 2, 3))
COSTS = {"forward": (0, 3), "backward": (0, 7, 4)}
INSIDE = {"backward/last": (1, 20)}
FORWARD = np.array([[1, 0], [1, 1], [0, 1], [0, 0]])
BACKWARD = np.array([[0, 0], [0, 2], [1, 1], [1, 0]])
LAST = np.array([[0, 1], [0, 1], [0, 1], [0, 1]])
OUTSIDE, EVERY = 5, 2


class Seconds:
    """A cycle is a second."""

    def cycles(self, count):
        return float(count)

    def transfer(self, collective):
        return collective.payload_bytes / 4, {0}


def lockstep(forward=FORWARD, backward=BACKWARD, **more):
    decisions = {
        "forward": ConditionalDecision(2, forward),
        "backward": ConditionalDecision(3, backward),
    }
    return Lockstep("by hand", decisions | {k.replace("_", "/"): d for k, d in more.items()})


def timeline(module, taken, **options):
    assert taken is None or mismatch(module, taken) is None
    found = play(module, LAYOUT, Seconds(), lockstep=taken, **options)
    waited = math.fsum(entry.waited_seconds for entry in found.entries.values())
    assert waited == pytest.approx(found.seconds)  # every second belongs to one instruction
    return found


def test_a_tick_lasts_as_long_as_the_longest_group():
    found = timeline(ticked(COSTS, ticks=4, outside=OUTSIDE, every=EVERY), lockstep())
    # Each stage: (3, 0), (3, 3 + 4), (7, 3 + 7), (7, 0); to each of them 2.
    assert found.seconds == 2 * OUTSIDE + 4 * EVERY + 3 + 7 + 10 + 7
    assert found.entries["l"].waited_seconds == (3 + 4 + 3 + 7) / 2
    assert (found.entries["l"].basis, found.entries["l"].what) == ("schedule", "bubble of by hand")
    assert found.entries["forward.1"].waited_seconds == 3 * (2 + 2) / 2
    assert found.entries["backward.1"].waited_seconds == 7 * (2 + 1) / 2
    assert found.entries["backward.2"].times == 0.5
    assert found.entries["each"].waited_seconds == 4 * EVERY
    assert not found.has_branches


def test_a_branch_in_a_branch_counts_where_that_is_taken():
    module = ticked(COSTS, ticks=4, nested=INSIDE)
    taken = lockstep(backward_last=ConditionalDecision(2, LAST))
    # What stands in backward's first branch: 1 on stage 0, 20 on stage 1.
    assert timeline(module, taken).seconds == 2 * 5 + 4 * 2 + 3 + 7 + (3 + 7 + 20) + (7 + 1)


def test_of_the_turns_of_a_loop_within_the_tick_each_branch_has_its_share():
    module = ticked(COSTS, ticks=4, nested=INSIDE)
    taken = lockstep(backward_last=ConditionalDecision(2, np.full((4, 2), 0.25)))
    found = timeline(module, taken)
    mean = 0.75 * 1 + 0.25 * 20
    assert found.seconds == 2 * 5 + 4 * 2 + 3 + 7 + (3 + 7 + mean) + (7 + mean)
    assert found.entries["backward.last.1"].times == 0.25 * 3 / 2


def test_a_branch_that_nothing_decides_leaves_two_bounds():
    """One in a branch of a tick's, as a model may have it; the name is not the tick's."""
    module = ticked(COSTS, ticks=4, nested=INSIDE)
    conditional = module.computations["backward.branch.1"].by_name["backward.last"]
    assert conditional_name(conditional) == "backward/last"
    other = dataclasses.replace(
        conditional, attributes=conditional.attributes.replace("tick.last", "mine")
    )
    body = module.computations["backward.branch.1"]
    body.by_name["backward.last"] = other
    instructions = tuple(body.by_name[i.name] for i in body.instructions)
    computations = dict(module.computations)
    computations[body.name] = dataclasses.replace(body, instructions=instructions)
    module = dataclasses.replace(module, computations=computations)
    dear, cheap = (timeline(module, lockstep(), dearest=way) for way in (True, False))
    assert dear.has_branches
    assert dear.seconds == 2 * 5 + 4 * 2 + 3 + 7 + (3 + 7 + 20) + (7 + 20)
    assert cheap.seconds == 2 * 5 + 4 * 2 + 3 + 7 + (3 + 7 + 1) + (7 + 1)


def test_the_step_is_between_the_bounds():
    module = ticked(COSTS, ticks=4)
    dear, cheap = (timeline(module, None, dearest=way).seconds for way in (True, False))
    assert (cheap, dear) == (2 * 5 + 4 * 2, 2 * 5 + 4 * (2 + 3 + 7))
    assert cheap < timeline(module, lockstep()).seconds < dear


def test_one_group_waits_for_nobody():
    taken = lockstep(FORWARD[:, 1:], BACKWARD[:, 1:])
    found = timeline(ticked(COSTS, ticks=4), taken)
    assert found.seconds == 2 * 5 + 4 * 2 + 0 + (3 + 4) + (3 + 7) + 0
    assert found.entries["l"].waited_seconds == 0


def test_of_a_bool_the_branch_of_true_stands_first():
    module = ticked(COSTS, ticks=4)
    body = module.computations["body"]
    (one,) = [i for i in body.instructions if i.name == "forward"]
    told = one.attributes.replace(
        "branch_computations={%forward.branch.0, %forward.branch.1}",
        "true_computation=%forward.branch.1, false_computation=%forward.branch.0",
    )
    assert told != one.attributes
    turned = dataclasses.replace(one, attributes=told)
    instructions = tuple(turned if i is one else i for i in body.instructions)
    computations = module.computations | {
        "body": dataclasses.replace(body, instructions=instructions)
    }
    module = dataclasses.replace(module, computations=computations)
    assert timeline(module, lockstep()).seconds == 2 * 5 + 4 * 2 + 3 + 7 + 10 + 7


def test_what_begins_in_one_tick_is_waited_for_in_the_next():
    groups = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"
    state = "((f32[8], f32[8]), f32[8])"
    branches = "\n".join(branch("forward", number, cost) for number, cost in enumerate((0, 3)))
    lines = "\n  ".join(conditional("forward", 2))
    module = parse(
        f"HloModule m, num_partitions=4\n\n{branches}\n"
        f"%body (s: {state}) -> {state} {{\n"
        f"  %q = {state} parameter(0)\n"
        "  %under = (f32[8], f32[8]) get-tuple-element(%q), index=0\n"
        "  %p = f32[8] get-tuple-element(%q), index=1\n"
        "  %d = f32[8] all-reduce-done(%under)\n"
        f"  {lines}\n"
        f"  %s = (f32[8], f32[8]) all-reduce-start(%forward), channel_id=1, {groups}\n"
        f"  ROOT %n = {state} tuple(%s, %forward)\n}}\n\n"
        f"ENTRY %main () -> f32[8] {{\n  %s0 = {state} parameter(0)\n"
        f"  %l = {state} while(%s0), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"3"}}\n'
        "  %g = (f32[8], f32[8]) get-tuple-element(%l), index=0\n"
        "  ROOT %last = f32[8] all-reduce-done(%g)\n}\n"
    )
    taken = Lockstep(
        "by hand", {"forward": ConditionalDecision(2, np.array([[1, 0], [0, 1], [0, 0]]))}
    )
    found = timeline(module, taken)
    # The first tick waits for nothing, the last one is waited for after the loop.
    assert found.seconds == 3 + (8 + 3) + 8 + 8
    assert found.entries["l"].waited_seconds == (3 + 3) / 2


@pytest.mark.parametrize(
    ("module", "taken", "said"),
    [
        (
            ticked({}, ticks=4),
            lockstep(),
            "0 loops of the program, instead of a single loop, have branches",
        ),
        (ticked(COSTS, ticks=5), lockstep(), "loop has 5 iterations instead of 4"),
        (
            ticked({"forward": (0, 3, 4), "backward": (0, 7, 4)}, ticks=4),
            lockstep(),
            "forward has 3 branches in the program instead of 2",
        ),
        (
            ticked(COSTS, ticks=4, nested=INSIDE),
            lockstep(),
            "backward/last does not depend on the tick",
        ),
    ],
)
def test_a_program_of_other_ticks_is_refused(module, taken, said):
    assert said in mismatch(module, taken)


def test_branches_in_another_order_are_refused():
    module = ticked(COSTS, ticks=4)
    names = "backward.branch.1", "backward.branch.2"
    swapped = dict(zip(names, reversed([module.computations[n] for n in names]), strict=True))
    module = dataclasses.replace(module, computations=module.computations | swapped)
    said = "branch 1 of backward contains instructions of the branches [2] of the source"
    assert mismatch(module, lockstep()) == said


def test_branches_before_the_loop_are_refused():
    module = ticked(COSTS, ticks=4)
    loose = next(i for i in module.computations["body"].instructions if i.name == "forward")
    entry = dataclasses.replace(module.entry, instructions=(loose, *module.entry.instructions))
    computations = module.computations | {entry.name: entry}
    module = dataclasses.replace(module, computations=computations, entry=entry)
    assert "outside of the program's loop" in mismatch(module, lockstep())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("jit(f)/while/body/tick.forward/cond", "forward"),
        ("jit(f)/while/body/jvp(tick.chunk)/cond", "chunk"),
        ("jit(f)/while/body/tick.forward/cond/branch_1_fun/jvp(tick.chunk)/cond", "forward/chunk"),
        ("jit(f)/while/body/tick.forward/cond/branch_1_fun/while/body/cond", None),
        ("jit(f)/while/body/tick.forward/cond/branch_1_fun/add", None),
        ("jit(f)/while/body/stick.forward/cond", None),
    ],
)
def test_only_the_conditional_of_a_scope_has_its_name(source, name):
    line = f'  %c = () conditional(%i, %a, %b), metadata={{op_name="{source}"}}'
    assert conditional_name(parse_instruction(line)) == name


def test_the_loop_of_ticks_is_found_among_others():
    module = ticked(COSTS, ticks=4)
    assert [loop.name for loop in tick_loops(module)] == ["l"]
