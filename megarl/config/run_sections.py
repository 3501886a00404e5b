"""Define the sections of the configuration tree about a job as a whole: its ranks, its run folder, its
checkpoints and its profiles.

Each field is one flag, see schema.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, NewType

from megarl.config.errors import (
    Count,
    Natural,
    Positive,
    Rule,
    Seconds,
    Section,
    at_least,
    at_most,
    did_you_mean,
    section,
)

RankCount = NewType("RankCount", int)
"""Number of ranks on a machine. A range such as `1-8` is the number of GPUs within it, 8 without a GPU."""


EXECUTORS = ["torchrun", "ray", "inline"]
"""Registered values of --executor; `megarl.trainer.executors.register_executor` adds to them."""


@section
class PlacementConfig(Section):
    """placement"""

    nproc_per_node: Annotated[RankCount, at_least(1), at_most(1024)] = RankCount(1)
    """Ranks that `megarl train` starts on this machine, each on a GPU of its own if there are GPUs. A range,
    e.g. 1-8, takes as many of them as there are GPUs, and the most on a machine without. Under torchrun,
    torchrun's own count holds."""
    nnodes: Annotated[int, at_least(1), at_most(1024)] = 1
    """Nodes of the job, each with --nproc-per-node ranks. With --executor ray they are taken from the
    cluster. Without it, start torchrun on every node; torchrun's own count then holds."""
    elastic_min_nodes: Annotated[int, at_least(1), at_most(1024)] | None = None
    """For --executor ray: without room for --nnodes nodes an attempt runs on as many as there is room for and
    the layout fits, at least this many. Batches and the order of samples stay. Default: --nnodes."""
    executor: str = "torchrun"
    """torchrun: a driver process and one worker per rank. ray: the same on the nodes of a Ray cluster, or of
    a Ray that is started on this machine; needs the package ray. inline: everything in one process, for pdb.
    A program can register others."""
    ray_address: str | None = None
    """For --executor ray: host:port of the cluster's head, or auto on one of its nodes. Default: RAY_ADDRESS
    of the environment, which `ray job submit` sets; without it a Ray is started on this machine."""
    num_actors: Annotated[int, at_least(1), at_most(64)] = 1
    """Actors that are trained in one job, each with its own engines, optimizer, critic and reference. The
    roles of the second actor are actor_2, critic_2 and so on. They take the first actor's values unless a
    flag sets their own: --actor-2-lr, --critic-2-ranks, --rollout-2-dtype for a role, --actor-2-seed,
    --actor-2-model, --actor-2-kl-coef for a flag without a form per role."""
    pools: tuple[str, ...] = ()
    """Names for lists of ranks, e.g. --pools train=0-3 serve=4-7. A --<role>-ranks flag accepts a name in
    place of a list."""
    actor_ranks: str | None = None
    """Ranks of the actor, e.g. 0-3 or 0,2. Default: all."""
    critic_ranks: str | None = None
    """Ranks of the critic. Default: all."""
    reference_ranks: str | None = None
    """Ranks of the reference. Default: the actor's."""
    reward_ranks: tuple[str, ...] = ()
    """Ranks of the reward models: one list for all of them, or one each. Default: all."""
    rollout_ranks: str | None = None
    """Ranks of the rollout engines. Default: all. Rules score a response where it was sampled."""
    rollout_engine: Literal["auto", "in-process", "out-of-process"] = "auto"
    """in-process: vLLM runs in the worker of each rollout rank, which must be all ranks. out-of-process: it
    runs in processes of its own, started by the first rank of each engine, and pulls the weights. auto:
    in-process if the rollout ranks are all ranks and there is one actor, as vLLM has room for one engine in a
    process."""
    offload_ahead_bytes: Natural = 0
    """With --offload: bytes that may be moved to the device for the next call while the running call
    computes. 0: a call's data is moved when the call begins."""
    call_timeout_s: Seconds = 1800.0
    """Seconds that one call on a role may take before the job is stopped and the ranks that did not answer
    are named."""

    def field_rules(self) -> Iterable[tuple[bool, str, str]]:
        near = did_you_mean(self.executor, EXECUTORS, prefix="") or f" Try {EXECUTORS[0]}."
        return [
            (self.executor in EXECUTORS, "executor", f"must be one of {', '.join(EXECUTORS)}.{near}"),
            (
                self.ray_address is None or self.executor == "ray",
                "ray_address",
                "is for --executor ray. Leave it out, or add --executor ray.",
            ),
        ]

    @property
    def world_size(self) -> int:
        """The number of ranks of the job, unless torchrun says otherwise."""
        return self.nnodes * self.nproc_per_node


