"""Flags and args files -> TrainConfig. What is expected is written out here, or built as dataclasses without
the loader.

pytest tests/config/test_loader.py"""

import dataclasses
import random
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest

from megarl.algorithms import REGISTRY, Algorithm
from megarl.config.errors import ConfigError, NonNegative
from megarl.config.flags import SECTIONS, section_flags
from megarl.config.loader import load_config
from megarl.config.render import write_args
from megarl.config.schema import (
    BatchConfig,
    DataConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardModelConfig,
    RunConfig,
    TrainConfig,
)
from tests.launch import succeed


@dataclass(frozen=True, kw_only=True, slots=True)
class Alpha(Algorithm):
    """the first of two algorithms, with every role"""

    needs_critic: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True
    clip: NonNegative = 0.2
    """How far the ratio may go."""
    mode: Literal["none", "some"] = "none"
    """What to do; `none` is a choice here, not the absence of one."""
    bounds: tuple[float, ...] | None = (0.5, 2.0)
    """Two numbers, or none although that is not the default."""
    scale: bool = True
    """Scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beta(Algorithm):
    """the second, which has an actor only"""

    name: ClassVar[str] = "beta++"
    smoothing: float | None = None
    """Smooth by this."""


ALGORITHMS = {"alpha": Alpha, "beta++": Beta}
REQUIRED = [
    "--algorithm",
    "alpha",
    "--model",
    "m",
    "--train-data",
    "a.jsonl",
    "--save",
    "s",
    "--train-iters",
    "3",
]


def load(*args):
    return load_config([*REQUIRED, *args], ALGORITHMS)


def errors(*args, required=True):
    with pytest.raises(ConfigError) as caught:
        load_config([*(REQUIRED if required else []), *args], ALGORITHMS)
    return caught.value.errors


def write(folder, name, text):
    (folder / name).write_text(text)
    return f"@{folder / name}"


def test_defaults_are_those_of_the_schema():
    assert load() == TrainConfig(
        algorithm=Alpha(),
        model=ModelConfig(model="m"),
        critic=ParallelConfig(),
        reference=ParallelConfig(),
        critic_optimizer=OptimizerConfig(),
        critic_lora=LoRAConfig(),
        batch=BatchConfig(train_iters=3),
        data=DataConfig(train_data=("a.jsonl",)),
        run=RunConfig(save="s"),
    )


def test_none_empties_a_list_that_is_empty_by_default(tmp_path):
    args = tmp_path / "job.args"
    args.write_text("--eval-data rows.jsonl\n--stop x\n--rollout-enforce-eager\n")
    assert load(f"@{args}").data.eval_data == ("rows.jsonl",)
    config = load(f"@{args}", "--eval-data", "none", "--stop", "none", "--stop-token-ids", "none")
    assert (config.data.eval_data, config.sampling.stop, config.sampling.stop_token_ids) == ((), (), ())
    args.write_text("--stop 'none'\n")  # in quotes it is a text
    assert load(f"@{args}").sampling.stop == ("none",)


def test_every_type_of_flag():
    config = load(
        "--bf16",
        "--no-shuffle",
        "--lr",
        "1e-5",
        "--seed=7",
        "--eval-data",
        "c",
        "d",
        "--stop=--",
        "--stop-token-ids",
        "1",
        "2",
        "--recompute-granularity",
        "full",
        "--recompute-num-layers",
        "none",
        "--rollout-enforce-eager",
        "--mode",
        "some",
        "--bounds",
        "none",
        "--no-scale",
        "--num-rollouts-to-log",
        "-1",
    )
    assert (
        config.model.bf16 is True
        and config.data.shuffle is False
        and config.optimizer.lr == 1e-5
        and config.batch.seed == 7
    )
    assert config.run.num_rollouts_to_log == -1  # a negative number is no flag
    assert (
        config.data.eval_data == ("c", "d")
        and config.sampling.stop == ("--",)
        and config.sampling.stop_token_ids == (1, 2)
    )
    assert config.actor == ParallelConfig(recompute_granularity="full")
    assert config.rollout.enforce_eager is True and load().rollout.enforce_eager is None
    assert config.algorithm == Alpha(mode="some", bounds=None, scale=False)


NASTY = [
    "",
    "none",
    "--lr",
    "-1",
    "@x.args",
    "# no comment",
    "a#b",
    "two words",
    "it's",
    '"',
    "\\",
    "line\nbreak",
    "\t",
    "\r\n",
    "ü",
    "$HOME",
]


def random_value(rng, kind):
    """Of a flag's type. The empty string only where no rule forbids it."""
    texts = NASTY if kind.optional else NASTY[1:]
    draw = {
        "bool": lambda: rng.random() < 0.5,
        "int": lambda: rng.randint(1, 10**9),
        "float": lambda: rng.uniform(0.1, 0.9),
        "json": lambda: {rng.choice("abc"): rng.randint(0, 9)},
        "str": lambda: rng.choice(kind.choices or texts),
    }[kind.bases[0]]
    if kind.optional and rng.random() < 0.3:
        return None
    return tuple(draw() for _ in range(rng.randint(1, 3))) if kind.many else draw()


