"""The role of a reward model: which text or ids the model reads, what it reports, and what its death does.

    pytest tests/workers/test_reward_model.py

run_reward_model.py runs once, with real vLLM; 30 s on a free core. Its judge is a Qwen3 whose layers add
nothing and whose output layer is set by hand: it continues a text that ends in the digit d with d+1, d+2, and
one that ends otherwise with the end of the sequence; what it is worth follows from the response's last
character alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.batch import Batch
from megarl.config.mesh import MeshSpec
from megarl.data.tokenizer import load_tokenizer
from megarl.megatron import mesh as megatron_mesh
from megarl.megatron.offload import ModelMemory
from megarl.workers.offload_manager import OffloadManager
from megarl.workers.reward_model import RewardModelRole
from megarl.workers.store import BatchShard
from sums.model import EOS_ID
from tests.launch import run
from tests.rewards import models
from tests.workers.moved_storages import MovedStorages
from tests.workers.reward_jobs import (
    QUESTIONS,
    RESPONSES,
    ROWS,
    SAMPLE_IDS,
    config,
    ids_of_step,
    store,
    write_rows,
)

HERE = Path(__file__).parent
LIMIT = 1e-5  # as tests/rewards/test_classifier.py


@pytest.fixture
def folder(tmp_path):
    models.write_actor(tmp_path / "actor")
    write_rows(tmp_path)
    return tmp_path


def classifier_role(folder: Path, tp: int = 1) -> RewardModelRole:
    role = RewardModelRole(
        "reward_model",
        config(folder, "transformers"),
        {"reward_model": MeshSpec(tuple(range(tp)), tp=tp)},
        store(folder),
        OffloadManager(),
    )
    role.setup()
    return role


def check_scores(records: list[dict], wanted: list[float]) -> None:
    assert [record["sample_id"] for record in records] == SAMPLE_IDS
    assert (torch.tensor([record["score"] for record in records]) - torch.tensor(wanted)).abs().max() < LIMIT


def test_a_classifier_with_the_actors_tokenizer_reads_the_same_ids(folder):
    model = models.write_classifier(folder / "transformers", "qwen2", folder / "actor")
    role = classifier_role(folder)
    prompts, responses = ids_of_step(load_tokenizer(folder / "actor"))
    check_scores(
        role.score(ROWS),
        models.reference_scores(model, [p + r for p, r in zip(prompts, responses, strict=True)]),
    )


def test_a_classifier_is_in_host_memory_while_others_work(folder):
    """With copies between two places of host memory in place of a GPU's (see test_offload.py)."""
    models.write_classifier(folder / "transformers", "qwen2", folder / "actor")
    role = classifier_role(folder)
    expected, offload_manager = role.score(ROWS), role.offload_manager
    for weight in role.classifier.model.parameters():
        weight.data = weight.data.clone()  # not the file's pages
    role.memory = ModelMemory(role.classifier, role.name)
    role.memory._copies = MovedStorages()
    offload_manager.add(role.name, role.memory, ["parameters"])
    num_bytes = sum(weight.nbytes for weight in role.classifier.model.parameters())
    assert role.memory.resident_bytes() == num_bytes
    offload_manager.enter("actor", ["parameters"])
    assert role.memory.resident_bytes() == 0 and not any(
        weight.untyped_storage().nbytes() for weight in role.classifier.model.parameters()
    )
    assert (
        role.score(ROWS) == expected
        and role.memory._copies.num_moves == 1
        and role.memory.resident_bytes() == num_bytes
    )


OTHER_TEMPLATE = "{% for m in messages %}{{m.role}}: {{m.content}}<|end|>{% endfor %}"


def ids_of_other_template(folder: Path) -> list[list[int]]:
    """Return the token ids of the step's conversations in OTHER_TEMPLATE."""
    texts = [
        f"user: {QUESTIONS[ROWS[sample]]}<|end|>assistant: {response}<|end|>"
        for sample, response in zip(SAMPLE_IDS, RESPONSES, strict=True)
    ]
    return load_tokenizer(folder / "actor").encode_responses(texts)


def test_a_classifier_with_another_chat_template_reads_text(folder):
    """The dataset's messages and the response without its end-of-sequence token, through the classifier's
    template."""
    model = models.write_classifier(
        folder / "transformers", "qwen2", folder / "actor", chat_template=OTHER_TEMPLATE
    )
    role = classifier_role(folder)
    check_scores(role.score(ROWS), models.reference_scores(model, ids_of_other_template(folder)))


def test_a_sample_that_is_too_long_fails_alone(folder):
    models.write_classifier(folder / "transformers", "qwen2", folder / "actor")
    role = classifier_role(folder)
    role.classifier.max_length = 50
    records = {record["sample_id"]: record for record in role.score(ROWS)}
    assert "tokens, the model takes 50" in records[2]["failure"] and records[2]["score"] is None
    assert all("failure" not in records[sample] for sample in (11, 5, 8))


@pytest.fixture
def world(monkeypatch):
    """This process as the only rank, with process groups of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(megatron_mesh, "_groups", {})
    yield
    dist.destroy_process_group()


def test_a_megatron_model_to_which_every_sample_is_too_long(folder, world):
    """With another chat template, so that the lengths are known only to the model's rank."""
    model = models.write_classifier(
        folder / "megatron", "qwen2", folder / "actor", chat_template=OTHER_TEMPLATE
    )
    mesh = MeshSpec((0,))
    megatron_mesh.create_groups(mesh)
    role = RewardModelRole(
        "reward_model", config(folder, "megatron"), {"reward_model": mesh}, store(folder), OffloadManager()
    )
    role.setup()
    check_scores(role.score(ROWS), models.reference_scores(model, ids_of_other_template(folder)))
    role.max_length = 5
    failure = "longer than the 5 tokens that the model takes"
    assert role.score(ROWS) == [
        {"sample_id": sample, "score": None, "failure": failure} for sample in SAMPLE_IDS
    ]


