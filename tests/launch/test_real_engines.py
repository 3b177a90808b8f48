"""Jobs on engines that are installed here; each skips, with the reason, where its own is not."""

import getpass
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from certificates import certified
from runs import DIGITS, Jaxdist, steps

from jaxdist.runtime.rendezvous import free_port

pytestmark = pytest.mark.full
LONG = {"train": {"steps": 20_000, "batch_size": 64, "log_every": 50}, "eval": {"every": None}}
SECONDS = 90
CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2
PartitionName=main Nodes=n[1-2] Default=YES State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=n[1-2] State=UP PriorityTier=9 PreemptMode=off
"""
GRACE_SECONDS = 30


def until(condition, what: str, seconds: float = SECONDS):
    begun = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - begun < seconds, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
    return found


def asked(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm of two nodes, both of them this machine."""
    missing = [one for one in ("slurmctld", "slurmd", "munged") if shutil.which(one) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'slurm-wlm, munge'}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    host = socket.gethostname()
    with pytest.MonkeyPatch.context() as patch, _daemons() as begin:
        for name in ("state", "spool.n1", "spool.n2"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munged += [f"--{n}-file={folder}/munge.{n}" for n in ("pid", "log", "seed")]
        begin([*munged, f"--socket={folder}/munge.socket"])
        until((folder / "munge.socket").exists, "munged")
        ports = {name: free_port() for name in ("port", "port1", "port2")}
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(folder=folder, host=host, grace=GRACE_SECONDS, **ports))
        patch.setenv("SLURM_CONF", str(conf))
        begin(["slurmctld", "-D"])
        for node in ("n1", "n2"):
            begin(["slurmd", "-D", "-N", node])
        until(lambda: "idle" in _sinfo(), "nodes")
        yield conf


def _sinfo() -> str:
    done = subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True, check=False)
    return done.stdout


class _daemons:
    """Processes that end with the tests."""

    def __enter__(self):
        self._all: list[subprocess.Popen[bytes]] = []
        return self._begin

    def _begin(self, command: list[str]) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._all.append(subprocess.Popen(command, **quiet))

    def __exit__(self, *exception):
        for process in reversed(self._all):
            process.kill()
            process.wait()


def names_resolve(*names: str) -> bool:
    try:
        return all(socket.gethostbyname(name) for name in names)
    except OSError:
        return False


def state_of(job: str) -> str:
    return asked("scontrol", "show", "job", "--oneliner", job)


def test_a_job_that_makes_way_goes_on_later_and_a_cancelled_one_does_not(slurm, jaxdist: Jaxdist):
    if not names_resolve("n1", "n2"):
        pytest.skip("the nodes n1 and n2 are no names here: add `127.0.0.1 n1 n2` to /etc/hosts")
    jaxdist.config({**DIGITS, **LONG}, checkpoint={"every": 5000})
    done = jaxdist(
        "launch", "config.yaml", "--on", "slurm", "--nodes", "2",
        "--set", "partition=main", "--set", "time=30", "--set", "notice_seconds=60",
    )  # fmt: skip
    assert done.code == 0, done
    folder = jaxdist.folder / "runs/launches/config"
    job = done.out.split("job ")[1].split(":")[0]
    log = folder / f"slurm-{job}.log"
    until(lambda: log.exists() and "\nstep " in log.read_text(), "steps")

    urgent = asked("sbatch", "--parsable", "-p", "urgent", "-N2", "-o", "/dev/null",
                   "--wrap", "sleep 1")  # fmt: skip
    begun = time.monotonic()
    until(lambda: steps(jaxdist.run), "a checkpoint")
    until(lambda: "to be queued again: another job needs the nodes" in log.read_text(), "the end")
    assert time.monotonic() - begun < GRACE_SECONDS, "Slurm would have killed it"
    saved = steps(jaxdist.run)[-1]
    until(lambda: "COMPLETED" in state_of(urgent.strip()), "the urgent job")
    until(lambda: "JobState=PENDING" in state_of(job), "the queue")
    asked("scontrol", "update", f"JobId={job}", "StartTime=now")  # not in two minutes
    until(lambda: f"resume from step {saved} of 20000" in log.read_text(), "the job to go on")
    assert "queued again 1 times" in log.read_text()

    status = jaxdist("launch", "status", folder)
    assert "JobState=RUNNING" in status.out
    assert "resume from step" in jaxdist("launch", "logs", folder).out
    assert jaxdist("launch", "stop", folder).code == 0
    until(lambda: "JobState=CANCELLED" in state_of(job), "the end")


def test_two_ranks_of_mpirun_are_one_run(jaxdist: Jaxdist):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (openmpi-bin)")
    jaxdist.config(eval={"every": None})
    root = ["--set", "as_root=true"] if getpass.getuser() == "root" else []
    done = jaxdist("launch", "config.yaml", "--on", "mpi", "--processes-per-node", "2", *root)
    assert done.code == 0, done
    assert "mesh   {data: 2} on 2 x cpu" in done.out
    assert steps(jaxdist.run)[-1] == 24


