"""A lab: several hosts on one machine, network namespaces joined by slow links that `tc` shapes.

One process tree owns the whole lab: its namespaces have names only inside the tree, on a separate
file system. When the tree ends, for whatever reason, the kernel removes the lab. No device, mount,
file or host name is visible from outside.

Hosts belong to sites, and one bridge joins them all. A host has a fast link to the hosts of its
site and a slow link to all others, full duplex, like a machine with two networks. The packets that
a host sends are shaped in its own namespace, where a full queue holds TCP back at once; at the
bridge, acknowledgements would wait behind megabytes of data.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxdist.errors import JaxdistError, RunError

COORDINATOR_PORT = 9911
MTU_BYTES = 1500
FRAME_BYTES = MTU_BYTES + 14
"""The number of bytes that `tc` counts for a full packet: the MTU plus the Ethernet header."""
SEGMENT_BYTES = MTU_BYTES - 20 - 32
"""The bytes that a full packet carries: the MTU without the headers of IP and of TCP with time
stamps."""
PROGRAMS = ("bash", "ip", "tc", "unshare", "setpriv", "mount", "hostname")
_MOST = 64


@dataclass(frozen=True)
class LabLink:
    """A kind of link, with equal properties in both directions.

    Attributes:
      bits_per_s: rate on the wire, headers included.
      delay_seconds: the delay that is added to each packet, one way.

    Raises:
      JaxdistError: a rate or delay that cannot be made.
    """

    bits_per_s: float
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 1e5 <= self.bits_per_s <= 1e11:
            raise JaxdistError(f"a link of {self.bits_per_s:g} bit/s: give 1e5 to 1e11 bit/s")
        if not 0 <= self.delay_seconds <= 10:
            raise JaxdistError(f"a link's delay of {self.delay_seconds:g} s: give 0 to 10 s")

    @property
    def payload_bytes_per_s(self) -> float:
        """The bytes that TCP carries in a second when the link is full.

        >>> round(LabLink(200e6).payload_bytes_per_s / 1e6, 2)
        23.91
        """
        return self.bits_per_s / 8 * SEGMENT_BYTES / FRAME_BYTES


@dataclass(frozen=True)
class Lab:
    """Sites of hosts: fast inside, slow across.

    Attributes:
      sites: number of sites.
      hosts_per_site: hosts in each; 1 gives a flat lab of slow links.
      across: the link of a host to the hosts of other sites.
      inside: the link of a host to the other hosts of its site.

    Raises:
      JaxdistError: no hosts, or too many.
    """

    sites: int = 2
    hosts_per_site: int = 1
    across: LabLink = LabLink(200e6)
    inside: LabLink = LabLink(10e9)

    def __post_init__(self) -> None:
        for name in ("sites", "hosts_per_site"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise JaxdistError(f"a lab with {name} = {getattr(self, name)}: give 1 to {_MOST}")

    @property
    def size(self) -> int:
        """The number of hosts, `h0` to `h{size - 1}`; the hosts of a site are consecutive."""
        return self.sites * self.hosts_per_site

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"h{host}" for host in range(self.size))

    def address(self, host: int) -> str:
        """Return the address of a host; each site is a /24 subnet.

        >>> Lab(sites=2, hosts_per_site=2).address(3)
        '10.99.1.2'
        """
        site, place = divmod(host, self.hosts_per_site)
        return f"10.99.{site}.{place + 1}"

    def hosts_file(self) -> str:
        """Return the hosts file that each host reads.

        >>> Lab().hosts_file().splitlines()
        ['127.0.0.1 localhost', '10.99.0.1 h0', '10.99.1.1 h1']
        """
        lines = [f"{self.address(host)} {name}" for host, name in enumerate(self.names)]
        return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"

    def environ(self, host: int) -> dict[str, str]:
        """Return the variables from which `find_processes` learns the process's number."""
        return {
            "JAX_COORDINATOR_ADDRESS": f"h0:{COORDINATOR_PORT}",
            "JAX_NUM_PROCESSES": str(self.size),
            "JAX_PROCESS_ID": str(host),
        }


def shape(lab: Lab, host: int, device: str, end: Literal["src", "dst"]) -> list[str]:
    """Return the commands that shape the packets that leave `device`.

    Class 1:1 has the packets that stay in the host's site, class 1:2 all others.

    Args:
      end: the field of a packet that has the other host: "dst" on the host's own device, "src" at
        the bridge. A delay is added only on the host's own device, so that each packet is delayed
        only once.
    """
    commands = [f"tc qdisc add dev {device} root handle 1: htb default 2"]
    for number, link in ((1, lab.inside), (2, lab.across)):
        # A burst is 1 ms, and at least one packet of segmentation offload. tc counts the headers of
        # all segments of this packet, and delays the next packet if the bucket has too few bytes.
        burst_bytes = max(2**16, int(link.bits_per_s / 8 / 1000))
        rate = f"rate {link.bits_per_s:.0f}bit burst {burst_bytes} cburst {burst_bytes}"
        commands.append(
            f"tc class add dev {device} parent 1: classid 1:{number} htb {rate} quantum {2**16}"
        )
        if link.delay_seconds and end == "dst":
            delay = f"netem delay {link.delay_seconds * 1e6:.0f}us limit 100000"
            commands.append(
                f"tc qdisc add dev {device} parent 1:{number} handle {number}0: {delay}"
            )
    site = f"10.99.{host // lab.hosts_per_site}.0/24"
    selector = f"u32 match ip {end} {site} flowid 1:1"
    return [*commands, f"tc filter add dev {device} parent 1: protocol ip prio 1 {selector}"]


