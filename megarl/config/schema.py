"""Define the configuration tree: each field is a Megatron-style flag, and the string under it is its help.

A default is written here and nowhere else, and the rules of a single field are in its annotation. `loader.py`
makes the tree from flags, `render.py` makes flags from the tree, and `check.py` holds the rules across
fields. The sections of single roles are in role_sections.py.

Names are Megatron's for training, vLLM's for the engine (`--rollout-...`) and the papers' for algorithms. The
shape of the model is never a flag: it is read from the Hugging Face config in `--model`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Literal, NewType

from megarl.config.errors import (
    Count,
    Fraction,
    Natural,
    Positive,
    Rule,
    Section,
    at_least,
    at_most,
    did_you_mean,
    section,
)
from megarl.config.data_sections import CurriculumConfig, SftConfig
from megarl.config.role_sections import (
    LoRAConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    ReshardConfig,
    RewardModelConfig,
    RolloutConfig,
    SamplingConfig,
)
from megarl.config.streaming_section import StreamingConfig
from megarl.config.verifiers_section import LedEpisodes

RankCount = NewType("RankCount", int)
"""Number of ranks on a machine. A range such as `1-8` is the number of GPUs within it, 8 without a GPU."""


@section
class ModelConfig(Section):
    """model"""

    model: Annotated[str, Rule(bool, "must name a folder.")]
    """Folder of the Hugging Face model to start from: config.json, *.safetensors, tokenizer files."""
    tokenizer_model: str | None = None
    """Folder with a Hugging Face tokenizer, or a SentencePiece *.model file. Default: the --model folder."""
    random_init: bool = False
    """Start from random weights with the shape in --model's config.json instead of loading *.safetensors."""
    critic_model: str | None = None
    """Folder of the Hugging Face model that the critic starts from, with the actor's vocabulary: a language
    model, whose value head starts at zero, or a sequence classifier with one label, whose `score` it takes
    over. Default: --model."""
    reference_model: str | None = None
    """Folder of the Hugging Face language model that is the reference, with the actor's tokenizer: the teacher
    of --algorithm distill, or what a KL is measured to. Default: --model."""
    reference_update_interval: Count | None = None
    """Steps between two updates of the reference with the actor's weights, so that a KL is measured to a
    recent policy. Default: never."""
    bf16: bool = False
    """Train in bfloat16 with fp32 master weights and fp32 gradients. Default: fp32."""

    @property
    def critic_folder(self) -> str:
        """The folder that the critic starts from."""
        return self.critic_model or self.model

    @property
    def reference_folder(self) -> str:
        """The folder that the reference is loaded from."""
        return self.reference_model or self.model

    @property
    def dtype(self) -> str:
        """The dtype of the trained weights."""
        return "bfloat16" if self.bf16 else "float32"


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
    """Nodes of the job, each with --nproc-per-node ranks. With --executor ray they are taken from the cluster.
    Without it, start torchrun on every node; torchrun's own count then holds."""
    elastic_min_nodes: Annotated[int, at_least(1), at_most(1024)] | None = None
    """For --executor ray: without room for --nnodes nodes an attempt runs on as many as there is room for and
    the layout fits, at least this many. Batches and the order of samples stay. Default: --nnodes."""
    executor: str = "torchrun"
    """torchrun: a driver process and one worker per rank. ray: the same on the nodes of a Ray cluster, or of a
    Ray that is started on this machine; needs the package ray. inline: everything in one process, for pdb. A
    program can register others."""
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
    call_timeout_s: Positive = 1800.0
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
class BatchConfig(Section):
    """batch"""

    train_iters: Count
    """Steps. One step is one rollout of --num-prompts prompts and all updates on it (SFT: one optimizer
    update)."""
    num_prompts: Count = 16
    """Prompts per step."""
    num_samples_per_prompt: Count = 8
    """Responses sampled per prompt; they form a group."""
    global_batch_size: Count = 64
    """Samples per optimizer update, over all ranks. A step makes num_prompts * num_samples_per_prompt /
    global_batch_size updates per epoch."""
    num_epochs: Count = 1
    """Passes over the samples of a step."""
    dynamic_sampling: bool = False
    """DAPO's dynamic sampling: leave out prompts whose samples all have the same reward, and sample further
    prompts until the step has --num-prompts. Synchronous training only. Not run on a GPU yet."""
    max_sampling_rounds: Count = 10
    """With --dynamic-sampling: rounds of sampling in a step, at most. The run ends with an error if the step
    is not full after them."""
    max_tokens_per_micro_batch: Count = 16384
    """Tokens that one rank packs into one forward pass, at most. A longer sequence gets a pass of its
    own."""
    seed: Natural = 0
    """Seed of everything random: initial weights, data order, sampling, mini-batches."""


