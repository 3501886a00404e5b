"""Define the sections of the configuration tree about data, rewards and the order of rows.

Each field is one flag, see schema.py."""

from __future__ import annotations

from typing import Annotated, Literal

from megarl.config.errors import Count, Fraction, Natural, Positive, Rule, Seconds, Section, section


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
    filter_long_prompts: bool = False
    """Leave out rows whose prompts are longer than --max-prompt-length, and say how many. Otherwise they are
    an error."""
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
    reward_timeout_s: Seconds = 60.0
    """Seconds that the reward of one response may take; then its process is killed and the reward has
    failed."""
    reward_memory_limit_bytes: Count = 4 * 2**30
    """Memory that one such process may allocate; beyond it an allocation fails, and with it the reward."""
    reward_max_failed_share: Fraction = 0.1
    """Share of a step's rewards that may fail, whatever computes them. Samples without a reward are masked.
    A larger share ends the run."""
    code_timeout_s: Seconds = 10.0
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
class SftConfig(Section):
    """fine-tuning mixed into RL"""

    sft_data: tuple[str, ...] = ()
    """Files whose responses are learnt by cross-entropy in the same updates as the sampled ones, with rows as
    --algorithm sft reads them (prompt and response, or messages). Default: none. Not run on a GPU yet."""
    sft_coef: Positive = 0.1
    """Factor of the mean cross-entropy over the response tokens of --sft-data in an update. The policy's loss
    has its own denominator."""
    sft_batch_size: Count = 16
    """Rows of --sft-data in each optimizer update, over all ranks."""


@section
class CurriculumConfig(Section):
    """order of the prompts by measured difficulty"""

    curriculum: Literal["shuffled", "easy-first", "hard-first"] = "shuffled"
    """Order of the rows of a pass over --train-data. easy-first and hard-first: by the mean reward of each
    row's last responses, the highest or the lowest first, from the second pass on."""
    difficulty_min: float | None = None
    """A row whose last responses had a mean reward of at most this is too hard, and rests for
    --difficulty-rest passes, e.g. 0. Default: none."""
    difficulty_max: float | None = None
    """A row whose last responses had a mean reward of at least this is too easy, and rests likewise, e.g. 1.
    Default: none."""
    difficulty_rest: Count = 1
    """Passes over the data that such a row is left out of. It is then sampled, and measured again."""

    @property
    def is_measured(self) -> bool:
        """Whether rewards decide which rows come next."""
        return (
            self.curriculum != "shuffled"
            or self.difficulty_min is not None
            or self.difficulty_max is not None
        )