def random_config(rng, num_actors=1):
    """A TrainConfig with a random value in every field, built without the loader. Values obey the one-field
    rules."""
    fixed = {
        "recompute_modules": ("mlp", "core_attn"),
        "lora_target_modules": ("linear_proj", "linear_qkv"),
        "num_actors": num_actors,
        "executor": "ray",  # which --ray-address needs
        "nnodes": (nnodes := rng.randint(1, 1024)),
        "elastic_min_nodes": rng.choice([None, rng.randint(1, nnodes)]),
        "nproc_per_node": rng.randint(1, 1024),
        "max_branches": rng.randint(1, 4096),
    }
    nodes = {
        name: cls(
            **{
                flag.targets[0][1]: fixed.get(flag.targets[0][1], random_value(rng, flag.kind))
                for flag in section_flags(name, cls)
            }
        )
        for name, cls in SECTIONS.items()
    }
    algorithm = rng.choice(
        [
            Alpha(clip=rng.random(), bounds=rng.choice([None, (1.5,), ()])),
            Beta(smoothing=rng.choice([None, 1e-30])),
        ]
    )
    engine = {
        "compilation_config": {"mode": 3, "note": rng.choice(NASTY)},
        "enable_chunked_prefill": rng.random() < 0.5,
        "kv_cache_dtype": "fp8",
        "cudagraph_capture_sizes": [1, 2, 4],
        "watermark": rng.random(),
    }
    transformer = {
        "attention_dropout": rng.random(),
        "gradient_accumulation_fusion": rng.random() < 0.5,
        "num_layers_at_end_in_bf16": 2,
    }
    if type(algorithm) is Beta:  # has one role: flags of others would be refused
        nodes |= {
            "critic": None,
            "critic_optimizer": None,
            "critic_lora": None,
            "reference": None,
            "reward": None,
            "reward_models": RewardModelConfig(),
        }
        nodes["model"] = replace(
            nodes["model"], critic_model=None, reference_model=None, reference_update_interval=None
        )
        nodes["placement"] = replace(
            nodes["placement"], critic_ranks=None, reference_ranks=None, reward_ranks=()
        )
    return TrainConfig(
        algorithm=algorithm,
        **nodes | {"rollout": replace(nodes["rollout"], engine_args=engine)},
        transformer=transformer,
    )


def test_written_arguments_parse_back_to_an_equal_configuration(tmp_path):
    rng = random.Random(0)
    for trial in range(100):
        config = random_config(rng)
        text = write_args(config)
        assert load_config([write(tmp_path, "resolved.args", text)], ALGORITHMS) == config, (
            f"trial {trial}:\n{text}"
        )


def test_written_arguments_of_several_actors_parse_back_too(tmp_path):
    """The second and third differ from the first in everything but what all share, also in the algorithm, and
    so in the roles they have."""
    rng = random.Random(1)
    for trial in range(15):
        first, *others = (random_config(rng, num_actors=3) for _ in range(3))
        shared = {
            name: getattr(first.placement, name)
            for name in (
                *("nproc_per_node", "nnodes", "elastic_min_nodes", "executor", "ray_address", "pools"),
                *("offload_ahead_bytes", "call_timeout_s"),
            )
        }
        gates = {name: rng.random() for name in ("gate_max_abs", "gate_mean_abs")}
        others = [
            replace(
                other,
                placement=replace(other.placement, **shared),
                batch=replace(other.batch, train_iters=first.batch.train_iters),
                episodes=replace(other.episodes, share_episodes=first.episodes.share_episodes),
                run=replace(first.run, **gates),
                checkpoint=first.checkpoint,
                streaming=first.streaming,
                profile=first.profile,
            )
            for other in others
        ]
        config = replace(first, others=tuple(others))
        text = write_args(config)
        assert load_config([write(tmp_path, "resolved.args", text)], ALGORITHMS) == config, (
            f"trial {trial}:\n{text}"
        )