@section
class DataConfig(Section):
    """data and rewards"""

    train_data: tuple[str, ...]
    """Training files, *.jsonl or *.parquet, in verl's columns: prompt, data_source, reward_model.ground_truth
    (SFT: prompt and response, or messages)."""
    train_data_weights: tuple[float, ...] | None = None
    """Share of the rows that each --train-data file gives, e.g. 3 1. Each file is then passed over by itself.
    Default: the files are one data set."""
    eval_data: tuple[str, ...] = ()
    """Held-out files in the same columns."""
    shuffle: bool = True
    """Shuffle the training rows anew in every pass over them."""
    prompt_key: Annotated[str, Rule(bool, "must name a column.")] = "prompt"
    """Column of the prompt: a list of {role, content} messages, or a string."""
    reward_function: str | None = None
    """Your own reward, path/to/file.py:function, called as function(data_source=, solution_str=,
    ground_truth=, extra_info=) -> float."""
    score_weights: tuple[str, ...] = ()
    """For a --reward-function that returns several scores: the weight of each in the reward, e.g. correct=1
    short=0.2. Default: each counts 1."""
    reward: Literal["auto", "gsm8k", "math", "code"] | None = None
    """Built-in rule reward. auto: by data_source (gsm8k for */gsm8k and megarl/sums, math for the MATH
    family). code: the response's program is run on the row's tests, in a sandbox. Default: auto, but none
    with --reward-model."""
    reward_num_workers: Natural | None = None
    """Processes per engine that call the rule or function. 0: none; it is called in the worker itself, for
    pdb, and nothing can stop it. Default: this rank's share of the cores, at most 8."""
    reward_timeout_s: Positive = 60.0
    """Seconds that the reward of one response may take; then its process is killed and the reward has
    failed."""
    reward_memory_limit_bytes: Count = 4 * 2**30
    """Memory that one such process may allocate; beyond it an allocation fails, and with it the reward."""
    reward_max_failed_share: Fraction = 0.1
    """Share of a step's rewards that may fail, whatever computes them. Samples without a reward are masked.
    A larger share ends the run."""
    code_timeout_s: Positive = 10.0
    """With --reward code: seconds that the program may take for each test of a row, of CPU and of the
    clock."""
    code_memory_limit_bytes: Count = 2**30
    """With --reward code: memory of the program."""
    allow_unsandboxed_code: bool = False
    """With --reward code: run programs even where this machine cannot keep them from its network and
    files."""

    @property
    def weights_of_scores(self) -> dict[str, float]:
        """Weight of each score in the reward, by name, as --score-weights says."""
        return {name: float(weight) for name, _, weight in (one.partition("=") for one in self.score_weights)}


@section
class EpisodeConfig(LedEpisodes):
    """multi-turn episodes"""

    env: tuple[str, ...] | None = None
    """Your own environment, path/to/file.py:Class, with reset(row) -> messages, step(text) -> messages, reward,
    done; or reasoning-gym:TASK, skyrl-gym:NAME, openenv:URL, http://HOST:PORT of megarl env-serve. It gives
    the rewards, in place of --reward. Several: NAME=VALUE ...; a row has the one of its data_source."""
    env_timeout_s: Positive = 60.0
    """With --env: seconds that one call of reset or step may take; then its episode has failed."""
    env_episodes_per_process: Count = 16
    """With --env: episodes that share one process of the environment. Their calls overlap. 1: none share one."""
    env_python: tuple[str, ...] | None = None
    """With --env: the Python that runs the environment, 3.9 or later, e.g. venv/bin/python, with packages of
    its own. megarl need not be installed there. NAME=PYTHON: that of one environment. Default: megarl's."""
    turn_rewards: bool = False
    """With --env and --algorithm grpo: an answer is judged by the rewards from it on, see docs/agents.md."""
    agent_command: str | None = None
    """Your own agent, e.g. "python agent.py": a process per episode that calls the model through an SDK and prints
    the reward, or --reward or --reward-function judges its last answer. See docs/agents.md."""
    agent_timeout_s: Positive = 600.0
    """With --agent-command: seconds of an episode, but for those in which the engine stands still; then it fails."""
    tool_call_parser: str | None = None
    """With --agent-command: vLLM's parser that finds tool calls in answers, e.g. hermes (Qwen2.5, Qwen3),
    llama3_json or deepseek_v31. Without it requests with tools are refused."""

    @property
    def has_turns(self) -> bool:
        """Whether the job plays episodes of several turns."""
        return self.env is not None or self.has_agent

    @property
    def has_agent(self) -> bool:
        """Whether a program of its own leads the episodes, and asks the model at an endpoint."""
        return self.agent_command is not None or self.env_verifiers is not None


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
    """Samples per step, from the first, written to rollouts/step_*.jsonl and to --log-with; -1 is all, 0 none.
    The samples of a prompt follow one another, so 32 are four prompts where each has 8."""
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
    exit_grace_s: Positive = 25.0
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


@section
class TrainConfig:
    """Everything one job needs. `algorithm` is the dataclass of the chosen algorithm (megarl/algorithms)."""

    algorithm: object
    model: ModelConfig
    actor: ParallelConfig = ParallelConfig()
    critic: ParallelConfig | None = None
    """None, here and in the roles below, if the job has no such role."""
    reference: ParallelConfig | None = None
    reward: ParallelConfig | None = None
    """Parallel sizes of the reward models that Megatron runs."""
    experts: MoEConfig = MoEConfig()
    placement: PlacementConfig = PlacementConfig()
    batch: BatchConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the actor."""
    critic_optimizer: OptimizerConfig | None = None
    lora: LoRAConfig = LoRAConfig()
    """Adapters of the actor."""
    critic_lora: LoRAConfig | None = None
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reshard: ReshardConfig = ReshardConfig()
    data: DataConfig
    reward_models: RewardModelConfig = RewardModelConfig()
    sft: SftConfig = SftConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    run: RunConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    streaming: StreamingConfig = StreamingConfig()
    profile: ProfileConfig = ProfileConfig()
    transformer: dict[str, object] = field(default_factory=dict)
    """Every other flag that is a field of the installed Megatron TransformerConfig, by its own name."""
    others: tuple[TrainConfig, ...] = ()
    """Configurations of the second and further actors, each in the form of a job with one actor."""

    @property
    def max_sampled_length(self) -> int:
        """The largest number of sampled tokens of a sample."""
        sampling = self.sampling
        return sampling.max_response_length * (sampling.max_turns if self.episodes.has_turns else 1)

    @property
    def engine_dtype(self) -> str:
        """The dtype of the engines' weights."""
        return self.model.dtype if self.rollout.dtype == "auto" else self.rollout.dtype