def network(lab: Lab) -> list[str]:
    """Return the commands that build the lab's network inside new namespaces."""
    commands = ["mount -t tmpfs lab /run", "ip link add lan type bridge", "ip link set lan up"]
    for host, name in enumerate(lab.names):
        port = f"port{host}"
        cable = f"type veth peer name eth0 mtu {MTU_BYTES} netns {name}"
        commands += [
            f"ip netns add {name}",
            f"ip link add {port} mtu {MTU_BYTES} {cable}",
            *shape(lab, host, port, "src"),
            *(f"ip netns exec {name} {line}" for line in shape(lab, host, "eth0", "dst")),
            f"ip -n {name} address add {lab.address(host)}/16 dev eth0",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set eth0 up",
            f"ip link set {port} master lan up",
        ]
    return commands


# Reno is the congestion control that every namespace may choose. A sender's queue is kept short,
# because the small messages that start the next step would wait in it. Without slow start after
# idle times, each step begins at the link's full rate.
_ON_HOST = """
cd /proc/sys/net/ipv4
echo reno >tcp_congestion_control
echo 0 >tcp_slow_start_after_idle
echo 32768 >tcp_limit_output_bytes
cd "$OLDPWD"
hostname "$1"
mount --bind /run/hosts /etc/hosts
shift
exec "$@"
"""
_FAILED = "{ { echo $? >/run/code; } 2>/dev/null; kill -USR1 1; }"


def script(lab: Lab, command: Sequence[str]) -> str:
    """Return the bash program that builds the lab and runs `command` on each host.

    The program ends when all hosts have ended, or with the exit code of the first host that fails.
    The program is process 1 of its namespace, so all other processes end with it.
    """
    # With -C an existing file is not overwritten, so /run/code keeps the first exit code.
    lines = ["set -euCo pipefail", *network(lab)]
    lines.append(f"printf %s {shlex.quote(lab.hosts_file())} >/run/hosts")
    lines.append("trap 'exit $(cat /run/code)' USR1")
    for host, name in enumerate(lab.names):
        variables = [f"{key}={value}" for key, value in lab.environ(host).items()]
        enter = [*f"ip netns exec {name} unshare --uts bash -ec".split(), _ON_HOST, "-", name]
        lines.append(f"{{ {shlex.join([*enter, 'env', *variables, *command])} || {_FAILED}; }} &")
    return "\n".join([*lines, "wait"])


def tree(lab: Lab, command: Sequence[str]) -> list[str]:
    """Return the command that starts the process tree, which the kernel ends with its parent."""
    namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    inside = ["bash", "-c", script(lab, command)]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "--kill-child", *inside]


def unavailable(lab: Lab) -> str | None:
    """Return why this machine cannot hold the lab, or None; this builds the lab once as a test."""
    if not sys.platform.startswith("linux"):
        return f"it needs the network namespaces of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"it needs root to make network namespaces, and this is user {os.geteuid()}"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    probe = subprocess.run(tree(lab, ["true"]), capture_output=True, text=True, check=False)
    if probe.returncode == 0:
        return None
    said = (probe.stderr.strip() or f"exit code {probe.returncode}").splitlines()[0]
    delayed = lab.across.delay_seconds or lab.inside.delay_seconds
    hint = "; a delay needs a kernel with netem, so try a delay of 0" if delayed else ""
    return f"this machine does not let one build it: {said}{hint}"


def run(
    lab: Lab,
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_seconds: float = 600.0,
) -> str:
    """Run `command` on each host of the lab until all have ended, and return their output.

    Args:
      environ: the environment of all hosts, to which `Lab.environ` is added, or None for the
        environment of this process.

    Raises:
      RunError: the lab cannot be built here, a host fails, or the command takes too long.
    """
    reason = unavailable(lab)
    if reason is not None:
        raise RunError(f"there is no slow-link lab: {reason}")
    try:
        done = subprocess.run(
            tree(lab, command), env=environ, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"`{shlex.join(command)}` took more than {timeout_seconds:g} s on {lab.size} hosts "
            f"with {lab.across} between sites: send less, or give more time"
        ) from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RunError(
            f"`{shlex.join(command)}` failed in a lab of {lab.size} hosts: exit code "
            f"{done.returncode}:\n{said}"
        )
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on each host of a lab; return the exit code of the first to fail."""
    parser = argparse.ArgumentParser(prog="scripts/lab/run", description=main.__doc__)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--hosts-per-site", type=int, default=1)
    parser.add_argument(
        "--mbit-per-s", type=float, default=200.0, help="rate of a host's link to other sites"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, between two sites")
    parser.add_argument("command", nargs="+", help="what each host runs, after --")
    given = parser.parse_args(arguments)
    try:
        across = LabLink(given.mbit_per_s * 1e6, given.delay_ms / 1e3)
        lab = Lab(given.sites, given.hosts_per_site, across)
        reason = unavailable(lab)
        if reason is not None:
            raise RunError(f"there is no slow-link lab: {reason}")
    except JaxdistError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return subprocess.run(tree(lab, given.command), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
