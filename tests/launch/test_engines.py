"""What each engine renders, read as the engine would read it; nothing is submitted."""

import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from jaxdist.errors import STOPPED, ConfigError
from jaxdist.launch.build import ENGINES, engine
from jaxdist.launch.contract import Job, seconds_of

FOLDER = Path("/shared/work")
JOB = Job("my config.yaml", ("train.steps=9",), "digits", "jaxdist.cli", nodes=2, folder=FOLDER)
TRAIN = ["jaxdist", "train", "my config.yaml", "train.steps=9", "--resume"]
NEEDED = {
    "local": [],
    "slurm": [],
    "mpi": [],
    "ray": [],
    "gke": ["image=there/it:1"],
    "tpu-vm": ["slice=mine", "zone=us-east5-a", "folder=/home/me/work"],
}


def rendered(on: str, *settings: str, **changes):
    one, job = engine(on, [*NEEDED[on], *settings]), replace(JOB, **changes)
    one.check(job)
    return one.render(job, Path("/shared/work/launch"))


def test_every_engine_has_what_it_needs_and_a_program():
    assert NEEDED.keys() == ENGINES.keys()
    for name, kind in ENGINES.items():
        assert engine(name, NEEDED[name]).model_dump()["type"] == name
        assert kind.program
        assert kind.install


@pytest.fixture
def script():
    return rendered("slurm", "partition=main", "gpus_per_node=8", "account=us", processes=4).files[
        "job.sbatch"
    ]


def test_a_batch_script_is_one_that_bash_can_read(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "srun --kill-on-bad-exit=1 jaxdist train 'my config.yaml' train.steps=9 --resume " in script
    )


