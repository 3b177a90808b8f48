"""The slow-link lab: what it builds, how fast its links are, and that nothing of it is left."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.collectives import lab as collectives_lab
from benchmarks.core import lab
from benchmarks.core.lab import Lab, LabLink
from jaxdist.collectives import Ring, Xla
from jaxdist.errors import JaxdistError, RunError

REASON = lab.unavailable(Lab())
live = pytest.mark.skipif(REASON is not None, reason=f"no slow-link lab: {REASON}")
REFUSE_DELAY = Lab(across=LabLink(200e6, 0.005))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, 1e12])
def test_a_rate_that_no_link_has(rate):
    with pytest.raises(JaxdistError, match=re.escape(f"a link of {rate:g} bit/s")):
        LabLink(rate)


@pytest.mark.parametrize("delay", [-0.1, 11.0, math.nan])
def test_a_delay_that_no_link_has(delay):
    with pytest.raises(JaxdistError, match=f"delay of {delay:g} s"):
        LabLink(1e6, delay)


@pytest.mark.parametrize("sizes", [{"sites": 0}, {"hosts_per_site": 65}])
def test_sizes_that_no_lab_has(sizes):
    ((name, value),) = sizes.items()
    with pytest.raises(JaxdistError, match=f"{name} = {value}: give 1 to 64"):
        Lab(**sizes)


def test_hosts_of_one_site_share_a_subnet():
    pairs = Lab(sites=2, hosts_per_site=2)
    assert [pairs.address(host) for host in range(4)] == [
        "10.99.0.1", "10.99.0.2", "10.99.1.1", "10.99.1.2",
    ]  # fmt: skip
    assert pairs.environ(3)["JAX_PROCESS_ID"] == "3"


def test_the_shape_of_a_host():
    pairs = Lab(sites=2, hosts_per_site=2, across=LabLink(5e7, 0.01), inside=LabLink(1e10))
    sent = "\n".join(lab.shape(pairs, 3, "eth0", "dst"))
    assert "classid 1:1 htb rate 10000000000bit" in sent
    assert "classid 1:2 htb rate 50000000bit" in sent
    assert "match ip dst 10.99.1.0/24 flowid 1:1" in sent
    assert "parent 1:2 handle 20: netem delay 10000us" in sent
    received = "\n".join(lab.shape(pairs, 3, "port3", "src"))
    assert "match ip src 10.99.1.0/24 flowid 1:1" in received
    assert "netem" not in received  # a packet is delayed once


def test_elsewhere_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(lab.shutil, "which", lambda name: None if name == "tc" else name)
    monkeypatch.setattr(lab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab.sys, "platform", "linux")
    assert lab.unavailable(Lab()) == "tc not found: install iproute2 and util-linux"
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    assert "needs root" in str(lab.unavailable(Lab()))
    monkeypatch.setattr(lab.sys, "platform", "darwin")
    assert "this is darwin" in str(lab.unavailable(Lab()))


def test_what_the_kernel_refuses_is_the_reason(monkeypatch, capsys):
    refused = ["bash", "-c", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1"]
    monkeypatch.setattr(lab, "tree", lambda *_: refused)
    monkeypatch.setattr(lab.shutil, "which", lambda name: name)
    monkeypatch.setattr(lab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab.sys, "platform", "linux")
    with pytest.raises(RunError, match=r"no slow-link lab: .*Operation not permitted"):
        lab.run(Lab(), ["true"])
    assert lab.main(["--", "true"]) == RunError.exit_code
    assert "Operation not permitted" in capsys.readouterr().err
    figure = collectives_lab.bench().figures[0]
    assert figure.holds is None
    assert figure.note.startswith("skipped: ")


def test_a_wrong_sum_is_an_error():
    sums = np.arange(5.0)
    collectives_lab.check_sum(sums, sums, Ring())
    with pytest.raises(RunError, match=r"Ring.* gives 7 instead of 3 at element 3 .* 1 of 5"):
        collectives_lab.check_sum(np.array([0.0, 1, 2, 7, 4]), sums, Ring())


def test_bad_arguments_of_the_command(capsys):
    assert lab.main(["--mbit-per-s", "0", "--", "true"]) == JaxdistError.exit_code
    assert "a link of 0 bit/s" in capsys.readouterr().err


# From here on the lab is built.


def outside() -> list[str]:
    """What one sees of networks, mounts and names from outside."""
    commands = (["ip", "-o", "link"], ["ip", "netns", "list"], ["hostname"], ["cat", "/etc/hosts"])
    seen = [subprocess.run(line, capture_output=True, text=True).stdout for line in commands]
    return [*seen, Path("/proc/mounts").read_text()]


@live
def test_each_host_has_its_own_name_address_and_hosts_file():
    code = (
        "import os, socket, sys, json; name = socket.gethostname();"
        "sys.stdout.write(json.dumps([name, socket.gethostbyname(name), socket.gethostbyname('h2'),"
        "os.environ['JAX_PROCESS_ID'], sorted(os.listdir('/sys/class/net'))]) + chr(10))"
    )
    before = outside()
    printed = lab.run(Lab(sites=3), [sys.executable, "-c", code])
    assert sorted(json.loads(line) for line in printed.splitlines()) == [
        [f"h{i}", f"10.99.{i}.1", "10.99.2.1", str(i), ["eth0", "lo"]] for i in range(3)
    ]
    assert outside() == before


@live
def test_the_first_that_fails_ends_the_lab_with_its_code():
    # The other host would sleep beyond the test's own time limit.
    line = "[ $(hostname) = h0 ] && sleep 3600; echo no luck >&2; exit 7"
    with pytest.raises(RunError, match=r"lab of 2 hosts: exit code 7:\nno luck"):
        lab.run(Lab(), ["bash", "-c", line], timeout_seconds=3600)


@live
def test_too_long():
    with pytest.raises(RunError, match=r"`sleep 60` took more than 1 s on 2 hosts"):
        lab.run(Lab(), ["sleep", "60"], timeout_seconds=1)


def tree_of(marker: str) -> list[int]:
    """Processes that have `marker` in their command line, but not this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in text:
                found.append(int(entry.name))
    return found


