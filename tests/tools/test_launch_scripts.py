"""The scripts of tools/launch start the job that they say they start, from the same args file.

SLURM's programs are stand-ins here; tests/nodes/test_slurm.py has a real SLURM. Nothing has run on
Kubernetes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from tests.e2e.jobs import COMMON, replace_flags

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "tools" / "launch"
ARGS = f"@{ROOT / 'configs' / 'quickstart_grpo.args'}"
SECRET = "0123456789abcdef" * 4


def run(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEGARL_", "SLURM_"))}
    return subprocess.run(
        [str(LAUNCH / script), *arguments],  # as the page says: the file is executable
        env=clean | {"PYTHON": sys.executable} | env,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_one_machine_needs_no_rendezvous():
    done = run("torchrun.sh", "--nproc-per-node", "2", "--dry-run", "--", ARGS, "--save", "runs/a")
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 0 -m megarl.train"
    assert shlex.split(done.stdout) == [sys.executable, *command.split(), ARGS, "--save", "runs/a"], (
        done.stderr
    )


def test_a_node_takes_the_address_by_which_it_reaches_the_head():
    several = ("--nnodes", "2", "--nproc-per-node", "8", "--head", "localhost", "--port", "4321", "--dry-run")
    done = run("torchrun.sh", *several, "--", ARGS, MEGARL_JOB_SECRET=SECRET)
    rendezvous = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:4321 --local-addr 127.0.0.1"
    assert rendezvous in done.stdout.replace("--local-addr ::1", "--local-addr 127.0.0.1"), done.stderr


def test_a_node_whose_name_is_a_loopback_address_takes_that_of_the_named_interface(tmp_path):
    """Debian maps a machine's own name to 127.0.1.1, which the other nodes do not reach."""
    several = ("--nnodes", "2", "--nproc-per-node", "8", "--head", "Localhost", "--dry-run", "--", ARGS)
    asked = run("torchrun.sh", *several, MEGARL_JOB_SECRET=SECRET)
    assert asked.returncode == 2 and asked.stderr.startswith("GLOO_SOCKET_IFNAME (variable, not set)"), asked
    done = run("torchrun.sh", *several, MEGARL_JOB_SECRET=SECRET, GLOO_SOCKET_IFNAME="lo")
    assert "--local-addr 127.0.0.1" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "script, arguments, told",
    [
        ("torchrun.sh", ["--nproc-per-node", "2"], "there are no arguments of megarl train"),
        (
            "torchrun.sh",
            ["--lr", "1", "--", ARGS],
            "--lr is no option. Options of megarl train come after --",
        ),
        ("torchrun.sh", ["--nnodes", "2", "--", ARGS], "--head (not given): must name a node of the job"),
        (
            "torchrun.sh",
            ["--nnodes", "2", "--head", "a", "--", ARGS],
            "MEGARL_JOB_SECRET (variable, not set)",
        ),
        ("slurm.sh", ["runs/a", ARGS], "there is no SLURM job. Start it with sbatch --nodes N"),
        (
            "ray_submit.sh",
            ["--nnodes", "1", "--", ARGS],
            "--address (not given): must be the URL of Ray's job",
        ),
        (
            "ray_submit.sh",
            ["--address", "http://h:1", "--", ARGS],
            "--nnodes and --nproc-per-node: must both",
        ),
    ],
)
def test_what_is_missing_is_named(script, arguments, told):
    done = run(script, *arguments)
    assert done.returncode == 2 and f"tools/launch/{script}: {told}" in done.stderr, done.stderr


def test_ray_gets_one_entry_point_that_keeps_the_words_apart(tmp_path):
    options = ("--address", "http://head:8265", "--nnodes", "2", "--nproc-per-node", "8", "--dry-run")
    done = run("ray_submit.sh", *options, "--folder", "/shared/a b", "--", ARGS, "--save", "/shared/a b/run")
    words = shlex.split(done.stdout)
    begin = words.index("--")
    assert words[1:begin] == ["-m", "ray.scripts.scripts", "job", "submit", "--address", "http://head:8265"]
    shell, option, line = words[begin + 1 :]
    folder, command = line.split(" && exec ")
    assert (shell, option, shlex.split(folder)) == ("bash", "-c", ["cd", "/shared/a b"])
    job = shlex.split(command)
    config = load_config([*job[job.index("train") + 1 :], "--model", "x", "--train-data", "y"], REGISTRY)
    assert (config.placement.executor, config.placement.world_size) == ("ray", 16)
    assert config.run.save == "/shared/a b/run"