def test_flags_of_one_actor():
    """As the first where nothing is said; a number counts more than none, a role more than all roles, the
    command line more than a file."""
    config = load(
        "--num-actors",
        "3",
        "--lr",
        "1e-3",
        "--actor-2-lr",
        "2e-3",
        "--critic-3-lr",
        "3e-3",
        "--actor-3-seed",
        "7",
        "--seed",
        "5",
        "--rollout-2-max-num-seqs",
        "9",
        "--no-actor-2-shuffle",
        "--actor-2-attention-softmax-in-fp32",
    )
    actors = (config, *config.others)
    assert [c.optimizer.lr for c in actors] == [1e-3, 2e-3, 1e-3] and [
        c.critic_optimizer.lr for c in actors
    ] == [1e-3, 1e-3, 3e-3]
    assert [c.batch.seed for c in actors] == [5, 5, 7] and [c.rollout.max_num_seqs for c in actors] == [
        256,
        9,
        256,
    ]
    assert [c.data.shuffle for c in actors] == [True, False, True]
    assert [c.transformer for c in actors] == [{}, {"attention_softmax_in_fp32": True}, {}] and not any(
        c.others for c in config.others
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--actor-2-lr 1e-3",
            "--actor-2-lr (1e-3): there is no actor 2, as --num-actors is 1. Try --num-actors 2.",
        ),
        (
            "--num-actors 2 --actor-2-save x",
            "--actor-2-save (x): is the whole job's. Leave it out, or try --save x instead.",
        ),
        (
            "--num-actors 2 --critic-2-seed 3",
            "--critic-2-seed (3): has no critic- form. Try --actor-2-seed 3 instead.",
        ),
        ("--num-actors 2 --actor-2-sede 3", "--actor-2-sede (3): no such flag. Did you mean --actor-2-seed?"),
        (
            "--num-actors 2 --actor-2-seed 1 --actor-2-seed 2",
            "--actor-2-seed (1 and 2): is given twice. Keep one",
        ),
        (
            "--num-actors 2 --actor-2-algorithm beta++ --critic-2-lr 1e-3",
            "--critic-2-lr (1e-3): this algorithm has no critic, so there is no critic role.",
        ),
        ("--num-actors 2 --actor-2-temperature -1", "--actor-2-temperature (-1): must be at least 0."),
        ("--num-actors 2 --temperature -1", "--temperature (-1): must be at least 0."),
        (
            "--temperature 0.0099",
            "--temperature (0.0099): must be at least 0.01, to which vLLM raises it. Try 0.01.",
        ),
        (
            "--temperature 2.1",
            "--temperature (2.1): must be at most 2, as vLLM samples at no higher one. Try 1.0.",
        ),
        (
            "--judge-temperature 3",
            "--judge-temperature (3): must be at most 2, as vLLM samples at no higher one. Try 1.0.",
        ),
    ],
)
def test_wrong_flags_of_one_actor(flags, message):
    with pytest.raises(ConfigError) as error:
        load(*flags.split())
    assert len(error.value.errors) == 1 and error.value.errors[0].startswith(message)


def test_written_arguments_name_every_field(tmp_path):
    """A run stays the same when a default changes later: only fields that are None by default are left
    out."""
    text = write_args(load())
    for section, cls in [*SECTIONS.items(), ("algorithm", Alpha)]:
        for flag in section_flags(section, cls):
            assert (f"--{flag.name}" in text.split() or f"--no-{flag.name}" in text.split()) == (
                flag.required or flag.default is not None
            ), flag.name
    assert "# optimizer\n--lr 1e-06\n" in text


