"""Data and rewards load no heavy library until it is needed: the driver imports them."""

from tests.launch import succeed

HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "megatron",
    "pyarrow",
    "math_verify",
    "sympy",
    "sentencepiece",
    "tokenizers",
    "pandas",
)
MODULES = (
    "prompts",
    "cursor",
    "tokenizer",
    "hf_tokenizer",
    "sentencepiece_tokenizer",
    "encoder",
)


def run(program, *arguments):
    code = f"import sys\n{program}\nprint(*sorted(set(sys.modules) & set({HEAVY!r})))"
    return succeed("-P", "-c", code, *arguments, timeout=60).stdout.split()


def test_imports_are_light():
    assert run(f"import megarl.rewards; from megarl.data import {', '.join(MODULES)}") == []


def test_jsonl_cursor_and_rewards_run_without_them(sums_paths):
    program = (
        "from megarl.data.prompts import PromptDataset; from megarl.data.cursor import DataCursor\n"
        "from megarl.config.schema import DataConfig; from megarl.rewards.pool import RewardPool, "
        "probe_reward\n"
        "dataset = PromptDataset.load(sys.argv[1], needs='ground_truth')\n"
        "DataCursor(len(dataset)).next_rows(9); "
        "probe_reward(RewardPool(DataConfig(train_data=('x',)), 0), dataset)"
    )
    assert run(program, sums_paths["train"]) == []


def test_parquet_and_sentencepiece_need_no_torch(sums_paths, tmp_path):
    program = (
        "import io, sentencepiece; from megarl.data.prompts import PromptDataset; from "
        "megarl.data.tokenizer import load_tokenizer\n"
        "path = sys.argv[2] + '/a.model'\n"
        "options = dict(model_prefix=path[:-6], vocab_size=13, hard_vocab_limit=False, minloglevel=2)\n"
        "sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(['hello world'] * 9), **options)\n"
        "load_tokenizer(path).encode_prompt(PromptDataset.load(sys.argv[1])[0].messages)"
    )
    assert run(program, sums_paths["test_parquet"], str(tmp_path)) == ["pyarrow", "sentencepiece"]