def wait_until(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@live
@pytest.mark.parametrize("victim", ["parent", "unshare", "init"])
@pytest.mark.every(3)
def test_killed_it_leaves_nothing(victim, tmp_path):
    before = outside()
    marker = f"lab-{victim}-{os.getpid()}"
    ready = tmp_path / "ready"
    command = ["bash", "-c", f"echo {marker} >{ready}.$(hostname); sleep 300", marker]
    module = [sys.executable, "-m", "benchmarks.core.lab", "--", *command]
    parent = subprocess.Popen(module, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: all(Path(f"{ready}.h{host}").exists() for host in (0, 1)))
        assert len(tree_of(marker)) > 3
        (unshare,) = children(parent.pid)
        (init,) = children(unshare)
        os.kill({"parent": parent.pid, "unshare": unshare, "init": init}[victim], signal.SIGKILL)
        assert parent.wait(20) != 0
        assert wait_until(lambda: not tree_of(marker)), tree_of(marker)
    finally:
        parent.kill()
        parent.wait()
    assert outside() == before


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


TRANSFER = """
import os, socket, subprocess, sys, time
size, peer, rank = int(sys.argv[1]), sys.argv[2], os.environ["JAX_PROCESS_ID"]
if rank == "0":
    with socket.create_server(("", 5000)) as server:
        connection, _ = server.accept()
        start = time.perf_counter()
        connection.sendall(bytes(size))
        connection.recv(1)
        print(time.perf_counter() - start)
    subprocess.run(["tc", "-s", "class", "show", "dev", "eth0"], check=True)
elif socket.gethostname() == peer:
    while True:
        try:
            connection = socket.create_connection(("h0", 5000))
            break
        except OSError:
            time.sleep(0.02)
    got = 0
    while got < size:
        got += len(connection.recv(1 << 20))
    connection.sendall(b"x")
"""


@dataclass(frozen=True)
class Transfer:
    """Seconds of it; by class of what the sender shapes, the kernel's rate, bytes and waits."""

    seconds: float
    rate: dict[str, str]
    sent_bytes: dict[str, int]
    held_back: dict[str, int]


def transfer(hosts: Lab, size_bytes: int, peer: str) -> Transfer:
    printed = lab.run(hosts, [sys.executable, "-c", TRANSFER, str(size_bytes), peer])
    seconds, counters = printed.split("\n", 1)
    classes = re.findall(
        r"htb 1:(\d) .*? rate (\S+) .*?Sent (\d+) bytes.*?overlimits (\d+)", counters, re.DOTALL
    )
    assert [number for number, *_ in classes] == ["1", "2"], counters
    kinds = ["inside", "across"]
    rates, sent, held = ([one[field] for one in classes] for field in (1, 2, 3))
    return Transfer(
        float(seconds),
        dict(zip(kinds, rates, strict=True)),
        dict(zip(kinds, map(int, sent), strict=True)),
        dict(zip(kinds, map(int, held), strict=True)),
    )


@live
@pytest.mark.parametrize(
    ("peer", "link", "other"), [("h1", "inside", "across"), ("h2", "across", "inside")]
)
@pytest.mark.every(2)
def test_a_transfer_goes_over_the_link_of_its_peer(peer, link, other):
    """By the kernel's own counters: a clock would judge this machine's load as well."""
    size_bytes = 2**20
    pairs = Lab(sites=2, hosts_per_site=2, across=LabLink(40e6))
    sent = transfer(pairs, size_bytes, peer)
    assert sent.rate == {"inside": "10Gbit", "across": "40Mbit"}
    framed_bytes = size_bytes * lab.FRAME_BYTES / lab.SEGMENT_BYTES
    assert framed_bytes <= sent.sent_bytes[link] < 1.1 * framed_bytes
    assert sent.sent_bytes[other] < 2**12
    assert (sent.held_back["across"] > 0) == (link == "across")


@live
def test_a_delay_is_made_or_refused_with_the_reason():
    reason = lab.unavailable(REFUSE_DELAY)
    if reason is None:
        assert transfer(REFUSE_DELAY, 1, "h1").seconds >= 2 * 0.005
    else:
        assert "a delay needs a kernel with netem" in reason


@pytest.mark.slow  # a transfer and a delay: the two tests above
@live
def test_measured_over_two_hosts():
    slow = Lab(across=LabLink(40e6))
    payload_bytes = 2**18 + 4
    psum, ring = collectives_lab.measure(slow, [Xla(), Ring()], payload_bytes, warmup=1, repeats=2)
    for one in (psum, ring):
        assert len(one.seconds) == 2
        assert min(one.seconds) > 0
        assert 1.0 <= one.sent_bytes / payload_bytes < 1.1
