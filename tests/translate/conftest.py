"""A model folder, data and a reward for the configurations of other frameworks, whose own are not here.

The model has as many heads, layers and experts as the largest of their layouts needs. It has experts where
the translation splits experts."""

import json
import shlex

import pytest

from megarl import cli
from tests.config.conftest import MIXTURE, QWEN3, ROW, write_tokenizer, write_zeros

SHAPE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 32, "num_hidden_layers": 16}
SHAPE |= {"max_position_embeddings": 1 << 20}
EXPERTS = {"num_experts": 16}
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "num_labels": 1}


def write_model(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_zeros(folder)
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture
def local(tmp_path):
    """local(words of an args file) -> flags that put files of this folder in the place of those it names."""
    dense = write_model(tmp_path / "dense", QWEN3 | SHAPE)
    mixture = write_model(tmp_path / "mixture", MIXTURE | SHAPE | EXPERTS)
    scores = write_model(tmp_path / "reward", QWEN3 | SHAPE | CLASSIFIER)
    data, reward = tmp_path / "rows.jsonl", tmp_path / "rewards.py"
    data.write_text(json.dumps(ROW) + "\n")
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    here = {
        "--critic-model": dense,
        "--reward-model": scores,
        "--reward-function": f"{reward}:compute_score",
        "--train-data": str(data),
        "--eval-data": str(data),
        "--prompt-key": "prompt",
        "--save": str(tmp_path / "run"),
        "--load": str(tmp_path / "run"),
    }

    def replace(text):
        named = set(shlex.split(text, comments=True))
        model = mixture if "--expert-model-parallel-size" in named else dense
        always = {"--train-data", "--save"}
        files = [word for flag, value in here.items() if flag in named | always for word in (flag, value)]
        return ["--model", model, *files]

    return replace


@pytest.fixture
def translate(capsys):
    """translate(arguments ...) -> (flag -> its words, all comments) of the printed args file."""

    def run(*argv):
        assert cli.main(["translate", *map(str, argv)]) == 0
        text = capsys.readouterr().out
        flags = {}
        for line in text.splitlines():
            if words := shlex.split(line, comments=True):
                assert words[0] not in flags, f"{words[0]} is written twice"
                flags[words[0]] = words[1:]
        return flags, "\n".join(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)

    return run


def of_file(translate, tmp_path, name, text, *options):
    """Return what `translate` returns of a file with this text."""
    path = tmp_path / name
    path.write_text(text)
    return translate(*options, path)