def test_a_batch_script_says_what_slurm_is_to_do(script):
    lines = {line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert lines == {
        "--job-name=digits", "--partition=main", "--nodes=2", "--ntasks-per-node=4",
        "--distribution=block:block", "--time=1-00:00:00", "--signal=B:USR1@300", "--requeue",
        "--open-mode=append", "--chdir=/shared/work", "--gpus-per-node=8", "--account=us",
        "--output=/shared/work/launch/slurm-%j.log",
    }  # fmt: skip


def executables(folder: Path, **scripts: str) -> dict[str, str]:
    """Programs of these names that shadow the real ones; the environment to run them in."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


SLURM_SETTINGS = (
    "setup=cd /; . /dev/null",
    "environment.NCCL_DEBUG=INFO",
    "environment.WORDS=a b # 'c'",
    "srun=--container-image=/i.sqsh,--container-mounts=/a:/a,/b:/b",
)


def test_a_batch_script_sets_up_and_starts_srun_with_its_options(tmp_path):
    script = rendered("slurm", *SLURM_SETTINGS).files["job.sbatch"]
    assert "--partition" not in script
    said = 'printf "%s\\n" "$PWD" "$NCCL_DEBUG" "$WORDS" "$@"'
    environ = executables(tmp_path / "bin", srun=f"{said}; exit 3", scontrol="echo none")
    done = subprocess.run(
        ["bash", "-c", script], env=environ, text=True, capture_output=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "/", "INFO", "a b # 'c'", "--kill-on-bad-exit=1", "--container-image=/i.sqsh",
        "--container-mounts=/a:/a,/b:/b", *TRAIN, "--distributed",
    ]  # fmt: skip


def test_a_job_whose_setup_fails_does_not_train(tmp_path):
    script = rendered("slurm", "setup=false; true").files["job.sbatch"]
    environ = executables(tmp_path / "bin", srun="echo trained", scontrol="echo none")
    done = subprocess.run(
        ["bash", "-c", script], env=environ, text=True, capture_output=True, check=False
    )
    assert (done.returncode, "trained" in done.stdout) == (1, False)


def test_limits_as_slurm_writes_them():
    texts = ["90", "1:30:00", "2-12", "1-02:03:04", "5:30"]
    assert [*map(seconds_of, texts)] == [5400, 5400, 216000, 93784, 330]


def test_mpirun_has_ranks_node_by_node():
    command = rendered("mpi", "hosts=[a, b]", "port=7000", processes=2).command
    assert list(command[-6:]) == [*TRAIN, "--distributed"]
    assert command[:5] == ("mpirun", "-n", "4", "--map-by", "ppr:2:node:OVERSUBSCRIBE")
    assert command[command.index("--host") + 1] == "a:2,b:2"
    assert "JAX_COORDINATOR_PORT=7000" in command


def test_one_machine_needs_no_agent_for_one_process():
    assert list(rendered("local", nodes=1).command) == TRAIN
    assert list(rendered("local", nodes=1, processes=2).command[-3:]) == [
        "--elastic", "--processes", "2",
    ]  # fmt: skip


def test_ray_is_told_the_same_command():
    found = json.loads(rendered("ray", "gpus=1", processes=2).files["ray.json"])
    assert found["command"] == ["-P", "-m", "jaxdist.cli", *TRAIN[1:], "--distributed"]
    assert (found["nodes"], found["processes"], found["gpus"]) == (2, 2, 1.0)


def on_a_host(
    command: tuple[str, ...], environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """What gcloud would run on each host of a slice."""
    assert command[:6] == ("gcloud", "compute", "tpus", "tpu-vm", "ssh", "mine")
    assert "--worker=all" in command
    return subprocess.run(
        ["bash", "-c", command[-1].removeprefix("--command=")],
        env=environ, text=True, capture_output=True, check=False, timeout=60,
    )  # fmt: skip


def test_a_run_on_a_tpu_vm_outlives_the_connection_and_is_found_again(tmp_path):
    # It ends by itself after a minute, so that a test that fails leaves nothing behind.
    waits = "for turn in $(seq 3000); do sleep 0.02; done"
    said = f'echo "$LIBTPU_INIT_ARGS" "$@"; trap "echo saved; exit" TERM; {waits}'
    environ = executables(tmp_path / "bin", jaxdist=said)
    settings = [f"folder={tmp_path}", "environment.LIBTPU_INIT_ARGS=--xla_a=1 --b", "setup=cd ."]
    one = engine("tpu-vm", ["slice=mine", "zone=us-east5-a", *settings])
    begin = one.render(replace(JOB, nodes=1), tmp_path).command
    asked = one.commands("digits", tmp_path)

    done = on_a_host(begin, environ)
    assert (done.returncode, done.stdout) == (0, "launched digits\n"), done.stderr
    log = tmp_path / "runs/launches/digits/train.log"
    while not (log.exists() and log.read_text()):
        time.sleep(0.02)
    assert log.read_text() == f"--xla_a=1 --b {' '.join([*TRAIN[1:], '--distributed'])}\n"
    assert "is training" in on_a_host(asked["status"], environ).stdout
    again = on_a_host(begin, environ)
    assert (again.returncode, "has this run already" in again.stderr) == (1, True)
    assert "train my config.yaml" in on_a_host(asked["logs"], environ).stdout

    assert on_a_host(asked["stop"], environ).returncode == 0
    while "is training" in (found := on_a_host(asked["status"], environ).stdout):
        time.sleep(0.02)
    assert "no process; the last line of its log: saved" in found
    assert "no process" in on_a_host(asked["stop"], environ).stdout


def test_a_run_on_a_tpu_vm_does_not_start_where_its_setup_fails(tmp_path):
    environ = executables(tmp_path / "bin", jaxdist="echo trained")
    one = engine("tpu-vm", ["slice=mine", "zone=z", f"folder={tmp_path}", "setup=false"])
    done = on_a_host(one.render(replace(JOB, nodes=1), tmp_path).command, environ)
    assert (done.returncode, done.stdout) == (1, "")


def manifest(*settings, **changes):
    return YAML(typ="safe").load(rendered("gke", *settings, **changes).files["jobset.yaml"])


def test_slices_of_tpus_become_a_job_each():
    found = manifest("tpu=v5p:4x4x4", "slices=2", "queue=team", nodes=1)
    (job,) = found["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert (job["replicas"], job["template"]["spec"]["parallelism"]) == (2, 16)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["containers"][0]["env"] == []  # GKE tells them
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}


def test_nodes_with_gpus_are_told_where_the_first_is():
    found = manifest("gpus_per_node=8", "volume={claim: shared}")
    (job,) = found["spec"]["replicatedJobs"]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    environ = {one["name"]: one["value"] for one in container["env"]}
    assert environ == {
        "JAX_COORDINATOR_ADDRESS": "digits-slice-0-0.digits:8476",
        "JAX_NUM_PROCESSES": "2",
    }
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["volumeMounts"] == [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "data", "mountPath": "/data"},
    ]


def test_pods_have_what_a_cluster_asks_for():
    found = manifest(
        "tpu=v5e:2x4", "service_account=trainer", "environment.JAXDIST_CACHE=/data/cache",
        "environment.LEVEL=3", "node_selector={cloud.google.com/gke-spot: 'true'}", nodes=1,
    )  # fmt: skip
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert pod["containers"][0]["env"] == [
        {"name": "JAXDIST_CACHE", "value": "/data/cache"},
        {"name": "LEVEL", "value": "3"},
    ]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]


def test_evictions_do_not_use_up_the_restarts_of_a_set():
    """A pod that is evicted fails, and so do the others, which stop at the same step."""
    found = manifest("restarts=3")["spec"]
    (rule,) = found["failurePolicy"]["rules"]
    assert found["failurePolicy"]["maxRestarts"] == 3
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = found["replicatedJobs"][0]["template"]["spec"]
    evicted, stopped = job["podFailurePolicy"]["rules"]
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    assert evicted == {"action": "FailJob", "onPodConditions": [disrupted]}
    assert stopped["onExitCodes"]["values"] == [STOPPED]
    assert (
        stopped["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["tpu=v5e:2x4"],
        ["tpu=v6e:16x16", "slices=4"],
        ["gpus_per_node=8", "volume={claim: shared}"],
        ["cpu=4", "service_account=me", "environment.A=b", "node_selector={a/b: c}"],
    ],
)
def test_kubernetes_takes_the_job_of_a_set(settings):
    validate = pytest.importorskip("kubernetes_validate").validate
    found = manifest(*settings, nodes=1)
    (job,) = found["spec"]["replicatedJobs"]
    names = {"name": f"{found['metadata']['name']}-{job['name']}-0"}
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": names, **job["template"]}
    validate(whole, "1.33", strict=True)
    # What JobSet adds to it, v1alpha2.
    assert found["spec"].keys() == {"failurePolicy", "network", "replicatedJobs"}
    assert job.keys() == {"name", "replicas", "template"}


@pytest.mark.parametrize(
    ("name", "settings", "changes", "message"),
    [
        ("local", [], {}, "--nodes 2: the engine local uses only one machine"),
        ("slurm", ["time=5"], {}, "time 5 is not longer than notice_seconds 300"),
        ("slurm", ["gpus_per_node=8"], {"processes": 3}, "8 cannot be divided evenly among"),
        ("mpi", ["hosts=[a]"], {}, "hosts: 1 names for --nodes 2"),
        ("gke", [], {"name": "My_Run"}, "--name My_Run: a name in Kubernetes has lowercase"),
        ("gke", [], {"name": "a" * 41}, "at most 40"),
        ("gke", ["tpu=v5e:2x4"], {}, "determines the number of hosts"),
        ("gke", ["slices=2"], {}, "slices 2 needs the setting tpu"),
        ("gke", ["tpu=v5e:2x4", "gpus_per_node=1"], {}, "a pod has either TPUs or GPUs"),
        ("gke", ["tpu=v5e:2x4x4"], {}, "has 3 dims, but topologies of v5e have 2"),
        ("gke", [], {"processes": 2}, "a pod runs a single process"),
        ("tpu-vm", [], {}, "one process on every host of the slice"),
    ],
)
def test_what_an_engine_cannot_run(name, settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        rendered(name, *settings, **changes)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("slurmm", [], r"--on slurmm: did you mean 'slurm'\?"),
        ("gke", [], r"1 problem in the settings of --on gke \(--set\):\n  image .*required, but"),
        ("slurm", ["tme=3"], r"  tme = 3 \(--set 'tme=3'\): unknown key; did you mean 'time'"),
        ("slurm", ["partition"], r"--set 'partition': the setting has no '='"),
        (
            "slurm",
            ["environment.2=a"],
            "'2' is not a valid name of an environment variable: use letters, digits",
        ),
        ("mpi", ["hosts.0=a"], "expected a list"),
    ],
)
def test_settings_that_there_are_not(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        engine(name, settings)


def test_lists_are_written_with_commas_and_text_as_it_is():
    assert engine("mpi", ["hosts=a, b"]).model_dump()["hosts"] == ("a", "b")
    assert engine("mpi", ["hosts=[a, b]"]).model_dump()["hosts"] == ("a", "b")
    found = engine("slurm", ["partition=a,b", "options=--exclusive,--exclude=n1,n2", "account=007"])
    given = found.model_dump()
    assert given["options"] == ("--exclusive", "--exclude=n1,n2")
    assert (given["partition"], given["account"]) == ("a,b", "007")
    assert engine("slurm", ["partition=null"]).model_dump()["partition"] is None


def test_a_dry_run_prints_all_of_it_and_writes_nothing(jaxdist):
    jaxdist.config()
    done = jaxdist.here(
        "launch", "config.yaml", "--on", "slurm", "--set", "partition=main", "--dry-run"
    )
    assert done.code == 0, done
    assert "#SBATCH --partition=main" in done.out
    assert f"sbatch --parsable {jaxdist.folder}/runs/launches/config/job.sbatch" in done.out
    assert not (jaxdist.folder / "runs").exists()


def test_mistakes_end_before_anything_is_written(jaxdist, monkeypatch):
    jaxdist.config(train={"stepss": 3})
    done = jaxdist.here("launch", "config.yaml")
    assert (done.code, "did you mean 'steps'" in done.message) == (2, True), done
    jaxdist.config()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = jaxdist.here("launch", "config.yaml", "--on", "slurm", "--set", "partition=main")
    assert done.code != 0
    assert "sbatch is not installed here: install Slurm's client" in done.message
    assert not (jaxdist.folder / "runs").exists()
    done = jaxdist.here("launch", "status", "nowhere")
    assert "nowhere is not the folder of a launch" in done.message


def test_what_is_found_here_is_said(jaxdist, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = jaxdist.here("launch", "explain")
    assert "Slurm: ignored, SLURM_STEP_NODELIST, SLURM_PROCID not set: this shell" in done.out
    assert "--on gke: " in done.out
