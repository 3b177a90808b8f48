"""Launches whose servers have machines of their own: what is rendered, and what is refused."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdist.errors import ConfigError
from jaxdist.launch.build import engine
from jaxdist.launch.contract import Job
from jaxdist.launch.servers import with_servers
from jaxdist.wire.config import TlsConfig

CLICKS = {
    "model": {"type": "dlrm", "width": 4, "bottom": [4], "top": [4]},
    "data": {"type": "clicks", "fields": 3, "ids": 50, "examples": 64, "heldout_examples": 8},
    "optim": {"type": "sgd", "learning_rate": 0.5},
    "train": {"steps": 4, "batch_size": 8},
}
TLS = "strategy.processes.tls={authority: a, certificate: b, key: c}"
NETWORK = ("strategy.processes.host=auto", TLS)
TRAIN = ["jaxdist", "train", "config.yaml", "strategy={type: hybrid, servers: 4}", *NETWORK,
         "strategy.processes.remote_servers=4", "--resume", "--distributed"]  # fmt: skip
SERVE = ["jaxdist", "servers", "runs/config", "--here", "--wait", "600"]


@pytest.fixture
def job(jaxdist, monkeypatch) -> Job:
    jaxdist.config(CLICKS)
    monkeypatch.chdir(jaxdist.folder)
    strategy = "strategy={type: hybrid, servers: 4}"
    given = (strategy, *NETWORK)
    return Job("config.yaml", given, "clicks", "jaxdist.cli", nodes=2, folder=Path("/work"))


def rendered(job: Job, on: str, *settings: str, servers: int = 2):
    one = engine(on, settings)
    return one.render(with_servers(job, one, servers), Path("/jobs/launch"))


def test_slurm_gets_a_component_of_the_job_for_servers(job):
    settings = ["partition=gpu", "gpus_per_node=8", "account=us", "srun=--mpi=none"]
    servers = ["servers.partition=cpu", "servers.memory=64G", "servers.options=--exclusive"]
    script = rendered(job, "slurm", *settings, *servers).files["job.sbatch"]
    lines = [line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")]
    trains, serves = lines[: lines.index("hetjob")], lines[lines.index("hetjob") + 1 :]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu"} <= {*trains}
    assert serves == [
        "--job-name=clicks", "--nodes=2", "--ntasks-per-node=2", "--time=1-00:00:00", "--requeue",
        "--partition=cpu", "--account=us", "--mem=64G", "--exclusive",
    ]  # fmt: skip
    # What bash makes of the command that starts both components.
    (command,) = [line for line in script.splitlines() if line.startswith("srun ")]
    nodes = "SLURM_JOB_NODELIST_HET_GROUP_0=n1"
    words = f"{nodes}; srun() {{ printf '%s\\n' \"$@\"; }}; {command.removesuffix('&')}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "--kill-on-bad-exit=1", "--het-group=0", "--mpi=none", "env", "-u", "SLURM_HET_SIZE",
        "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NODELIST=n1", *TRAIN, ":", "--het-group=1",
        "--mpi=none", *SERVE,
    ]  # fmt: skip


def test_mpirun_gets_a_context_for_servers(job):
    job = replace(job, processes=3)
    command = [*rendered(job, "mpi", "hosts=a,b,c,d", "port=7000", "export=PATH").command]
    first, second = command[: command.index(":")], command[command.index(":") + 1 :]
    assert first == [
        "mpirun", "-n", "6", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--host",
        "a:3,b:3", "-x", "PATH", "-x", "JAX_COORDINATOR_PORT=7000", "env",
        "OMPI_COMM_WORLD_SIZE=6", *TRAIN,
    ]  # fmt: skip
    assert second == ["-n", "4", "--host", "c:2,d:2", "-x", "PATH", *SERVE]


@pytest.mark.parametrize(
    ("on", "settings", "overrides", "servers", "message"),
    [
        ("slurm", [], ["strategy.type=synchronous"], 1, "has strategy.type synchronous, and such"),
        ("slurm", [], [], 5, r"--servers 5: 4 servers \(strategy.servers\) cannot be divided"),
        ("slurm", [], [], 3, "--servers 3: .* cannot be divided evenly among 3 machines"),
        ("slurm", [], ["strategy.processes.host=::1"], 2, "::1 is reached on one machine only"),
        ("slurm", [], ["strategy.processes.port=70"], 2, "port 70 does not work with remote_serv"),
        ("mpi", ["hosts=a,b"], [], 2, "hosts: 2 names for --nodes 2 --servers 2"),
        ("mpi", [], [], 2, "--nodes 2 --servers 2: without the setting hosts, mpirun chooses"),
        ("local", [], [], 2, "--nodes 2: the engine local uses only one machine"),
        ("tpu-vm", ["slice=a", "zone=b", "folder=c"], [], 2, "tpu-vm has no machines for servers"),
    ],
)
def test_servers_that_a_launch_cannot_place(job, on, settings, overrides, servers, message):
    if overrides == ["strategy.type=synchronous"]:
        job = replace(job, overrides=())
    job = replace(job, overrides=(*job.overrides, *overrides))
    job = replace(job, nodes=1) if on == "tpu-vm" else job
    with pytest.raises(ConfigError, match=message):
        rendered(job, on, *settings, servers=servers)


def test_a_dry_run_shows_where_the_servers_are(jaxdist):
    jaxdist.config({**CLICKS, "strategy": {"type": "hybrid", "servers": 2}})
    asked = "launch", "config.yaml", "--on", "mpi", "--servers", "1", "--dry-run"
    done = jaxdist.here(*asked)
    assert done.code == 0, done
    assert "strategy.processes.remote_servers=2 --resume --distributed : -n 2" in done.out
    done = jaxdist.here(*asked[:3], "local", *asked[4:])
    assert "the engine local has no machines for servers: leave out --servers" in done.message


def test_workers_that_a_launch_cannot_place(jaxdist):
    strategy = {"type": "parameter_server", "workers": 2, "consistency": {"type": "bsp"}}
    jaxdist.config(strategy=strategy)
    asked = "launch", "config.yaml", "--dry-run", "--on", "slurm", "--nodes"
    many = jaxdist.here(*asked, "4").message
    assert "the other 3 processes are workers, but strategy.workers is 2: change one" in many
    reach = jaxdist.here(*asked, "2").message
    assert "--nodes 2: strategy.processes.host 127.0.0.1 is reached on one machine only" in reach
    done = jaxdist.here(*asked, "1", "--processes-per-node", "3")
    assert "srun --kill-on-bad-exit=1 jaxdist train config.yaml --resume --distributed" in done.out


def test_settings_of_servers_on_hosts():
    from jaxdist.train.strategy.config import Hybrid
    from jaxdist.wire.config import ProcessesConfig

    with pytest.raises(ValueError, match="remote_servers 3 exceeds the 2 servers of the"):
        Hybrid.model_validate({"servers": 2, "processes": {"remote_servers": 3}})
    with pytest.raises(ValueError, match="host auto is reached over a network"):
        ProcessesConfig(host="auto")
    tls = TlsConfig(authority=Path("a"), certificate=Path("b"), key=Path("c"))
    assert ProcessesConfig(host="auto", tls=tls).listening_on("n1").host == "n1"
