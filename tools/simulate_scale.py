"""Measure what a large job costs the driver: the real driver against light processes that stand in for ranks.

    python tools/simulate_scale.py --nodes 16 --samples 4096 --length 8192 --json out.json
    python tools/simulate_scale.py --fit out_128.json out_512.json out_1024.json     # what 4,096 ranks would take

real      the loop, planner, scheduler, flow and checks of `megarl.Trainer`; its executor with messages,
          signatures and the tree of relays; one relay process and one watch process per node
stand-in  the ranks: processes without torch, forked from one. They take every command, check its signature, and
          answer with records and metrics of the size that real roles send. They compute and wait for nothing
modelled  how long the roles would take on real devices: HARDWARE, fixed before anything was measured

The job is PPO of a 70B with a critic of another layout, on nodes of eight ranks: every step has two plans,
one for each mesh, and columns that move between them. The driver's seconds are CPU seconds of its process,
with all threads, so they do not depend on how busy this machine is. Times from a command to its last answer
do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from megarl.packing import Sample
from megarl.runtime import relay_process, signing
from megarl.runtime.channel import Channel, ConnectionLost
from megarl.runtime.hosting import HostedRoles
from megarl.runtime.messages import Call, Failure, Kill, Reply, encode, read_command, signed_report
from megarl.runtime.relay import children_of, listen, parent_of

PER_NODE, TP, PP, GROUP = 8, 8, 2, 8
HOST = "127.0.0.1"
# The config.json of Llama-3.1-70B.
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
MODEL |= {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
MODEL |= {"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}
MODEL |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072}
HARDWARE = {
    "parameters": 70.6e9,
    "flops_per_device": 989e12,  # H100 SXM, bf16, dense (NVIDIA's data sheet)
    "model_flops_utilization": 0.35,
    "tokens_per_s_per_engine": 2500.0,  # 8 devices, about 50 sequences at 50 tokens a second each
    "network_bytes_per_s_per_device": 40e9,  # 400 Gb/s, four fifths of it
}
METRICS = {"update": 28, "sync": 12, "advantages": 16}
"""Number of metrics that one rank returns."""


def worker_seconds(samples: int, length: int, ranks: int) -> dict[str, float]:
    """Return the seconds of each phase of a step on real devices, by HARDWARE. Attention is left out, so long
    samples would take longer."""
    tokens, flops = samples * length, 2 * HARDWARE["parameters"]
    rate = ranks * HARDWARE["flops_per_device"] * HARDWARE["model_flops_utilization"]
    forward = tokens * flops / rate
    return {
        "generate": tokens / (ranks / TP * HARDWARE["tokens_per_s_per_engine"]),
        "forward passes of actor, reference and critic": 3 * forward,
        "updates of actor and critic": 2 * 3 * forward,
        "sync": 2 * HARDWARE["parameters"] / TP / HARDWARE["network_bytes_per_s_per_device"],
    }


# The light processes. Nothing here imports torch.


class StandIns:
    """All roles of one rank: they answer with numbers that follow from the ids alone, and compute nothing."""

    def __init__(self, rank: int, job: Mapping[str, Any]) -> None:
        self.rank, self.job, self.samples = rank, job, []

    def setup(self): ...

    def shut_down(self): ...

    def release(self, sample_ids: msgspec.Raw, source: str = "train"): ...

    def distribute(self, key: str, samples: msgspec.Raw, mini_batches: msgspec.Raw, source: str = "train"):
        return {"batch/samples_moved": 1.0, "batch/bytes_moved": 1e6}

    def exchange(self, columns: Sequence[str], source: str, destination: str):
        return {"batch/bytes_exchanged": 1e6}

    def sync(self, version: int):
        return metrics("sync")

    def send_weights(self, version: int): ...

    def generate(self, purpose: str, visits: dict[int, int], greedy: bool = False):
        """Answer this engine's block of the prompts, on its first rank."""
        if self.rank % TP:
            return []
        engine, engines = self.rank // TP, self.job["ranks"] // TP
        prompts, owners = list(visits), tuple(range(self.rank, self.rank + TP))
        here = prompts[engine * len(prompts) // engines : (engine + 1) * len(prompts) // engines]
        self.samples = []
        for visit in here:
            draw = random.Random(visit)
            for i in range(GROUP):
                length = draw.randint(self.job["length"] // 2, self.job["length"])
                sample, digest = visit * GROUP + i, draw.getrandbits(32)
                self.samples.append(
                    Sample(sample, length, length - 256, owners, False, digest, visit, self.job["version"])
                )
        return self.samples

    def score(self, purpose: str, sample_ids: msgspec.Raw, num_logged: int | None = None):
        return [
            {"sample_id": s.sample_id, "reward": float(s.sample_id % 3 > 0), "digest": s.digest}
            for s in self.samples
        ]

    def log_probs(self):
        names = ("tokens", "max_abs", "mean_abs", "clipped_abs", "outliers", "log_prob_abs")
        return {f"mismatch/{name}": 1.0 if name in ("tokens", "log_prob_abs") else 0.0 for name in names}

    def values(self): ...

    def advantages(self, *of_samples: msgspec.Raw, **scores: msgspec.Raw):
        return metrics("advantages")

    def update(self, kl_coef: float = 0.0):
        return metrics("update")

    def fail(self, bad_rank: int):
        if self.rank == bad_rank:
            raise ValueError("learning rate (-1) must be positive")


def metrics(method: str) -> dict[str, float]:
    return {f"simulated/{method}_{i}": 1.0 + i / 7 for i in range(METRICS[method])}


def run_rank(rank: int, address: str, job: Mapping[str, Any]) -> None:
    """Take all commands, as `worker_loop.serve` does, without torch and its store."""
    channel, index = Channel(address), 0
    hosted = HostedRoles(dict.fromkeys(job["roles"], StandIns(rank, job)), rank)
    while isinstance(command := read_command(index, channel.next_message()), Call):
        if rank in command.ranks:
            try:
                reply = hosted.run(command, index)
            except Exception as error:  # process boundary
                failure = Failure.of(error, command.role, command.method, command.label)
                reply = Reply(index, rank, failure=failure)
            channel.report(signed_report(reply))
        index += 1
    if not isinstance(command, Kill):
        channel.report(signed_report(Reply(index, rank, encode(None))))


def serve_nodes(job: dict[str, Any]) -> None:
    """Fork the processes of all nodes, and wait for them."""
    from megarl.runtime import node_watch_process
    from megarl.runtime.keep_alive import KeepAlive

    signing.job_secret()
    nodes = job["ranks"] // PER_NODE
    listeners = [listen(HOST) for _ in range(nodes)]
    addresses = [f"{HOST}:{listener.getsockname()[1]}" for listener in listeners]
    pids: list[list[int]] = []
    for node in range(nodes):
        ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
        of_node = [fork(lambda rank=rank: run_rank(rank, addresses[node], job)) for rank in ranks]
        parent = job["tree"] if (above := parent_of(node)) is None else addresses[above]
        num_children = PER_NODE + len(children_of(node, nodes))
        listener = listeners[node].fileno()
        of_node.append(fork(lambda: relay_process.main(listener, parent, num_children, of_node[0])))
        watched = job["watch"], of_node[0], ranks, KeepAlive()
        of_node.append(fork(lambda: node_watch_process.main(*watched)))
        pids.append(of_node)
    for listener in listeners:
        listener.close()
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def fork(run) -> int:
    """Run a function in a child, which ends then. Returns the child's process id."""
    if pid := os.fork():
        return pid
    with contextlib.suppress(ConnectionLost, BrokenPipeError, KeyboardInterrupt):
        run()
    os._exit(0)


# The driver.


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """Run some steps of the job, then let a rank raise and a node die. Returns what was measured."""
    from megarl.loggers.console import Progress
    from megarl.trainer.own_ranks import Started
    from megarl.trainer.trainer import Trainer

    with tempfile.TemporaryDirectory(prefix="simulate-") as folder, open(os.devnull, "w") as nowhere:
        config, inputs = job_of(options, Path(folder))
        with nodes_of(config, options) as (executor, pids):
            progress = Progress(options.steps, nowhere, terminal=False)
            started = Started(executor, inputs, options.nodes * PER_NODE, progress)
            with Trainer(config, started=started) as trainer:
                result = measure_steps(trainer, executor)
                result |= measure_calls(executor) | measure_rank(options)
            result |= measure_failures(executor, pids)
    return describe(options) | result


def job_of(options: argparse.Namespace, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of the job, and what its driver would have read."""
    from megarl.algorithms import REGISTRY
    from megarl.config.hf_config import ModelShape
    from megarl.config.loader import load_config
    from megarl.data.columns import Prompt
    from megarl.data.prompts import PromptDataset
    from megarl.trainer.preflight import Inputs

    model, data = folder / "model", folder / "train.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    data.write_text(json.dumps({"prompt": "1+1"}) + "\n")
    prompts = options.samples // GROUP
    flags = (
        f"--algorithm ppo --bf16 --model {model} --train-data {data} --save {folder}/run "
        f"--nnodes {options.nodes} --nproc-per-node {PER_NODE} --train-iters {options.steps} "
        f"--num-prompts {prompts} --num-samples-per-prompt {GROUP} --global-batch-size {options.samples // 4} "
        f"--max-prompt-length 512 --max-response-length {options.length - 512} "
        f"--max-tokens-per-micro-batch {max(16384, options.length)} "
        f"--tensor-model-parallel-size {TP} --pipeline-model-parallel-size {PP} --sequence-parallel "
        f"--critic-pipeline-model-parallel-size 1 --rollout-tensor-parallel-size {TP}"
    )
    config = load_config(flags.split(), REGISTRY)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, log_with=()))
    dataset = PromptDataset([Prompt()] * (2 * prompts))
    return config, {"": Inputs(ModelShape.load(model), dataset, None)}


@contextlib.contextmanager
def nodes_of(config: Any, options: argparse.Namespace) -> Iterator[tuple[Any, list[list[int]]]]:
    """Start the light processes, and give the executor that reaches them, with the process ids of each
    node."""
    from megarl.config.mesh import hosting_ranks
    from megarl.runtime.job_store import job_store
    from megarl.runtime.mailbox import connect
    from megarl.runtime.store_executor import Nodes, StoreExecutor
    from megarl.trainer.executors import interfaces_of

    world_size, store = options.nodes * PER_NODE, job_store(HOST)
    ranks = hosting_ranks(config, world_size)
    client, nodes = connect(f"{HOST}:{store.port}", "simulation"), Nodes(HOST, options.nodes)
    executor = StoreExecutor(ranks, world_size, 3600.0, client, interfaces_of(ranks), nodes)
    executor.watch_nodes()
    job = {
        "ranks": world_size,
        "roles": list(ranks),
        "length": options.length,
        "version": 0,
        "tree": executor._tree.address,
        "watch": executor._node_watch.address,
    }
    server = subprocess.Popen(
        [sys.executable, "-P", __file__, "--serve", json.dumps(job)],
        env=os.environ | {signing.JOB_SECRET: signing.job_secret()},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        pids = json.loads(server.stdout.readline())
        executor.call("data", "release", []).result()  # until all ranks are there
        yield executor, pids
    finally:
        executor.kill(0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def measure_steps(trainer: Any, executor: Any) -> dict[str, Any]:
    """Run all steps. Returns the medians of a step, and how much memory the steps took."""
    import gc

    gc.collect()
    idle, steps = memory("VmRSS"), []
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in trainer.steps():
        before = counters(executor)
        trainer.update(trainer.rollout())
        trainer.wait()
        after = counters(executor)
        steps.append({name: after[name] - before[name] for name in before})
    result = {name: median(step[name] for step in steps) for name in steps[0]}
    return result | {"idle_bytes": idle, "grown_bytes": memory("VmHWM") - idle}


def counters(executor: Any) -> dict[str, float]:
    info = [
        child.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        for child in executor._tree._children
    ]
    sent, received = (
        sum(int.from_bytes(of_child[at : at + 8], sys.byteorder) for of_child in info) for at in (120, 128)
    )  # tcpi_bytes_acked and tcpi_bytes_received, linux/tcp.h
    return {
        "driver_s": time.process_time(),
        "wall_s": time.perf_counter(),
        "bytes_sent": sent,
        "bytes_received": received,
        "commands": executor.num_calls,
    }


def measure_calls(executor: Any, count: int = 20) -> dict[str, float]:
    """Return the times of a call without work on all ranks, from the command to its last answer."""
    walls, start = [], time.process_time()
    for _ in range(count):
        issued = time.perf_counter()
        executor.call("data", "release", []).result()
        walls.append(time.perf_counter() - issued)
    return {"call_wall_s": median(walls), "call_driver_s": (time.process_time() - start) / count}


def measure_rank(options: argparse.Namespace) -> dict[str, float]:
    """Return the CPU seconds in which one rank checks and decodes a plan for all ranks, and works out its own
    messages."""
    from megarl.config.mesh import MeshSpec, replicas
    from megarl.packing import plan_mini_batches, plan_route, ranks_of_samples
    from megarl.runtime.messages import decode_arguments, encode_arguments, signed_command
    from megarl.workers.data import DataRole

    ranks = range(options.nodes * PER_NODE)
    mesh, maker = (
        MeshSpec(tuple(ranks), tp=TP, pp=PP),
        StandIns(0, vars(options) | {"ranks": TP, "version": 0}),
    )
    samples = maker.generate("train", dict.fromkeys(range(options.samples // GROUP), 0))
    plans = plan_mini_batches(samples, options.samples // 4, {}, mesh.dp, options.length, 8192, "0/1")
    arguments = encode_arguments("data", "distribute", ("actor", samples, plans), {})
    message = signed_command(0, Call("data", tuple(ranks), "distribute", "step 1", arguments))
    start = time.process_time()
    method = DataRole.distribute.__get__(object())
    _, samples, plans = decode_arguments(method, read_command(0, message).arguments).args
    destinations = ranks_of_samples(plans, replicas(mesh))
    plan_route(0, {s.sample_id: s.owners for s in samples}, destinations)
    return {"distribute_bytes": len(message), "rank_distribute_s": time.process_time() - start}


def measure_failures(executor: Any, pids: list[list[int]]) -> dict[str, float]:
    """Return the seconds until the driver has the failure of a rank that raises, and of a node that dies."""
    raised = time.perf_counter()
    executor.call("actor", "fail", len(pids) * PER_NODE - 1)
    wait_for_failure(executor, "learning rate (-1) must be positive")
    killed, executor.failure = time.perf_counter(), None
    for pid in pids[-1]:
        os.kill(pid, signal.SIGKILL)
    wait_for_failure(executor, "was lost, with rank")
    return {"raise_to_failure_s": killed - raised, "kill_to_failure_s": time.perf_counter() - killed}


def wait_for_failure(executor: Any, message: str) -> None:
    deadline = time.monotonic() + 120.0
    while executor.failure is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the driver did not notice within 120 s: {message}")
        time.sleep(0.001)
    if message not in str(executor.failure):
        raise executor.failure


def memory(field: str) -> int:
    """Return a size of this process in bytes: VmRSS, or VmHWM for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def describe(options: argparse.Namespace) -> dict[str, Any]:
    ranks = options.nodes * PER_NODE
    return {
        "ranks": ranks,
        "samples": options.samples,
        "length": options.length,
        "modelled_worker_s": worker_seconds(options.samples, options.length, ranks),
    }


# What was not run.


def extrapolate(files: Sequence[str]) -> dict[str, Any]:
    """Return what jobs of other sizes would take, from results of several sizes: a + b ranks + c samples,
    fitted by least squares."""
    import numpy as np

    results = [json.loads(Path(file).read_text()) for file in files]
    sizes = np.array([[1.0, one["ranks"], one["samples"]] for one in results])
    found: dict[str, Any] = {}
    for name in ("driver_s", "grown_bytes", "bytes_received"):
        values = np.array([one[name] for one in results])
        weighted = sizes / values[:, None]  # relative errors
        fit, *_ = np.linalg.lstsq(weighted, np.ones(len(values)), rcond=None)
        found[name] = {
            "fit": fit.tolist(),
            "largest_error": float(max(abs(sizes @ fit / values - 1))),
        } | {f"{r} ranks, {s} samples": float(np.array([1.0, r, s]) @ fit) for r, s in TARGETS}
    return found


TARGETS = ((1024, 4096), (4096, 4096), (4096, 100_000))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=16, help="nodes of 8 ranks each; default: 16")
    parser.add_argument("--samples", type=int, default=4096, help="samples of a step; default: 4096")
    parser.add_argument("--length", type=int, default=8192, help="largest number of tokens of a sample")
    parser.add_argument("--steps", type=int, default=3, help="steps that are run; default: 3")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--fit", nargs="+", metavar="JSON", help="extrapolate from these, run nothing")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.length < 1024 or options.samples < GROUP * options.nodes:
        parser.error("--length must be at least 1024, and --samples at least 8 for each node.")
    if options.serve:
        serve_nodes(json.loads(options.serve))
        return
    text = json.dumps(extrapolate(options.fit) if options.fit else simulate(options), indent=1) + "\n"
    sys.stdout.write(text)
    if options.json:
        Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
