"""Sample multi-turn episodes on one rank: the environments' processes, and an engine that answers turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.config.environments import environments
from megarl.config.episode_sections import settings_of_verifiers
from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import rule_judges_agents
from megarl.config.schema import TrainConfig
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer_base import Tokenizer
from megarl.episodes.answers import AnswerParser
from megarl.episodes.chat import Chat
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.environments import Environments
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import Answer, Turn, play
from megarl.episodes.session import Branch
from megarl.packing import branch_id
from megarl.rollout.draws import AnswerKeys
from megarl.rollout.requests import Request
from megarl.workers.answer import GREEDY
from megarl.workers.answer import Answer as FirstTurn
from megarl.workers.open_episode import SavedTurn
from megarl.workers.store import RolloutSample

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine


def _parser(config: TrainConfig, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> AnswerParser | None:
    """Return vLLM's parser of answers; None without --tool-call-parser and --reasoning-parser."""
    tools, reasoning = config.episodes.tool_call_parser, config.episodes.reasoning_parser
    if tools is None and reasoning is None:
        return None
    from megarl.rollout.answer_parser import VllmAnswerParser  # imports vLLM, which this process may not have

    hugging_face = getattr(tokenizer, "hugging_face", None)
    if hugging_face is None:
        flag = "--reasoning-parser" if tools is None else "--tool-call-parser"
        raise ValueError(
            f"{flag} ({tools or reasoning}): vLLM's parsers need a Hugging Face tokenizer, and {tokenizer.name} is "
            "a SentencePiece file. Leave it out."
        )
    return VllmAnswerParser(tools, reasoning, hugging_face, eos_ids, config.sampling.stop_token_ids)


def _environments(
    config: TrainConfig, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int
) -> Environments:
    """Return the pool that runs the environments of --env or --env-verifiers, or the agents of --agent-command."""
    episodes = config.episodes
    if episodes.env_verifiers is not None:
        from megarl.episodes.verifiers_pool import Verifiers, VerifiersPool  # imports aiohttp, as below

        assert episodes.env_python is not None
        return VerifiersPool(
            Verifiers(
                episodes.env_verifiers,
                episodes.env_python[0],
                episodes.env_verifiers_client,
                config.model.tokenizer_model or config.model.model,
                settings_of_verifiers(episodes),
            ),
            episodes.agent_timeout_s,
            episodes.env_episodes_per_process,
            config.sampling.max_engine_length,
            episodes.agent_host,
            _parser(config, tokenizer, eos_ids),
            vocab_size,
        )
    if episodes.agent_command is not None:
        from megarl.episodes.agent_pool import AgentPool  # imports aiohttp, which other jobs need not have

        return AgentPool(
            episodes.agent_command,
            episodes.agent_timeout_s,
            episodes.agent_num_processes,
            config.sampling.max_engine_length,
            episodes.agent_host,
            _parser(config, tokenizer, eos_ids),
            is_judged=rule_judges_agents(config),
            vocab_size=vocab_size,
        )
    limits = episodes.env_timeout_s, episodes.env_episodes_per_process
    return EnvironmentPool(environments(episodes), *limits)


