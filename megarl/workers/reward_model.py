"""Score this rank's samples of the training batch by a reward model.

    transformers   the whole classifier on each rank; each rank scores its own samples
    megatron       a value model split over the mesh
    judge          a vLLM engine of tp ranks in separate processes; the first of these ranks calls it

Every model reads text: the dataset's messages, and the response decoded with the actor's tokenizer, without
special tokens. A classifier's own chat template writes both, as when it was trained. Episodes of several turns are
read as the actor's ids if the tokenizers agree (`same_tokenizer`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.batch import Batch, MicroBatch
from megarl.config.reward_models import read_model_config, reward_models, value_model_shape
from megarl.data.encoder import load_rows
from megarl.data.prompts import Prompt
from megarl.data.rendering import RowSample, encode_parts, parts_of, scored
from megarl.data.tokenizer import load_tokenizer, tokenizer_of
from megarl.data.tokenizer_base import Tokenizer
from megarl.flow.job_roles import Record, RewardModel
from megarl.rewards import classifier
from megarl.rewards.judge_prompt import JudgePrompt, conversation_text
from megarl.rollout.draws import draw_key
from megarl.workers.hosted_role import HostedRole
from megarl.workers.implements import implements
from megarl.workers.offload_manager import needs
from megarl.workers.store import BatchShard

if TYPE_CHECKING:
    from megarl.rollout.judge import Judge

Records = list[Record]
_PROBE = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]


@implements(RewardModel)
class RewardModelRole(HostedRole):
    """One rank's part of a reward model: a Hugging Face classifier, a Megatron value model or a vLLM
    judge."""

    def __post_init__(self) -> None:
        super().__post_init__()
        models = reward_models(self.config)
        self.spec = next(spec for spec in models if spec.name + self.suffix == self.name)
        self.judge: Judge | None = None
        """The judge that this rank calls. None also if the rank lends its device to another rank's judge."""

    @property
    def where(self) -> str:
        return f"{self.name} rank {self.rank}"

    @needs()
    def setup(self) -> None:
        """Load the model, or start the judge. Raises ValueError or EngineDied, naming the model, if that
        fails. Collective over the mesh for the megatron backend."""
        self.actor_tokenizer = tokenizer_of(self.config.model)
        {
            "transformers": self._set_up_classifier,
            "megatron": self._set_up_value_model,
            "judge": self._set_up_judge,
        }[self.spec.backend]()
        self.dataset = load_rows(self.config, self.config.data.train_data)

    @needs("parameters")
    def score(self, rows: Mapping[int, int]) -> Records:
        """Return one record per sample that this rank reports, with its unweighted score; [] on ranks that
        leave it to another rank.

        Args:
            rows: sample id -> dataset row, of all samples of the step; {} if they were scored before.
        Returns: records with sample_id and the unweighted score. The score is None if it failed, and
        `failure` holds the reason. A judge's records of the first --num-rollouts-to-log samples also have its
        answer.
        Raises: EngineDied as soon as a judge's process is gone."""
        return self._score(self.store.batch(self.shard_key), rows) if rows else []

    @needs("parameters")
    def score_groups(self, rows: Mapping[int, int]) -> Records:
        """Score the samples as `score` does, each mini-batch by itself. A judge answers all questions together,
        because its engine is slow with few of them, and says of each sample what it has answered.

        Raises: EngineDied as soon as a judge's process is gone."""
        shard, dp_rank = self.store.batch(self.shard_key), self.mesh.coordinates(self.rank)["dp"]
        if self.spec.backend == "judge":
            return self._ask_judge(shard, rows, num_logged=-1)
        records = []
        for mini_batch in shard.mini_batches:
            group = shard.batch.select_samples(mini_batch.samples_of(dp_rank))
            records += self._score(BatchShard(group, [mini_batch], {**shard.digests}), rows)
        return records

    def _score(self, shard: BatchShard, rows: Mapping[int, int]) -> Records:
        by_backend = {
            "transformers": self._score_with_classifier,
            "megatron": self._score_with_value_model,
            "judge": self._ask_judge,
        }
        return by_backend[self.spec.backend](shard, rows)

    def shut_down(self) -> None:
        if self.judge is not None:
            self.judge.shutdown()

    # transformers

    def _set_up_classifier(self) -> None:
        if self.mesh.tp * self.mesh.pp != 1:
            raise ValueError(
                f"--reward-model ({self.spec.path}): --reward-model-backend transformers has the whole model "
                f"on each rank, and its mesh splits it (tp {self.mesh.tp}, pp {self.mesh.pp}). Give it "
                "neither, or try megatron."
            )
        from megarl.megatron.offload import ModelMemory

        self.classifier = classifier.Classifier(self.spec.path)
        self.memory = ModelMemory(self.classifier, self.name)
        self.offload_manager.add(self.name, self.memory, self.config.reward.offload)
        self._choose_ids(self.classifier.tokenizer)

    def _score_with_classifier(self, shard: BatchShard, rows: Mapping[int, int]) -> Records:
        batch = shard.batch
        sequences = self._token_ids(batch, rows)
        self.memory.use("parameters")
        scores = self.classifier.scores(sequences, self.config.batch.max_tokens_per_micro_batch)
        longest = self.classifier.max_length
        return [
            _record(
                sample_id,
                score,
                f"{len(ids)} tokens, the model takes {longest}"
                if len(ids) > longest
                else "not a finite number",
            )
            for sample_id, score, ids in zip(batch.sample_ids.tolist(), scores, sequences, strict=True)
        ]

    # megatron

    def _set_up_value_model(self) -> None:
        from megarl.megatron.value_model import ValueModel
        from megarl.reshard.hf_weights import load_hf
        from megarl.workers.megatron_role import megatron_atlases

        config, shape, parallel = self.config, value_model_shape(self.spec.path), self.config.reward
        self.value_model = ValueModel(
            shape, self.mesh, config.model, parallel, None, config.batch.train_iters, config.transformer
        )
        load_hf(
            self.spec.path,
            megatron_atlases(shape, self.mesh, parallel)[self.rank],
            self.value_model.parameters,
            shape,
        )
        self.value_model.parameters_changed()
        self.value_model.memory.owner = self.name
        self.offload_manager.add(self.name, self.value_model.memory, parallel.offload)
        self._choose_ids(classifier.load_tokenizer(self.spec.path))
        self.max_length = shape.max_position_embeddings

    def _score_with_value_model(self, shard: BatchShard, rows: Mapping[int, int]) -> Records:
        batch = shard.batch
        micro_batches = self._own_micro_batches(batch, rows)
        scores = self.value_model.scores(micro_batches)
        if scores is None or not self.value_model.reports:
            return []
        of_sample = {
            sample: score
            for micro, values in zip(micro_batches, scores, strict=True)
            for sample, score in zip(micro.batch.sample_ids.tolist(), values.tolist(), strict=True)
        }
        return [
            _record(
                sample_id,
                of_sample.get(sample_id),
                f"longer than the {self.max_length} tokens that the model takes",
            )
            for sample_id in batch.sample_ids.tolist()
        ]

    def _own_micro_batches(self, batch: Batch, rows: Mapping[int, int]) -> list[MicroBatch]:
        """Return micro-batches of the samples in the reward model's own token ids, at least one and equally
        many on all data-parallel ranks.

        Samples that are too long for the model are left out. Empty micro-batches are added until all
        data-parallel ranks have equally many."""
        packed: list[Batch] = []
        room = 0
        for sample_id, ids in zip(batch.sample_ids.tolist(), self._token_ids(batch, rows), strict=True):
            if len(ids) > self.max_length:
                continue
            one = Batch.from_samples([sample_id], [ids[:-1]], [ids[-1:]])
            if packed and len(ids) <= room:
                packed[-1], room = Batch.cat([packed[-1], one]), room - len(ids)
            else:
                packed.append(one)
                room = self.config.batch.max_tokens_per_micro_batch - len(ids)
        count = torch.tensor(len(packed), device=self.value_model.device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.value_model.groups.dp)
        # Megatron's schedules run one micro-batch even if there is none.
        packed += [Batch.from_samples([], [], [])] * (max(int(count), 1) - len(packed))
        return [MicroBatch.of(part) for part in packed]

    # judge

    def _set_up_judge(self) -> None:
        options = self.config.reward_models
        self.prompt = JudgePrompt.load(
            options.judge_template, options.judge_score_pattern, options.judge_score_range
        )
        if self.mesh.pp != 1:
            raise ValueError(
                f"--reward-model ({self.spec.path}): a judge has no pipeline stages, and its mesh has "
                f"{self.mesh.pp}. Use tensor parallelism."
            )
        if self.mesh.coordinates(self.rank)["tp"] == 0:
            from megarl.rollout.judge import Judge

            ranks = self.mesh.peers(self.rank, "tp")
            self.judge = Judge(self.where, self.config, self.spec.path, ranks, len(self.prompt.template))

    def _ask_judge(
        self, shard: BatchShard, rows: Mapping[int, int], num_logged: int | None = None
    ) -> Records:
        if self.judge is None:
            return []
        batch = shard.batch
        sample_ids, prompts = batch.sample_ids.tolist(), self._prompts(batch, rows)
        questions = [
            self.prompt.fill(prompt.messages, response, prompt.ground_truth)
            for prompt, response in zip(prompts, self._responses(batch), strict=True)
        ]
        keys = [draw_key(self.config.batch.seed, self.name, sample_id) for sample_id in sample_ids]
        limit = self.config.run.num_rollouts_to_log if num_logged is None else num_logged
        logged = set(rows if limit < 0 else itertools.islice(rows, limit))
        records = []
        for sample_id, answer in zip(sample_ids, self.judge.answers(questions, keys), strict=True):
            if answer is None:
                records.append(
                    _record(
                        sample_id, None, f"the question has more than {self.judge.max_question_length} tokens"
                    )
                )
                continue
            cut = "" if answer.is_complete else ", cut off at --judge-max-tokens"
            records.append(
                _record(
                    sample_id,
                    self.prompt.parse(answer.text, answer.is_complete),
                    f"no score in the answer{cut}",
                )
            )
            if sample_id in logged:
                records[-1]["answer"] = answer.text
        return records

    # The input of the models.

    def _choose_ids(self, hugging_face) -> None:
        self.is_pair = hugging_face.chat_template is None and hugging_face.sep_token_id is not None
        self.hugging_face = hugging_face
        if self.is_pair:  # an encoder, which may have no end of sequence
            return
        path, actor = self.spec.path, self.actor_tokenizer
        self.tokenizer = own = load_tokenizer(path, "--reward-model")
        own.template_arguments = self.config.model.chat_template_args
        self.pad = read_model_config(path).get("pad_token_id")
        sizes = [read_model_config(one).get("vocab_size", 0) for one in (path, self.config.model.model)]
        # A padded vocabulary lets the actor sample ids beyond the tokenizer's words.
        self.reads_ids = sizes[0] >= sizes[1] and same_tokenizer(actor, own)

    def _token_ids(self, batch: Batch, rows: Mapping[int, int]) -> list[list[int]]:
        """Return the token ids of each sample in the reward model's vocabulary, up to the one that is scored, in
        the order of the batch."""
        prompts, responses = self._prompts(batch, rows), self._responses(batch)
        if self.is_pair:
            read = zip(prompts, responses, strict=True)
            return [classifier.encode_pair(self.hugging_face, one.messages, text) for one, text in read]
        if self.tokenizer.template is None:
            prompts = [replace(one, messages=conversation_text(one.messages)) for one in prompts]
        parts = [
            parts_of(self.tokenizer, prompt, {"role": "assistant", "content": text}, "score")
            for prompt, text in zip(prompts, responses, strict=True)
        ]
        samples = encode_parts(self.tokenizer, parts)
        if self.reads_ids:
            lengths = batch.lengths.tolist()
            split = zip(batch.tokens.split(lengths), batch.response_mask.split(lengths), strict=True)
            samples = [
                self._with_actor_ids(tokens.tolist()) if _has_turns(mask) else sample
                for sample, (tokens, mask) in zip(samples, split, strict=True)
            ]
        return [[*one.prompt, *one.response] for one in (scored(sample, self.pad) for sample in samples)]

    def _with_actor_ids(self, ids: list[int]) -> RowSample:
        """Return an episode as the actor's ids, with what the template writes behind its last answer."""
        tail = self.tokenizer.encode_response(self.tokenizer.turn_tail)
        return RowSample(ids, tail[1:] if ids[-1:] == tail[:1] else tail)

    def _prompts(self, batch: Batch, rows: Mapping[int, int]) -> list[Prompt]:
        return [self.dataset[rows[sample_id]] for sample_id in batch.sample_ids.tolist()]

    def _responses(self, batch: Batch) -> list[str]:
        """Return each sample's text from its first response token on, in the order of the batch."""
        lengths = batch.lengths.tolist()
        parts = zip(batch.tokens.split(lengths), batch.response_mask.split(lengths), strict=True)
        return self.actor_tokenizer.decode_batch(
            [
                tokens[int(mask.int().argmax()) if mask.any() else len(tokens) :].tolist()
                for tokens, mask in parts
            ]
        )


def same_tokenizer(actor: Tokenizer, own: Tokenizer) -> bool:
    """Return whether a reward model can read the actor's token ids: it has all tokens of the actor at the same
    ids, and its chat template writes the same.

    Args:
        actor: a tokenizer that is no Hugging Face tokenizer is never the same."""
    ours, theirs = (getattr(one, "hugging_face", None) for one in (actor, own))
    if ours is None or theirs is None or not ours.get_vocab().items() <= theirs.get_vocab().items():
        return False
    try:
        return actor.render(_PROBE) == own.render(_PROBE)
    except ValueError:  # no template, or one that refuses the probe
        return False


def _has_turns(mask: torch.Tensor) -> bool:
    """Return whether a sample has ids of a conversation between those that were sampled."""
    return int((mask[1:] & ~mask[:-1]).sum()) > 1


def _record(sample_id: int, score: float | None, failure: str) -> dict[str, object]:
    """Return the record of a sample: its id, its score and, only if the score is None, `failure`."""
    return {"sample_id": sample_id, "score": score} | ({"failure": failure} if score is None else {})
