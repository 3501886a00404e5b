"""Classifiers against transformers, one sample at a time and without padding.

    pytest tests/rewards/test_classifier.py

Scores spread by 0.1 to 1 and agree to 1e-5: sums in fp32 in another order. A wrong token or a padding that is
seen shows as 0.01 or more."""

from __future__ import annotations

import json
import random

import pytest
import torch

from megarl.rewards.classifier import Classifier, batches_of_like_length, encode_pair
from sums.model import EOS_ID
from tests.rewards import models

LIMIT = 1e-5


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    return models.write_actor(tmp_path_factory.mktemp("actor"))


def sequences(count=23, longest=60):
    rng = random.Random(0)
    return [[rng.randrange(2, 300) for _ in range(rng.randint(1, longest))] + [EOS_ID] for _ in range(count)]


@pytest.mark.parametrize("name", models.CONFIGS)
def test_scores(name, actor, tmp_path):
    """Decoders are scored as transformers does it, at the last token that is not the folder's padding; an encoder
    does not see padding."""
    model = models.write_classifier(tmp_path / "rm", name, actor)
    classifier, samples = Classifier(str(tmp_path / "rm")), sequences()
    pads_with_end = model.config.pad_token_id == EOS_ID
    wanted = torch.tensor(
        models.reference_scores(model, [ids[:-1] if pads_with_end and ids[1:] else ids for ids in samples])
    )
    assert wanted.std() > 0.05
    for max_tokens in (200, 10**6, 1):  # several batches, one, and one per sample
        assert (torch.tensor(classifier.scores(samples, max_tokens)) - wanted).abs().max() < LIMIT
    assert classifier.model.config.pad_token_id == models.CONFIGS[name].pad_token_id


def test_what_it_cannot_score_is_none(actor, tmp_path):
    models.write_classifier(tmp_path / "rm", "qwen2", actor)
    classifier = Classifier(str(tmp_path / "rm"))
    samples = sequences(3)
    assert classifier.max_length == 256
    scores = classifier.scores([samples[0], [5] * 257, [5] * 256, samples[1]], 1000)
    assert [score is None for score in scores] == [False, True, False, False]
    classifier.model.score.weight.fill_(float("nan"))
    assert classifier.scores(samples, 1000) == [None] * 3
    assert classifier.scores([], 1000) == []


def test_batches_hold_little_padding():
    rng = random.Random(1)
    lengths = {key: rng.randint(1, 500) for key in range(300)}
    batches = list(batches_of_like_length(lengths, 4096))
    assert sorted(key for batch in batches for key in batch) == list(range(300))
    padded = [len(batch) * max(lengths[key] for key in batch) for batch in batches]
    assert max(padded) <= 4096 and sum(padded) <= 1.1 * sum(lengths.values())
    assert list(batches_of_like_length({0: 9000, 1: 10}, 4096)) == [[0], [1]]


def test_an_encoder_reads_a_pair_of_texts(actor, tmp_path):
    models.write_classifier(tmp_path / "rm", "bert", actor)
    tokenizer = Classifier(str(tmp_path / "rm")).tokenizer
    assert tokenizer.decode(encode_pair(tokenizer, [{"role": "user", "content": "1+1 ?"}], "2")) == "1+1 ?2"


def test_folders_that_are_no_reward_model(actor, tmp_path):
    with pytest.raises(ValueError, match=r"no weights for score.weight, which would be random.*judge"):
        Classifier(str(actor))
    models.write_classifier(tmp_path / "rm", "qwen2", actor)
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    (tmp_path / "rm" / "model.safetensors").rename(tmp_path / "rm" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"--reward-model \(.*transformers cannot load it"):
        Classifier(str(tmp_path / "rm"))
    (tmp_path / "rm" / "config.json").write_text(
        json.dumps(config | {"model_type": "unheard of", "auto_map": {"AutoConfig": "code.C"}})
    )
    (tmp_path / "rm" / "code.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ValueError, match="transformers cannot load it"):
        Classifier(str(tmp_path / "rm"))