class EpisodeSampler:
    """Samples the episodes of one engine. The environments' processes live from the first call to `close`."""

    def __init__(self, config: TrainConfig, shape: ModelShape, tokenizer: Tokenizer, engine: Engine) -> None:
        sampling = config.sampling
        self._tokenizer, self._engine = tokenizer, engine
        eos_ids = (*shape.eos_token_ids, tokenizer.eos_token_id, tokenizer.turn_end)
        self.chat = Chat(tokenizer, eos_ids, sampling.stop_token_ids)
        self._config = config
        self.environments = _environments(config, tokenizer, eos_ids, shape.vocab_size)
        self.of_agents = config.episodes.has_agent
        if self.of_agents:
            self.environments.proxy.check = self._check

    def limits(self, purpose: str) -> Limits:
        """Return the limits of the episodes of a purpose, "train" or "eval"."""
        sampling = self._config.sampling.of(purpose)
        return Limits(
            sampling.max_turns,
            sampling.max_response_length,
            sampling.max_length,
            self._config.episodes.max_branches,
        )

    def _check(self, how: Mapping[str, Any]) -> None:
        """Raise ValueError if the engine cannot sample in the way that an agent's request asks for."""
        if "stop" in how and getattr(self._tokenizer, "hugging_face", None) is None:
            raise ValueError(
                "a stop string needs a Hugging Face tokenizer, and this job has a SentencePiece file"
            )
        if "schema" in how:
            if self._engine.config.rollout.backend != "vllm":
                raise ValueError("response_format needs a grammar, which only --rollout-backend vllm has")
            from megarl.rollout.answer_parser import check_schema

            check_schema(how["schema"])

    def close(self) -> None:
        self.environments.close()

    def sample(
        self, answers: Sequence[FirstTurn], dataset: PromptDataset, **how: float
    ) -> list[RolloutSample]:
        """Play one episode per first turn, and return the samples of the episodes, in this order.

        The first answer of an episode draws by the episode's key, every later one by a key of its own, see
        `AnswerKeys`.

        Args:
            answers: sample id, row, group and key of each episode. Its environment gives the prompt.
            how: temperature, top_p and top_k."""
        episodes = [
            Episode(dataset[answer.row].columns, limits=self.limits(answer.purpose)) for answer in answers
        ]
        engine = self.turns(answers, how)
        play(episodes, engine, self.environments, self.chat, self.limits("train"))
        return self.samples(answers, episodes, engine)

    def turns(self, answers: Sequence[FirstTurn], how: dict[str, float]) -> Turns:
        """Return the engine as `runner.play` needs it, for the episodes of these first turns."""
        return Turns(self._engine, answers, how)

    def samples(
        self, answers: Sequence[FirstTurn], episodes: Sequence[Episode], engine: Turns
    ) -> list[RolloutSample]:
        """Return the samples of ended episodes, in order."""
        without = self._answer_once(engine, answers, episodes)
        return [
            sample
            for index, (first, episode) in enumerate(zip(answers, episodes, strict=True))
            for sample in episode_samples(first, episode, _single(without.get(index)))
        ]

    def _answer_once(
        self, engine: Turns, answers: Sequence[FirstTurn], episodes: Sequence[Episode]
    ) -> dict[int, Answer]:
        """Sample one token after the row's own prompt for each episode without an answer: it has failed before
        its first one, or other actors have given all. Returns index -> the answer.

        Every sample of a step needs a sampled token. That of such an episode has no reward and is masked."""
        missing = [index for index, episode in enumerate(episodes) if not episode.has_answers]
        engine.add([Turn(index, answers[index].prompt, max_tokens=1) for index in missing])
        found: dict[int, Answer] = {}
        while engine.has_unfinished():
            engine.step()
            found |= {answer.index: answer for answer in engine.take()}
        return found


def _single(answer: Answer | None) -> SavedTurn | None:
    if answer is None:
        return None
    return SavedTurn(answer.token_ids, answer.log_probs, answer.versions, answer.is_cut)


def episode_samples(first: FirstTurn, episode: Episode, single: SavedTurn | None) -> list[RolloutSample]:
    """Return an ended episode as samples to train on, one per branch of its conversation.

    Args:
        single: the token that was sampled for an episode without an answer of its own."""
    branches = episode.branches
    if single is not None:
        sampled = single.ids, [], single.log_probs, single.versions
        branches = [Branch(first.prompt, *sampled, messages=[], num_first=0)]
    answers = [
        replace(
            first,
            sample_id=branch_id(first.sample_id, number),
            prompt=branch.prompt,
            response=branch.response,
            log_probs=branch.log_probs,
            versions=branch.versions,
        )
        for number, branch in enumerate(branches)
    ]
    return [
        answer.sample(
            "length" if episode.truncated else "stop",
            tuple(branch.holes),
            episode=episode.result if number == 0 else None,
            branch=number,
            num_branches=len(branches),
        )
        for number, (answer, branch) in enumerate(zip(answers, branches, strict=True))
    ]


class Turns:
    """The engine as `runner.play` needs it: requests for answers go in, and sampled answers come out."""

    def __init__(self, engine: Engine, answers: Sequence[FirstTurn], how: dict[str, float]) -> None:
        self._engine, self._answers, self._how = engine, answers, how
        self._keys = [AnswerKeys(answer.key) for answer in answers]
        self._asked: dict[str, Turn] = {}  # by request id

    def add(self, turns: Sequence[Turn]) -> None:
        requests = []
        for turn in turns:
            first = self._answers[turn.index]
            name = f"episode/{first.sample_id}/{turn.number}"
            self._asked[name] = turn
            key = self._keys[turn.index].next(turn.prompt)
            how = self._how | GREEDY if first.greedy else self._how
            requests.append(Request(name, turn.prompt, key, max_tokens=turn.max_tokens, **how, **turn.how))
        if requests:
            self._engine.add(requests)

    def has_unfinished(self) -> bool:
        return bool(self._asked)

    def step(self) -> None:
        self._engine.step()

    def take(self) -> list[Answer]:
        found = []
        for output in self._engine.take():
            turn, is_cut = self._asked.pop(output.id), output.finish_reason == "length"
            sampled = output.token_ids, output.log_probs, output.versions
            found.append(Answer(turn.index, *sampled, is_cut, turn.number))
        return found