def test_an_episode_is_read_as_ids_where_the_actor_has_the_same(folder):
    """Turns between answers have no place in the text of one answer. The last answer, which was cut, gets its end."""
    model = models.write_classifier(folder / "transformers", "qwen2", folder / "actor")
    role, (prompts, responses) = classifier_role(folder), ids_of_step(load_tokenizer(folder / "actor"))
    cut = [ids[:-1] for ids in responses]
    episodes = Batch.from_samples(SAMPLE_IDS, prompts, cut, holes=[[], [(2, 4)], [], [(3, 6)]])
    role.store.release_batch("reward_model")
    role.store.set_batch("reward_model", BatchShard(episodes, mini_batches=[]))
    check_scores(
        role.score(ROWS),
        models.reference_scores(model, [p + r for p, r in zip(prompts, responses, strict=True)]),
    )
    file = folder / "actor" / "config.json"  # a vocabulary that lacks what the actor can sample
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 321}))
    assert role.reads_ids and not classifier_role(folder).reads_ids


def test_a_classifier_is_not_split(folder):
    with pytest.raises(ValueError, match="has the whole model on each rank"):
        classifier_role(folder, tp=2)


def write_judge(folder: Path) -> None:
    """See the head of this file. After the assistant's header it answers 7, 8."""
    models.write_actor(folder)
    tokenizer_config = folder / "tokenizer_config.json"
    tokenizer_config.write_text(
        json.dumps(
            {k: v for k, v in json.loads(tokenizer_config.read_text()).items() if k != "chat_template"}
        )
    )
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            weight.zero_()
    ids = load_tokenizer(folder).encode_responses([*"0123456789", "<|assistant|>"])
    digits, header = [i for [i] in ids[:10]], ids[10][0]
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings[:, 11] = 1.0
    head[EOS_ID, 11] = 1.0
    for token, column, answer in [
        *((digits[d], d, digits[(d + 1) % 10]) for d in range(10)),
        (header, 10, digits[7]),
    ]:
        embeddings[token] = 0.0
        embeddings[token, column] = 1.0
        head[answer, column] = 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("judged")
    models.write_actor(folder / "actor")
    write_judge(folder / "judge")
    write_rows(folder)
    (folder / "template.txt").write_text("Q {prompt} A {response}")
    done = run(HERE / "run_reward_model.py", folder, timeout=200, preloaded=True)
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    return json.loads((folder / "report.json").read_text()) | {"exit_code": done.returncode}


@pytest.mark.nightly
def test_a_judges_answers_become_scores(judged):
    """4 for the response 3; 9 for 8, which is outside 0..8; no number; a question above 60 - 2 tokens."""
    first, second, third, fourth = (
        {k: v for k, v in record.items() if k != "answer"} for record in judged["scores"]
    )
    assert first == {"sample_id": 11, "score": 0.5}
    assert second == {
        "sample_id": 5,
        "score": None,
        "failure": "no score in the answer, cut off at --judge-max-tokens",
    }
    assert third == {"sample_id": 8, "score": None, "failure": "no score in the answer"}
    assert fourth == {"sample_id": 2, "score": None, "failure": "the question has more than 58 tokens"}


@pytest.mark.nightly
def test_a_judge_with_a_chat_template_answers_as_the_assistant(judged):
    by_id = {record["sample_id"]: record for record in judged["with a chat template"]}
    assert [by_id[sample]["score"] for sample in (11, 5, 8, 2)] == [0.875, 0.875, 0.875, None]
    assert by_id[5]["answer"] == "78" and [*by_id] == [11, 5, 8, 2]
    logged = ["answer" in record for record in by_id.values()]
    assert logged == [True, True, False, False]  # the first two of the step


@pytest.mark.nightly
def test_a_judges_draws_follow_from_the_sample_alone(judged):
    """Its answers differ at the highest temperature of vLLM. Asked again, and by another process, it says the same."""
    first, again, restarted = judged["hot"]
    assert first == again == restarted
    answers = [record["answer"] for record in first if "answer" in record]
    assert len(answers) == len({*answers}) == 2


@pytest.mark.nightly
def test_a_judge_that_is_killed_ends_the_call_with_its_name(judged):
    killed = judged["killed"]
    assert killed["error"] == f"[reward_model rank 0] judge process ({killed['pid']}) died: killed by SIGKILL"
    assert killed["again"] == killed["error"] and killed["seconds"] < 2


@pytest.mark.nightly
def test_a_judge_that_dies_at_its_start_is_named(judged):
    killed = judged["killed at start"]
    assert (
        killed["error"].startswith("[reward_model rank 0] judge ")
        and "did not start" in killed["error"]
        and killed["seconds"] < 5
    )


@pytest.mark.nightly
def test_no_judge_outlives_its_rank(judged):
    assert judged["exit_code"] == 7 and judged["restarted"][0]["score"] == 0.5
    deadline = time.monotonic() + 10
    while alive := [pid for pid in judged["pids"] if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