@pytest.fixture
def slurm(tmp_path):
    """Start slurm.sh as SLURM would, with stand-ins for its programs and for Python. Returns the process."""
    programs = {
        "scontrol": 'echo "$*" >> "$OUT/calls"; [ "$1" != show ] || echo localhost',
        "srun": 'echo $$ > "$OUT/pid"; shift; exec "$@"',
        "scancel": 'echo "$*" >> "$OUT/calls"; kill -TERM "$(cat "$OUT/pid")"',
        # what torchrun.sh starts: the question for the address, then torchrun, which SIGTERM ends with a delay
        "python": f'case "$*" in -c*) exec {shlex.quote(sys.executable)} "$@";; esac\n'
        'trap "sleep 0.3; exit 1" TERM; echo "$*" > "$OUT/torchrun"; mv "$OUT/torchrun" "$OUT/command"\n'
        'for i in $(seq 100); do [ ! -e "$OUT/end" ] || exit 0; sleep 0.1; done',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "OUT": str(tmp_path),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "NPROC_PER_NODE": "8",
    }

    def start(run: Path) -> subprocess.Popen:
        (tmp_path / "command").unlink(missing_ok=True)
        process = subprocess.Popen(
            ["bash", str(LAUNCH / "slurm.sh"), str(run), ARGS],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 20
        while not (tmp_path / "command").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        return process

    return start


def test_slurm_starts_torchrun_on_all_nodes_and_continues_a_run(slurm, tmp_path):
    run = tmp_path / "run"
    process = slurm(run)
    command = (tmp_path / "command").read_text()
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:24711" in command
    assert "--rdzv-id slurm_4711_0 --nproc-per-node 8" in command
    assert command.endswith(f"-m megarl.train {ARGS} --save {run}\n")
    (tmp_path / "end").touch()
    assert process.wait(10) == 0
    assert "requeue" not in (tmp_path / "calls").read_text()
    run.mkdir()
    (run / "resolved.args").touch()
    process = slurm(run)
    assert (tmp_path / "command").read_text().endswith(f"--save {run} --load {run}\n")
    process.wait(10)


def test_slurm_queues_a_job_again_after_its_sigterm(slurm, tmp_path):
    process = slurm(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=10)
    assert process.returncode == 1 and "stopped by SIGTERM (time limit or preemption)" in said
    assert (tmp_path / "calls").read_text().splitlines()[-2:] == ["--signal=TERM 4711.0", "requeue 4711"]


def test_the_pytorchjob_starts_torchrun_on_each_pod(tmp_path):
    job = yaml.safe_load((LAUNCH / "kubernetes_pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    nodes = sum(spec["replicas"] for spec in replicas.values())
    for spec in replicas.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and pod["terminationGracePeriodSeconds"] > 25
        assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        (secret,) = container["env"]
        assert secret["name"] == "MEGARL_JOB_SECRET" and "secretKeyRef" in secret["valueFrom"]
        script = (
            container["command"][2]
            .replace("/shared/megarl", shlex.quote(str(ROOT)))
            .replace(" -- ", " --dry-run -- ", 1)
        )
        script = script.replace("/shared/runs", str(tmp_path))
        env = os.environ | {"MASTER_ADDR": "localhost", "MEGARL_JOB_SECRET": SECRET, "PYTHON": sys.executable}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert f"--nnodes {nodes} " in done.stdout and f"--nproc-per-node {gpus} " in done.stdout, done.stderr
        words = shlex.split(done.stdout)
        assert words[-5:] == ["-m", "megarl.train", "@/shared/job.args", "--save", f"{tmp_path}/a"]


def test_the_rayjob_is_a_job_of_as_many_nodes_and_gpus_as_its_cluster():
    job = yaml.safe_load((LAUNCH / "kubernetes_rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, command, args, *flags = job["spec"]["entrypoint"].split()
    assert (program, command, args) == ("megarl", "train", "@/shared/job.args")
    config = load_config([ARGS, *flags], REGISTRY)
    placement = config.placement
    assert config.checkpoint.load == config.run.save  # or a second apply would be refused
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert placement.executor == "ray" and placement.nnodes == group["replicas"] == group["maxReplicas"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == placement.nproc_per_node
    import ray

    assert job["spec"]["rayClusterSpec"]["rayVersion"] == ray.__version__


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_two_nodes_on_this_machine_train(sums_data, tmp_path):
    data = ("--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl"))
    files = (*data, "--save", str(tmp_path / "run"))
    arguments = replace_flags([*COMMON, *files], ["--train-iters", "2"])
    options = ("--nnodes", "2", "--head", "127.0.0.1", "--port", "29517", "--nproc-per-node", "1")
    env = os.environ | {"PYTHON": sys.executable, "MEGARL_JOB_SECRET": SECRET}
    nodes = [
        subprocess.Popen(["bash", str(LAUNCH / "torchrun.sh"), *options, "--", *arguments], env=env)
        for _ in range(2)
    ]
    assert [node.wait(250) for node in nodes] == [0, 0]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
