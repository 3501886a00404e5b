"""A SLURM cluster of several nodes on one machine: real slurmctld, slurmd and munged in namespaces.

    with Nodes(2, folder) as nodes, Slurm(nodes) as slurm:
        job = slurm.submit(["--nodes", "2", "job.sh"])
        slurm.wait(job, "COMPLETED")

Debian's packages slurmctld, slurmd, slurm-client and munge have the programs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

from tests.nodes import namespaces
from tests.nodes.namespaces import Nodes

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.socket
StateSaveLocation={folder}/slurm/state
SlurmdSpoolDir={folder}/slurm/spool%n
SlurmctldPidFile={folder}/slurm/slurmctld.pid
SlurmdPidFile={folder}/slurm/slurmd%n.pid
SlurmctldLogFile={folder}/slurm/slurmctld.log
SlurmdLogFile={folder}/slurm/slurmd%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
ReturnToService=2
KillWait=60
NodeName=node[0-1] CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
DAEMONS = """
umask 077
munged --key-file=$FOLDER/slurm/munge.key --socket=/tmp/munge.socket --pid-file=/tmp/munged.pid \
  --log-file=/tmp/munged.log --seed-file=/tmp/munged.seed --force
chmod 0711 /tmp
[ "$NODE" != 0 ] || slurmctld -c
slurmd -D -N node$NODE
exit $?
"""
"""The shell stays, as the first process of the node: it collects orphans, which slurmd waits for at the end
of a job."""


def why_not() -> str | None:
    """Return why no cluster can be made here, or None."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"{missing[0]} is not installed" if missing else namespaces.why_not()


class Slurm:
    """The daemons of a cluster, one slurmd per node. Commands run on node 0."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._folder = nodes.folder / "slurm"

    def __enter__(self) -> Slurm:
        (self._folder / "state").mkdir(parents=True)
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self._folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.nodes.folder))
        for node in range(self.nodes.number):
            self.nodes.start(node, ["bash", "-c", DAEMONS], **self._env)
        deadline = time.monotonic() + 60
        while self.run("sinfo", "--noheader", "--partition=low", "--format=%D %T").strip() != "2 idle":
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        """`Nodes` ends the daemons with all other processes of the nodes."""

    @property
    def _env(self) -> dict[str, str]:
        path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
        conf = str(self._folder / "slurm.conf")
        return {"SLURM_CONF": conf, "FOLDER": str(self.nodes.folder), "PATH": path}

    def run(self, *command: str) -> str:
        """Run a command of SLURM on node 0, and return what it prints; "" if it fails."""
        out = self._folder / "out"
        shell = ["bash", "-c", f'"$@" > {out} 2>> {self._folder}/errors', "run"]
        code = self.nodes.start(0, [*shell, *command], **self._env).wait(60)
        return out.read_text() if code == 0 else ""

    def submit(self, arguments: Sequence[str]) -> int:
        """Submit a batch job, and return its number."""
        said = self.run("sbatch", "--parsable", *arguments)
        assert said.strip().isdigit(), self.logs()
        return int(said)

    def state(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`, such as JobState and Restarts."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: int, state: str, seconds: float = 600) -> dict[str, str]:
        """Wait for a state of a job, and return the job's fields."""
        deadline = time.monotonic() + seconds
        while (fields := self.state(job)).get("JobState") != state:
            assert time.monotonic() < deadline, f"{fields}\n{self.logs()}"
            time.sleep(1.0)
        return fields

    def logs(self) -> str:
        """Return what the daemons, the commands and the jobs have printed."""
        paths = sorted(
            {*self._folder.glob("*.log"), *self.nodes.folder.glob("*.out"), self._folder / "errors"}
        )
        return "\n".join(
            f"== {path}\n{path.read_text(errors='replace')[-5000:]}" for path in paths if path.exists()
        )


def environment(**variables: str) -> list[str]:
    """Return options of sbatch that set variables of the job beside those of the submission."""
    return ["--export", ",".join(("ALL", *(f"{name}={value}" for name, value in variables.items())))]


__all__ = ["Slurm", "environment", "why_not"]