def test_a_registry_that_misnames_an_algorithm_is_our_mistake():
    with pytest.raises(TypeError, match="Beta"):
        load_config(REQUIRED, {"alpha": Alpha, "gamma": Beta})


def test_precedence(tmp_path):
    """defaults < args files in order < command line, wherever on it; a file's own flags < what includes
    it."""
    base = write(tmp_path, "base.args", "--lr 1 --seed 1 --num-prompts 1 --clip 0.5")
    write(tmp_path, "recipe.args", "--lr 2 --seed 2\n@base.args")
    other = write(tmp_path, "other.args", "--lr 3")
    config = load("--num-prompts", "9", f"@{tmp_path / 'recipe.args'}", other)
    assert (config.optimizer.lr, config.batch.seed, config.batch.num_prompts, config.algorithm.clip) == (
        3,
        2,
        9,
        0.5,
    )
    assert load(other, base).optimizer.lr == 1 and load(base, other).optimizer.lr == 3
    assert load(base, base).optimizer.lr == 1  # the same file twice says nothing twice


def test_one_role_and_every_role(tmp_path):
    """Within a level the prefixed flag holds; a higher level overrides either. Written arguments need no
    prefix while roles agree."""
    file = write(
        tmp_path,
        "a.args",
        "--actor-tensor-model-parallel-size 2 --tensor-model-parallel-size 4 --actor-sequence-parallel",
    )
    assert load(file).actor == ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    config = load(file, "--tensor-model-parallel-size", "8", "--no-actor-sequence-parallel")
    assert config.actor == ParallelConfig(tensor_model_parallel_size=8)
    assert "\n--tensor-model-parallel-size 8\n" in write_args(config)


def test_all_errors_are_reported_at_once(tmp_path):
    file = write(
        tmp_path, "a.args", "--algorithm alpha\n--model m\n\n--lr fast\n--num-prompts 0  # none\n--nonsense\n"
    )
    found = errors(file, "--save", "", "--clip", "-1", "--temperature", "nan", required=False)
    place = f"[{tmp_path / 'a.args'}"
    expected = [
        ("--nonsense", "no such flag", f"{place}:6]"),
        ("--lr (fast)", "must be a number", f"{place}:4]"),
        ("--num-prompts (0)", "at least 1", f"{place}:5]"),
        ("--save ()", "must name a folder", "[command line]"),
        ("--clip (-1)", "at least 0", "[command line]"),
        ("--temperature (nan)", "at least 0", "[command line]"),
        ("--train-iters", "required", ""),
        ("--train-data", "required", ""),
    ]
    for flag, rule, where in expected:
        assert any(line.startswith(flag) and rule in line and where in line for line in found), (flag, found)
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("--lrr", "--lr"),
        ("--num_prompts", "--num-prompts"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--rollout-max-num-seq", "--rollout-max-num-seqs"),
        ("--rollout-kv-cache-dtyp", "--rollout-kv-cache-dtype"),
        ("--no-shufle", "--no-shuffle"),
        ("--attention-dropot", "--attention-dropout"),
        ("--clipp", "--clip"),
        ("--rollout-no-enable-prefix-caching", "--no-rollout-enable-prefix-caching"),
        ("--algoritm", "--algorithm"),
    ],
)
def test_unknown_flags_name_the_nearest(flag, meant):
    [line] = errors(flag, "1")
    assert line == f"{flag} (1): no such flag. Did you mean {meant}? [command line]"


def test_prefixes_of_flags_are_not_accepted():
    """argparse would take --num-prompt for --num-prompts."""
    assert "no such flag" in errors("--num-prompt", "1")[0]


def test_duplicates_and_contradictions(tmp_path):
    file = write(
        tmp_path, "a.args", "--lr 1\n--seed 1\n--lr 2\n--bf16\n--no-bf16 --algorithm alpha --algorithm beta++"
    )
    found = errors(file, "--seed", "2", "--seed", "2", required=False)
    path = tmp_path / "a.args"
    assert f"--lr (1 and 2): is given twice. Keep one [{path}:1; {path}:3]" in found
    assert f"--bf16 contradicts --no-bf16. Keep one [{path}:4; {path}:5]" in found
    assert "--seed (2 and 2): is given twice. Keep one [command line; command line]" in found
    assert f"--algorithm (alpha and beta++): is given twice. Keep one [{path}:5; {path}:5]" in found


