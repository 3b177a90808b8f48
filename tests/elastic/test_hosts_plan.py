"""Who does what in a generation: meshes that shrink, batches that stay, whole snapshots."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.elastic.hosts.plan import BatchRule, GenerationPlan, HostFacts, make_plan, newest_whole
from jaxdist.errors import RunError


def hosts(count: int, processes: int = 1, devices: int = 1) -> list[HostFacts]:
    return [HostFacts(f"h{at}-1", f"h{at}", "127.0.0.1", processes, devices) for at in range(count)]


RULES = st.builds(
    BatchRule,
    st.fixed_dictionaries(
        {"data": st.sampled_from([-1, 1, 2, 4, 8])},
        optional={"tensor": st.sampled_from([1, 2, 4]), "stage": st.sampled_from([1, 2])},
    ),
    st.sampled_from([8, 24, 64, 96]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
)


@given(RULES, st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.integers(1, 8))
def test_no_device_holds_more_and_the_model_keeps_its_axes(rule, count, processes, devices, least):
    members = hosts(count, processes, devices)
    least = min(least, count)
    try:
        plan = make_plan(members, rule, least)
    except RunError as error:
        told = [f"with {k}: " in str(error) for k in range(least, count + 1)]
    else:
        check_plan(plan, members, rule, least)
        return
    assert all(told)


def check_plan(plan: GenerationPlan, members: list[HostFacts], rule: BatchRule, least: int) -> None:
    settings = dict(one.split("=") for one in plan.settings)
    working = [host for host in members if plan.places[host.host][1]]
    assert len(working) >= least
    assert plan.devices == sum(host.processes * host.devices for host in working)
    data = plan.devices // rule.others
    assert data * rule.others == plan.devices
    if rule.mesh["data"] != -1:
        assert int(settings.get("mesh.data", rule.mesh["data"])) == data
    full = rule.full if rule.mesh["data"] == -1 else rule.mesh["data"]
    pieces = int(settings.get("train.microbatches", rule.microbatches))
    assert rule.batch_size % (data * pieces) == 0
    # Rows of a device at once, against those of the full mesh.
    assert rule.batch_size / (data * pieces) <= rule.batch_size / (full * rule.microbatches)
    if data == full and rule.batch_size % (full * rule.microbatches) == 0:
        assert pieces == rule.microbatches
    firsts = [plan.places[host.host] for host in members]
    assert firsts[0][0] == 0
    for (a, count_a), (b, _) in pairwise(firsts):
        assert a + count_a == b
    assert plan.total == sum(count for _, count in firsts)


def test_the_data_axis_shrinks_and_the_batch_is_cut_finer():
    rule = BatchRule({"data": 4, "tensor": 2}, 64, 2)
    assert make_plan(hosts(4, 2), rule, 1).settings == ()
    assert make_plan(hosts(2, 2), rule, 1).settings == ("mesh.data=2", "train.microbatches=4")
    assert make_plan(hosts(1, 2), rule, 1).settings == ("mesh.data=1", "train.microbatches=8")


@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": -1}])
def test_a_batch_that_shrinks_with_the_mesh(mesh):
    """Three devices have no share of a batch of 64 that stays, and one of 48."""
    rule = BatchRule(mesh, 64, 2, full=4, rescales=True)
    assert [one for one in make_plan(hosts(4), rule, 1).settings if "mesh" not in one] == []
    for count in (3, 2, 1, 6):
        plan = make_plan(hosts(count), rule, count)
        found = tuple(one for one in plan.settings if not one.startswith("mesh"))
        assert found == (f"train.batch_size={16 * count}", "train.rescaled_from=64")


def test_a_full_mesh_that_the_batch_does_not_divide_over():
    with pytest.raises(
        RunError, match="a batch of 6 does not divide over the 4 devices along data of the full"
    ):
        make_plan(hosts(3), BatchRule({"data": 4}, 6, rescales=True), 3)


def test_who_is_left_out_has_no_place_and_hands_out_what_it_has():
    part = "step_00000010.{}_of_2"
    first, second = (replace(one, parts=(part.format(at),)) for at, one in enumerate(hosts(2)))
    plan = make_plan([first], BatchRule({"data": -1}, 64), 1, [second])
    assert (plan.hosts, plan.total, plan.places, plan.idle) == (1, 1, {"h0-1": (0, 1)}, ("h1",))
    assert plan.snapshot == {part.format(0): "h0-1", part.format(1): "h1-1"}


def test_hosts_that_no_mesh_has_a_place_for_wait():
    plan = make_plan(hosts(3), BatchRule({"data": 4}, 64), 1)  # 64 rows do not divide over 3
    assert plan.idle == ("h2",)
    assert plan.places == {"h0-1": (0, 1), "h1-1": (1, 1), "h2-1": (2, 0)}
    assert plan.settings == ("mesh.data=2", "train.microbatches=2")


@pytest.mark.parametrize(
    ("mesh", "count", "words"),
    [
        (
            {"data": 2, "tensor": 4},
            2,
            "needs a multiple of 4 devices, since its axes other than data .* but there are 2",
        ),
        ({"tensor": 4}, 2, "needs 4 devices, since its axes other than data"),
        ({"data": 1, "stage": -1}, 2, "an axis other than data has size -1"),
        ({"data": {"dcn": 2, "ici": 2}}, 2, "set mesh.data to a single number"),
    ],
)
def test_what_cannot_shrink_is_refused(mesh, count, words):
    with pytest.raises(RunError, match=words):
        make_plan(hosts(count), BatchRule(mesh, 64), count)


def test_a_mesh_over_two_networks_is_right_at_its_full_size():
    assert make_plan(hosts(4), BatchRule({"data": {"dcn": 2, "ici": 2}}, 64), 4).settings == ()


def test_the_rule_is_read_from_the_config():
    values = {"mesh": {"tensor": 2, "data": 3, "fake_devices": 4}, "train": {"batch_size": 12}}
    assert BatchRule.of(values, None) == BatchRule({"tensor": 2, "data": 3}, 12, 1, None)
    assert BatchRule.of({**values, "elastic": {"batch": "rescale"}}, None).rescales
    assert BatchRule.of({}, 2) == BatchRule({"data": -1}, 1, 1, 2)


PARTS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)), max_size=20)


@given(st.lists(PARTS, min_size=1, max_size=3))
def test_the_newest_snapshot_that_is_whole(held):
    members = []
    for at, parts in enumerate(held):
        names = tuple(f"step_{s:08d}.{p}_of_{n}" for s, p, n in parts if p < n)
        members.append(HostFacts(f"h{at}", f"h{at}", "", 1, 1, (*names, "step_x", "run")))
    found = newest_whole(members)
    together = {(s, p, n) for parts in held for s, p, n in parts if p < n}
    whole = [(s, n) for s, _, n in together if all((s, p, n) in together for p in range(n))]
    if not whole:
        assert found == {}
        return
    step, count = max(whole)
    assert sorted(found) == [f"step_{step:08d}.{p}_of_{count}" for p in range(count)]
    by_host = {member.host: member.parts for member in members}
    assert all(name in by_host[host] for name, host in found.items())