@section
class RunConfig(Section):
    """run folder, evaluation and checks"""

    save: Annotated[str, Rule(bool, "must name a folder.")]
    """Run folder: resolved.args, metrics.jsonl, tensorboard/, rollouts/, checkpoints/, hf/, hf_critic/,
    timeline.json, profile/. Refused if it already holds a run, unless --load says to go on there."""
    eval_interval: Natural = 0
    """Evaluate on --eval-data every so many steps, and before the first and after the last; 0 is never."""
    eval_num_prompts: Count | None = None
    """Rows of --eval-data to use. Default: all."""
    eval_num_samples: Count = 1
    """Responses sampled per row of --eval-data, besides the greedy one. With several there are pass@k and
    majority votes, see docs/evaluation.md."""
    export_interval: Natural = 0
    """Export hf/, and with a critic hf_critic/, every so many steps; 0 is at the end only."""
    log_interval: Count = 1
    """Steps between two lines on stdout. metrics.jsonl and the trackers get every step."""
    log_with: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Trackers that get metrics, samples and flags beside metrics.jsonl, rollouts/ and the console. wandb and
    mlflow are set up by their own environment variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI=...). The
    flag without a name: no tracker."""
    log_project: str = "megarl"
    """Project in Weights & Biases, experiment in MLflow."""
    log_name: str | None = None
    """Name of the run in Weights & Biases and MLflow. Default: the name of --save's folder."""
    num_rollouts_to_log: Annotated[int, at_least(-1)] = 32
    """Samples per step, from the first, written to rollouts/step_*.jsonl and to --log-with; -1 is all, 0
    none. The samples of a prompt follow one another, so 32 are four prompts where each has 8."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do with an update whose loss or gradient is not finite: the job ends, or the update is left
    out, on all ranks alike, and counted (policy/updates_skipped, critic/updates_skipped); more than 10 in a
    row end the job. Weights and optimizer stay unchanged either way."""
    exit_loss: Positive | None = None
    """SFT: stop as soon as the loss of a step falls below this."""
    gate_max_abs: Positive | None = None
    """Gate: largest |trainer log-prob - engine log-prob| of a sampled token that is accepted, before the
    first update and after every later step. Default: a rule for how many tokens may be outliers and how far
    one may be off, see docs/debugging.md; inf accepts all."""
    gate_mean_abs: Positive | None = None
    """Gate: largest mean of the same difference that is accepted, at the same times. Default: a rule that
    follows the size of the log-probs; inf accepts all."""
    warn_after_zero_reward_steps: Natural = 10
    """Warn when every reward has been 0 for so many consecutive steps, or, with an algorithm that compares
    the samples of a prompt (GRPO), rewards have not differed within any prompt; 0 is never."""


@section
class CheckpointConfig(Section):
    """checkpoints and restarts"""

    load: str | None = None
    """Continue the run in this folder from its newest complete checkpoint, or from this one
    (run/checkpoints/step_000010), under the same or another layout. It may be the --save folder: the run then
    goes on there, or begins if there is no checkpoint yet."""
    save_interval: Natural = 0
    """Write a checkpoint to --save/checkpoints every so many steps and after the last, while training goes
    on; 0 is only when SIGTERM stops the job."""
    keep: Count = 2
    """Newest checkpoints that stay; an older one is removed when a newer one is complete."""
    best_metric: str | None = None
    """A metric, such as eval/reward: of the checkpoints of steps that have it, the best one stays too."""
    best_metric_mode: Literal["max", "min"] = "max"
    """Which value of --best-metric is the best."""
    max_restarts: Natural = 0
    """After a failure start again from the newest checkpoint of the run, at most so many times. Not after
    errors in the configuration or the data, and not after signals. Under torchrun use its own
    --max-restarts."""
    exit_grace_s: Seconds = 25.0
    """Seconds between SIGTERM and the end of the job, at most: it writes a checkpoint of the last completed
    step. Below what your scheduler leaves between SIGTERM and SIGKILL (Slurm and Kubernetes: 30)."""


@section
class ProfileConfig(Section):
    """profiling"""

    profile: Literal["nsys", "torch", "memory"] | None = None
    """Profile some steps, see docs/profiling.md. nsys: mark ranges and the steps for `nsys profile`
    (tools/nsys_train.sh; needs GPUs). torch: PyTorch's profiler, a trace and a table of kernels per rank in
    --save/profile. memory: the allocator's history on a GPU, else the memory of each operator. Default: none,
    at no cost."""
    profile_step_start: Natural = 10
    """Begin to profile when this many steps are complete, as in Megatron-LM: the first profiled step is the
    next one. 0 is from the first step."""
    profile_step_end: Count = 12
    """End when this many steps are complete. The step of this number is the last profiled one: 10 and 12
    profile steps 11 and 12."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks to profile, such as 0 1."""

    @property
    def steps(self) -> range:
        """Numbers of the profiled steps."""
        return range(self.profile_step_start + 1, self.profile_step_end + 1)
