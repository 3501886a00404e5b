"""Check --share-episodes: what the actors that play in the same episodes must have in common, and what is not
built for them."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.args_file import numbered
from megarl.config.errors import Errors
from megarl.config.flags import algorithm_name, flag_name, words_of
from megarl.config.mesh import engine_mode
from megarl.config.roles import place
from megarl.config.schema import TrainConfig
from megarl.role_names import number_of

_SAME = {
    "batch": ("seed", "num_prompts", "num_samples_per_prompt"),
    "data": ("train_data", "train_data_weights", "eval_data", "shuffle", "prompt_key"),
    "curriculum": ("curriculum", "difficulty_min", "difficulty_max", "difficulty_rest"),
    "episodes": ("env", "env_python", "env_timeout_s", "env_episodes_per_process"),
}
"""Section -> fields that decide which episodes are played, and in which order."""


def shared_episodes(actors: Mapping[str, TrainConfig], world_size: int) -> Errors:
    """Yield an error per rule that actors with --share-episodes and --env break; none without.

    Args:
        actors: suffix of each actor -> its configuration."""
    first, *others = actors.items()
    config = first[1]
    if not config.episodes.share_episodes or config.episodes.env is None:
        return
    if staleness := config.streaming.staleness:
        yield (
            f"--staleness ({staleness}): is not built for --share-episodes, whose episodes end before the actors "
            "train. Leave --staleness out."
        )
    if config.curriculum.is_measured:
        yield (
            "--curriculum, --difficulty-min and --difficulty-max: choose rows by the rewards of one actor, and with "
            "--share-episodes all actors have the same rows. Leave them out."
        )
    for suffix, of_actor in actors.items():
        yield from _engines(suffix, of_actor, config, world_size)
    for suffix, of_actor in others:
        yield from _differences(suffix, of_actor, config)


def _engines(suffix: str, of_actor: TrainConfig, first: TrainConfig, world_size: int) -> Errors:
    """Yield an error if an actor's engines are not beside those of the first actor, in processes of their own."""
    placed, errors = place(of_actor, world_size)
    if errors or (ranks := place(first, world_size)[0]["rollout"]) is None:
        return  # they are reported
    number = number_of(suffix)
    if engine_mode(of_actor, world_size) == "in-process":
        flag = numbered("rollout-engine", number)
        yield (
            f"--{flag} (in-process): with --share-episodes every engine has a process of its own, so that one samples "
            f"while another waits for its turn. Leave it out, or try --{flag} out-of-process."
        )
    if placed["rollout"] != ranks:
        mine = ",".join(map(str, placed["rollout"] or ()))
        yield (
            f"--{numbered('rollout-ranks', number)} ({mine}): with --share-episodes a rank steps an engine of each "
            f"actor, so the engines of all actors are on the same ranks. Try {','.join(map(str, ranks))}."
        )
    if (tp := of_actor.rollout.tensor_parallel_size) != (wanted := first.rollout.tensor_parallel_size):
        yield (
            f"--{numbered('rollout-tensor-parallel-size', number)} ({tp}): with --share-episodes all actors have as "
            f"many engines. Try {wanted}."
        )


def _differences(suffix: str, of_actor: TrainConfig, first: TrainConfig) -> Errors:
    """Yield an error per flag in which an actor differs from the first one, though both play the same episodes."""
    for section, names in _SAME.items():
        for name in names:
            value, wanted = (getattr(getattr(one, section), name) for one in (of_actor, first))
            if value != wanted:
                flag = numbered(flag_name(name), number_of(suffix))
                yield (
                    f"--{flag} ({words_of(value)}): with --share-episodes all actors play in the same episodes, and "
                    f"the first actor has {words_of(wanted)}. Leave it out."
                )
    if of_actor.algorithm.greedy_samples != first.algorithm.greedy_samples:
        names = " and ".join(algorithm_name(type(one.algorithm)) for one in (first, of_actor))
        yield (
            f"--share-episodes: one of {names} samples a greedy episode more of each prompt, and all actors play in "
            "the same ones. Give both the same --algorithm, or try ppo."
        )
