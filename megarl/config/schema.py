"""Define the configuration tree: each field is a Megatron-style flag, and the string under it is its help.

A default is written here and nowhere else, and the rules of a single field are in its annotation. `loader.py`
makes the tree from flags, `render.py` makes flags from the tree, and `check.py` holds the rules across
fields. Most sections are in files of their own: run_sections.py, data_sections.py, episode_sections.py, and
role_sections.py for those of single roles.

Names are Megatron's for training, vLLM's for the engine (`--rollout-...`) and the papers' for algorithms. The
shape of the model is never a flag: it is read from the Hugging Face config in `--model`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from megarl.config.data_sections import CurriculumConfig, DataConfig, SftConfig
from megarl.config.episode_sections import EpisodeConfig
from megarl.config.errors import Count, Natural, Rule, Section, section
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
from megarl.config.run_sections import CheckpointConfig, PlacementConfig, ProfileConfig, RunConfig
from megarl.config.streaming_section import StreamingConfig


@section
class ModelConfig(Section):
    """model"""

    model: Annotated[str, Rule(bool, "must name a folder.")]
    """Folder of the Hugging Face model to start from: config.json, *.safetensors, tokenizer files."""
    tokenizer_model: str | None = None
    """Folder with a Hugging Face tokenizer, or a SentencePiece *.model file. Default: the --model folder."""
    chat_template_args: Annotated[
        dict[str, object],
        Rule(
            lambda names: not {"messages", "tools", "add_generation_prompt", "tagged"} & {*names},
            "must not name messages, tools or add_generation_prompt, which rows and megarl give.",
        ),
    ] = field(default_factory=dict)
    """What the chat template reads besides messages, as JSON, e.g. '{"enable_thinking": false}'. A row's own
    `chat_template_kwargs` go over it."""
    random_init: bool = False
    """Start from random weights with the shape in --model's config.json instead of loading *.safetensors."""
    critic_model: str | None = None
    """Folder of the Hugging Face model that the critic starts from, with the actor's vocabulary: a language
    model, whose value head starts at zero, or a sequence classifier with one label, whose `score` it takes
    over. Default: --model."""
    reference_model: str | None = None
    """Folder of the Hugging Face language model that is the reference, with the actor's tokenizer: the
    teacher of --algorithm distill, or what a KL is measured to. Default: --model."""
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
    """Passes over the samples of a step. 1 for algorithms that learn from answers in the data."""
    dynamic_sampling: bool = False
    """DAPO's dynamic sampling: leave out prompts whose samples all have the same reward, and sample further
    prompts until the step has --num-prompts. Synchronous training only. Not run on a GPU yet."""
    max_sampling_rounds: Count = 10
    """With --dynamic-sampling: rounds of sampling in a step, at most. The run ends with an error if the step
    is not full after them."""
    max_tokens_per_micro_batch: Count = 16384
    """Tokens that one rank packs into one forward pass, at most. A longer sequence gets a pass of its
    own."""
    seed: Annotated[
        Natural,
        Rule(lambda seed: seed < 2**32, f"must be at most {2**32 - 1}, the largest seed of vLLM. Try 0."),
    ] = 0
    """Seed of everything random: initial weights, data order, sampling, mini-batches."""


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