@pytest.mark.parametrize(
    "args, rule",
    [
        (["--lr"], "--lr: needs a value."),
        (["--temperature", "warm"], "--temperature (warm): must be a number. Try 1.0. [command line]"),
        (["--lr", "1", "2"], "--lr (1 2): takes one value, not 2."),
        (["--seed", "1.5"], "--seed (1.5): must be a whole number."),
        (["--seed", "-1"], "--seed (-1): must be at least 0. Try 0."),
        (
            ["--seed", "4294967296"],
            "--seed (4294967296): must be at most 4294967295, the largest seed of vLLM. Try 0.",
        ),
        (["--bf16", "true"], "--bf16 (true): takes no value. Write --bf16 or --no-bf16."),
        (["--no-lr"], "--no-lr: no such flag."),
        (["--executor", "dask"], "--executor (dask): must be one of torchrun, ray, inline."),
        (["--recompute-method", "x"], "--recompute-method (x): must be one of uniform, block, or none."),
        (["--recompute-modules"], "--recompute-modules: must be one or more of core_attn, layernorm, mlp."),
        (["--recompute-modules", "moe"], "--recompute-modules (moe): must be one or more"),
        (["-n", "4"], "-n: flags start with two dashes."),
        (["--smoothing", "1"], "--smoothing (1): is a flag of beta++, which --algorithm does not choose."),
        (["--actor-seed", "1"], "--actor-seed (1): has no actor- form. Try --seed 1 instead."),
        (["--top-p", "1.5"], "--top-p (1.5): must be at most 1."),
        (["--call-timeout-s", "inf"], "--call-timeout-s (inf): must be at most 1000000. Try 1800."),
        (["--adam-beta2", "1"], "--adam-beta2 (1): must be below 1."),
        (["--stop", ""], "--stop (): must hold no empty string."),
        (["--rollout-gpu-memory-utilization", "0"], "--rollout-gpu-memory-utilization (0): must be above 0."),
        (
            ["--rollout-compilation-config", "[1]"],
            "--rollout-compilation-config ([1]): must be a JSON object.",
        ),
        (["--rollout-compilation-config", "{1"], "--rollout-compilation-config ({1): must be a JSON object."),
    ],
)
def test_wrong_values(args, rule):
    [line] = errors(*args)
    assert line.startswith(rule) and line.endswith("[command line]")


def test_algorithm_errors():
    assert errors(required=False)[0] == "--algorithm is required: one of alpha, beta++."
    found = errors("--algorithm", "alfa", "--clip", "x", "--smoothing", "1", *REQUIRED[2:], required=False)
    assert found == ("--algorithm (alfa): must be one of alpha, beta++. Did you mean alpha? [command line]",)


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--rollout-kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'),
        ("--rollout-kv-offloading-size", "4"),
        ("--rollout-kv-offloading-backend", "native"),
        ("--rollout-ec-transfer-config", "{}"),
    ],
)
def test_stores_that_outlive_a_version_of_the_weights_are_refused(flag, value):
    (found,) = errors(flag, value)
    assert found.startswith(
        f"{flag} ({value}): a store of keys and values outside the engine would serve prefixes of"
    )


def test_vllm_engine_arguments():
    config = load(
        "--rollout-kv-cache-dtype",
        "fp8",
        "--rollout-enable-chunked-prefill",
        "--rollout-watermark",
        "0.5",
        "--rollout-block-size",
        "32",
        "--rollout-cudagraph-capture-sizes",
        "1",
        "2",
        "--rollout-compilation-config",
        '{"mode": 3}',
        "--no-rollout-async-scheduling",
    )
    assert config.rollout.engine_args == {
        "kv_cache_dtype": "fp8",
        "enable_chunked_prefill": True,
        "watermark": 0.5,
        "async_scheduling": False,
        "cudagraph_capture_sizes": [1, 2],
        "compilation_config": {"mode": 3},
    }
    assert config.rollout.block_size == 32  # the schema's own field, not a pass-through
    for name, reason in [
        ("model", "--model"),
        ("seed", "--seed"),
        ("load-format", "weights from the actor"),
        ("worker-cls", "inside megarl"),
        ("logprobs-mode", "processed_logprobs"),
        ("distributed-executor-backend", "inside megarl"),
        ("tokenizer", "--tokenizer-model"),
        ("weight-transfer-config", "weights from the actor"),
        ("max-model-len", "--max-response-length"),
        ("data-parallel-size", "--rollout-ranks"),
    ]:
        [line] = errors(f"--rollout-{name}", "x")
        assert line.startswith(f"--rollout-{name} (x): ") and reason in line and "no such flag" not in line
    assert (
        "--rollout-kv-cache-dtype (fp7): must be one of auto, "
        in errors("--rollout-kv-cache-dtype", "fp7")[0]
    )