CLICKS = {
    "model": {"type": "dlrm", "width": 4, "bottom": [4], "top": [4]},
    "data": {"type": "clicks", "fields": 3, "ids": 50, "examples": 256, "heldout_examples": 32},
    "optim": {"type": "sgd", "momentum": 0.0, "learning_rate": 0.5},
    "train": {"steps": 20, "batch_size": 16, "log_every": 1},
    "checkpoint": {"every": 10},
}
HYBRID = "strategy={type: hybrid, servers: 2, optimizer: {type: sgd}}"


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["split"] == "train"]


@pytest.mark.slow
def test_servers_of_mpirun_have_ranks_of_their_own(jaxdist: Jaxdist):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (openmpi-bin)")
    jaxdist.config(CLICKS)
    assert jaxdist.here("train", "config.yaml", "run.directory=alone").code == 0
    root = ["--set", "as_root=true"] if getpass.getuser() == "root" else []
    done = jaxdist("launch", "config.yaml", HYBRID, "--on", "mpi", "--servers", "1", *root)
    assert done.code == 0, done
    assert "waiting for 2 table servers of other hosts" in done.out
    assert "table 0 has ended" in done.out
    assert losses(jaxdist.run) == pytest.approx(losses(jaxdist.folder / "alone"), rel=1e-5)


@pytest.mark.slow
def test_servers_of_a_slurm_job_have_nodes_of_their_own(slurm, jaxdist: Jaxdist):
    """Another job takes the nodes of both components, and both go on afterwards."""
    host = socket.gethostname()
    if not names_resolve("n1", "n2", host):
        pytest.skip("the nodes n1 and n2 are no names here: add `127.0.0.1 n1 n2` to /etc/hosts")
    certified(jaxdist.folder / "tls", f"DNS:{host}")
    jaxdist.config(CLICKS, train={"steps": 3000}, checkpoint={"every": 1000})
    tls = "authority: tls/ca.pem, certificate: tls/own.pem, key: tls/own.key"
    done = jaxdist(
        "launch", "config.yaml", HYBRID, "strategy.processes.host=auto",
        f"strategy.processes.tls={{{tls}}}", "--on", "slurm", "--servers", "1",
        "--set", "partition=main", "--set", "time=30", "--set", "notice_seconds=60",
    )  # fmt: skip
    assert done.code == 0, done
    job = done.out.split("job ")[1].split(":")[0]
    log = jaxdist.folder / f"runs/launches/config/slurm-{job}.log"
    until(lambda: log.exists() and "\nstep " in log.read_text(), "steps")
    urgent = asked("sbatch", "--parsable", "-p", "urgent", "-N2", "-o", "/dev/null",
                   "--wrap", "sleep 1")  # fmt: skip
    until(lambda: "to be queued again: another job needs the nodes" in log.read_text(), "the end")
    assert "takes its place" not in log.read_text(), "a server has left before the run"
    until(lambda: "COMPLETED" in state_of(urgent.strip()), "the urgent job")
    until(lambda: "JobState=PENDING" in state_of(job), "the queue")
    asked("scontrol", "update", f"JobId={job}", "StartTime=now")  # not in two minutes
    until(lambda: "resume from step " in log.read_text(), "the job to go on")
    until(lambda: "JobState=COMPLETED" in state_of(job), "the end of the run")
    assert "JobState=COMPLETED" in state_of(f"{job}+1")
    assert len({*steps(jaxdist.run)} & {3000}) == 1


def test_an_actor_of_ray_is_killed_and_the_run_goes_on(jaxdist: Jaxdist):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'jaxdist[ray]'")
    jaxdist.config({**DIGITS, **LONG}, train={"steps": 3000}, checkpoint={"every": 200})
    process = jaxdist.start("launch", "config.yaml", "--on", "ray", "--processes-per-node", "2")
    until(lambda: steps(jaxdist.run), "a checkpoint")
    for pid in _children(process.pid, b"ray::Process"):
        os.kill(pid, signal.SIGKILL)
        break
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, (out, err)
    assert "generation 1 ended (process " in out
    assert "resume from step" in out
    assert steps(jaxdist.run)[-1] == 3000


def test_a_ray_that_nobody_answers_at_is_named(jaxdist: Jaxdist):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'jaxdist[ray]'")
    jaxdist.config()
    address = f"127.0.0.1:{free_port()}"
    tried = ["launch", "config.yaml", "--on", "ray", "--set", f"address={address}"]
    done = jaxdist(*tried)
    assert "does not require a token" in done.message
    done = jaxdist(*tried, "--set", "insecure=true")
    assert f"cannot connect to Ray at {address}" in done.message


def _children(root: int, name: bytes) -> list[int]:
    """Processes of this name whose session began after the launch, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) > root:
            try:
                if (entry / "cmdline").read_bytes().startswith(name):
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)
