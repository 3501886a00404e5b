"""Files of others run nothing: a model folder with code of its own, chat templates that look for a way out.
`pytest tests/data`"""

import contextlib
import json
import shutil

import pytest
import sentencepiece

from megarl.config.hf_config import ModelShape
from megarl.data.tokenizer import load_tokenizer

ESCAPES = [
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ messages.append('one more') }}",
    "{% for i in range(10 ** 12) %}x{% endfor %}",
]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("unknown", [False, True], ids=["known type", "unknown type"])
def test_code_in_a_model_folder_is_not_run(sums_paths, tmp_path, monkeypatch, unknown):
    """`auto_map` is how a folder of the Hub asks for that. Without an explicit no, transformers asks on the
    terminal: here someone says yes."""
    folder, mark = tmp_path / "model", tmp_path / "was_here"
    shutil.copytree(sums_paths["model"], folder)
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    for name, classes in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        config = json.loads((folder / name).read_text()) | {"auto_map": classes}
        if unknown:
            config |= (
                {"model_type": "evil", "tokenizer_class": "Evil"}
                if name == "config.json"
                else {"tokenizer_class": "Evil"}
            )
        (folder / name).write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(ValueError):
        load_tokenizer(folder)
    with contextlib.suppress(ValueError):
        ModelShape.load(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("template", ESCAPES)
def test_chat_templates_do_not_get_out(sums_paths, tmp_path, template):
    folder = tmp_path / "model"
    shutil.copytree(sums_paths["model"], folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with open(tmp_path / "a.model", "wb") as model:
        lines = iter(["hello world"] * 9)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=13, hard_vocab_limit=False, minloglevel=2
        )
    (tmp_path / "chat_template.jinja").write_text(template)
    for path in (folder, tmp_path / "a.model"):
        with pytest.raises(
            (ValueError, OverflowError), match="unsafe|is undefined|has no attribute|Range too big"
        ):
            load_tokenizer(path).encode_prompt(MESSAGES)