def test_megatron_transformer_fields():
    config = load(
        "--attention-dropout",
        "0.1",
        "--no-gradient-accumulation-fusion",
        "--tp-comm-bootstrap-backend",
        "gloo",
    )
    assert config.transformer == {
        "attention_dropout": 0.1,
        "gradient_accumulation_fusion": False,
        "tp_comm_bootstrap_backend": "gloo",
    }
    for name in (
        "num-layers",
        "hidden-size",
        "num-attention-heads",
        "num-query-groups",
        "kv-channels",
        "ffn-hidden-size",
        "normalization",
        "layernorm-epsilon",
        "add-bias-linear",
        "add-qkv-bias",
        "qk-layernorm",
        "rotary-base",
        "swiglu",
        "vocab-size",
    ):
        assert "the shape comes from --model's config.json" in errors(f"--{name}", "1")[0], name
    for flag, key in {
        "num-layers": "num_hidden_layers",
        "rotary-base": "rope_theta",
        "layernorm-epsilon": "rms_norm_eps",
        "use-rope-scaling": "rope_scaling",
        "window-size": "sliding_window",
    }.items():
        (line,) = errors(f"--{flag}", "7")
        assert line.startswith(
            f"--{flag} (7): the shape comes from --model's config.json, where it is {key}. Change it there,"
        ), line
    assert (
        "the shape comes from" in errors("--no-rope-freq", "1")[0]
    )  # a field that starts with no_, not a negation
    assert "in one way only" in errors("--cp-comm-type", "a2a")[0]
    for name in ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"):
        assert "set --virtual-pipeline-model-parallel-size" in errors(f"--{name}", "2")[0], name
    assert "the experts come from --model's config.json" in errors("--moe-router-topk", "2")[0]
    assert "--use-megatron-fsdp" in errors("--use-torch-fsdp2")[0]
    assert "it is alltoall" in errors("--moe-token-dispatcher-type", "allgather")[0]
    assert "no flag can carry" in errors("--timers", "x")[0]
    assert "--max-tokens-per-micro-batch" in errors("--micro-batch-size", "2")[0]


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--fp32-residual-connection", "in the dtype of the weights"),
        ("--defer-embedding-wgrad-compute", "computes the gradient of the output layer itself"),
        ("--qk-clip", "only Megatron's training script acts on it"),
        ("--qk-clip-alpha 0.5", "only Megatron's training script acts on it"),
        ("--qk-clip-threshold 100", "only Megatron's training script acts on it"),
        ("--log-max-attention-logit", "only Megatron's training script acts on it"),
        ("--cross-entropy-loss-fusion", "megarl computes log-probs and losses itself"),
        ("--cross-entropy-fusion-impl te", "megarl computes log-probs and losses itself"),
        ("--mlp-chunks-for-prefill 2", "only Megatron's own inference reads it"),
        ("--hetereogenous-dist-checkpoint", "checkpoints have a format of megarl's own"),
        ("--barrier-with-L1-time", "set --profile torch, nsys or memory."),
        (
            "--num-microbatches-with-partial-activation-checkpoints 1",
            "all micro-batches are recomputed alike. Set --recompute-granularity full",
        ),
        ("--distribute-saved-activations", "a role has a mesh of its own. Set --sequence-parallel"),
    ],
)
def test_megatron_fields_that_would_do_nothing_or_crash(flags, reason):
    (line,) = errors(*flags.split())
    name, *value = flags.split()
    assert line.startswith(f"{name} ({value[0]}): " if value else f"{name}: ") and reason in line
    assert ("Leave it out." in line) != ("et --" in line)


def test_help_holds_every_flag_with_its_words_and_default(capsys):
    with pytest.raises(SystemExit) as exited:
        load_config([*REQUIRED, "--help"], ALGORITHMS)
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert exited.value.code == 0 and "alpha: the first of two algorithms" in text
    for section, cls in [*SECTIONS.items(), ("algorithm", Alpha), ("algorithm", Beta)]:
        assert (cls.__doc__ or "").split("\n")[0] in text
        for flag in section_flags(section, cls):
            assert f"--{flag.name}" in text and len(flag.help) > 5 and flag.help in words, flag.name
    assert "--lr FLOAT Peak learning rate of Adam. Default: 1e-06." in words
    assert (
        "--executor STR torchrun: a driver" in words
        and "--scale, --no-scale Scale. Default: on." in words
        and "Required." in words
    )


def test_real_algorithms_are_flags():
    """Every field of the registry's algorithms has a type a flag can carry, help, and a name of its own."""
    for name in REGISTRY:
        config = load_config(["--algorithm", name, *REQUIRED[2:]], REGISTRY)
        assert config.algorithm == REGISTRY[name]()
        assert all(flag.help for flag in section_flags("algorithm", REGISTRY[name]))


LOAD = """
import sys
from megarl.algorithms import REGISTRY, Algorithm
from megarl.config.loader import load_config
argv = "--algorithm sft --model m --train-data d --save s --train-iters 1 --rollout-kv-cache-dtype fp8 --hidden-dropout 0".split()
load_config(argv, REGISTRY)
print(*{"torch", "vllm", "megatron", "transformers"} & set(sys.modules))
"""


def load_grpo(*args):
    return load_config([*REQUIRED, "--algorithm=grpo", *args][2:], REGISTRY)


@pytest.mark.parametrize(
    "flags, clip",
    [
        ("", None),
        ("--staleness 0", None),
        ("--staleness 1", 2.0),
        ("--staleness 1 --tis-clip 3", 3.0),
        ("--staleness 1 --tis-clip none", None),
        ("--tis-clip 3", 3.0),
    ],
)
def test_the_importance_weights_are_on_by_default_where_samples_may_be_stale(tmp_path, flags, clip):
    """The value is in resolved.args, which gives it again."""
    config = load_grpo(*flags.split())
    assert config.algorithm.tis_clip == clip
    text = write_args(config)
    stale = "--staleness" in flags and "--staleness 0" not in flags
    assert (f"--tis-clip {'none' if clip is None else clip}" in text.splitlines()) == (
        stale or clip is not None
    )
    assert load_config([write(tmp_path, "resolved.args", text)], REGISTRY) == config


def test_every_actor_weighs_stale_samples_unless_its_own_flag_says_otherwise(tmp_path):
    config = load_grpo("--staleness=1", "--num-actors=3", "--actor-2-tis-clip=none", "--actor-3-tis-clip=3")
    clips = [one.algorithm.tis_clip for one in (config, *config.others)]
    assert clips == [2.0, None, 3.0]
    assert load_config([write(tmp_path, "resolved.args", write_args(config))], REGISTRY) == config


def test_parsing_imports_no_framework():
    """Also with flags of vLLM's and Megatron's classes, whose sources are read instead."""
    assert succeed("-c", LOAD, timeout=60).stdout == "\n"


def test_configurations_are_frozen():
    config = load()
    for node in (config, config.model, config.actor, config.algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(node, dataclasses.fields(node)[0].name, None)


def test_a_number_that_no_actor_can_have_is_no_number():
    with pytest.raises(ConfigError, match="no such flag"):
        load(f"--actor-{'9' * 5000}-lr", "1")


def test_paths_that_the_system_does_not_look_at(tmp_path):
    """pathlib raises for them where it is asked whether they are there."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    long = "9" * 300
    assert errors(
        "--eval-data", long, "--judge-template", str(tmp_path / "loop"), "--reward-function", f"{long}1:score"
    ) == (
        f"--eval-data ({long}): File name too long. Give another path.",
        f"--reward-function ({long}1): File name too long. Give another path.",
        f"--judge-template ({tmp_path}/loop): Too many levels of symbolic links. Give another path.",
    )
