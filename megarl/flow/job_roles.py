"""Declare the roles of a training job and their methods, which megarl/workers implements.

To add a role kind, declare it here, and write its implementation in megarl/workers with
`@implements(TheClass)`. To add a method, add it to both classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.flow.role import Role, method
from megarl.packing import MiniBatch, Sample

Metrics = dict[str, float]
"""One rank's part of metrics of the step. `megarl.metrics.combine` combines the dicts of all ranks."""
Record = dict[str, Any]
"""The data of one sample, by name."""


class PlacedRole(Role):
    """A role that has its own ranks, and is set up on them before the first step."""

    @method()
    def setup(self) -> None:
        """Build the role's model, engine or processes on each of its ranks. Collective over the role's
        ranks."""


class ServiceRole(PlacedRole):
    """A role with worker processes or an engine, which must be stopped when the job ends."""

    @method()
    def shut_down(self) -> None:
        """Stop the role's worker processes or its engine."""


class ModelRole(PlacedRole):
    """A role that holds a Megatron model, whose weights can be exported."""

    @method()
    def export_hf(self, folder: str) -> None:
        """Write the weights into `folder` as a Hugging Face checkpoint. Collective over the role's ranks."""


class CheckpointedRole(ModelRole):
    """A role that checkpoints hold: its model, with its optimizer if it has one."""

    @method(optional=True)
    def begin_checkpoint(self, folder: str) -> None:
        """Copy the model and its optimizer for a checkpoint, and return; a thread writes the copy to
        `folder`. Collective over the role's ranks."""

    @method(optional=True)
    def checkpoint_written(self, wait: bool = False) -> str | None:
        """Return the SHA-256 of the manifest of the checkpoint in progress, or None while it is
        incomplete."""

    @method(optional=True)
    def damage_of_checkpoint(self, folder: str) -> str | None:
        """Return why `load_checkpoint` would fail, the same text on every rank, or None if it would succeed.
        An error of the file system is raised: it is no damage."""

    @method(optional=True)
    def load_checkpoint(
        self, folder: str, weights_only: bool = False, digests: bool = True
    ) -> dict[str, object]:
        """Load a checkpoint of any parallel layout into model and optimizer, and return the values that were
        saved beside them."""


class TrainedRole(CheckpointedRole):
    """A role whose model has an optimizer."""


class RandomState(Role):
    """Access to the random number generators of a rank. The role that is on every rank has these methods."""

    @method(optional=True)
    def random_state(self) -> dict[str, str]:
        """Return the state of this process's random number generators as text by name, for
        `set_random_state`."""

    @method(optional=True)
    def set_random_state(self, state: Mapping[str, str]) -> None:
        """Set the generators to a state that `random_state` returned."""


class RunFolderReader(Role):
    """Access to the run folder as a rank sees it. The role that is on every rank has these methods."""

    @method(optional=True)
    def read_nonce(self, path: str, wait_s: float) -> dict[str, str]:
        """Return the first line of a small file of the run folder, with this rank's host name and the
        absolute path: {"nonce": ..., "node": ..., "path": ...}.

        The nonce is "" if the file does not appear within `wait_s` seconds."""


class Rollout(ServiceRole, kind="rollout"):
    """vLLM engines that sample responses with the weights of an actor."""

    @method(
        reads=("weights:actor", "weights:rollout"),
        writes=("tokens", "lengths"),
        phase="rollout",
    )
    def generate(
        self,
        purpose: str,
        visits: Mapping[int, int],
        greedy: bool = False,
        engines: Sequence[int] | None = None,
        wait: bool = True,
        due: Sequence[int] = (),
        keep: bool = False,
    ) -> list[Sample]:
        """Sample responses to dataset rows. The first rank of each engine returns the engine's samples (ids
        and lengths); its other ranks return [].

        Args:
            purpose: "train" (num_samples_per_prompt responses each) or "eval" (eval_num_samples each, one if
                greedy).
            visits: visit of each prompt -> its row.
            engines: number of the engine of each visit. Default: the engines take contiguous blocks of equal
                size.
            wait: False queues the requests and returns [] at once. The engines take steps while their ranks
                wait for calls, and report the groups that are finished as events (see flow/events.py).
            due: visits that --max-tokens-per-step does not limit from now on.
            keep: whether the samples of the last call stay, beside those of this one."""

    @method(optional=True, phase="rollout")
    def sample_canaries(self, count: int) -> list[Sample]:
        """Sample `count` canaries on every engine: short responses to long prompts, the same at every call,
        which are scored but not trained on. The engine's other requests go on in the same steps.

        Returns: the samples of this engine on its first rank only. Engine e has the ids -1 - e * count and
            below."""

    @method(reads=("weights:actor",), writes=("weights:rollout",), reports=True, phase="reshard")
    def sync(self, version: int) -> Metrics:
        """Copy the actor's current weights into the engine as `version`, and return metrics of the copy.
        Collective over the ranks."""

    @method(optional=True)
    def save_requests(self, folder: str, visits: list[int]) -> dict[str, str]:
        """Write the samples of these groups, finished or not, for a checkpoint. Each engine's first rank
        returns file -> its SHA-256.

        Unfinished responses are computed anew from their prefixes, as they are after a resume."""

    @method(optional=True)
    def load_requests(self, folder: str, visits: Mapping[int, int], engines: Sequence[int]) -> None:
        """Queue groups as `generate` does without waiting, and go on where `save_requests` has left them,
        with any number of engines."""

    @method(optional=True)
    def start_engine(self) -> str:
        """Restart the engine of this rank after it has ended or hung. The engine gets weights at the next
        `sync`. Returns why it cannot be started, or ""."""

    @method(optional=True)
    def set_pinned(self, is_pinned: bool) -> None:
        """Let the engine keep its weights from now on, or let the next sync give it new ones."""

    @method(optional=True)
    def set_version(self, version: int) -> None:
        """Give the engine's weights, which have not changed, the number of a later version."""

    @method(optional=True, phase="rollout")
    def catch_up(self) -> Metrics:
        """With --replay, let an engine in the trainer's process take steps until its next planned switch of
        weights. Returns no metrics.

        Once an update has begun, an engine that shares the actor's weights cannot take a step."""


class Reward(ServiceRole, kind="reward"):
    """A role that scores samples with reward functions, without a model. Each rank scores what its own
    rollout engine has generated."""

    @method(reads=("tokens", "lengths"), writes=("rewards",), phase="reward")
    def score(self, purpose: str, sample_ids: Sequence[int], num_logged: int | None = None) -> list[Record]:
        """Score those of the samples that this engine has made. Its first rank returns sample_id, reward and
        texts of each (and the answer found in it, in an evaluation); its other ranks return [].

        Args:
            sample_ids: samples of all engines.
            num_logged: number of samples, the first ones, with texts; None: --num-rollouts-to-log."""


class RewardModel(ServiceRole, kind="reward_model"):
    """A classifier or a judge (a generating model) that scores samples."""

    @method(reads=("tokens", "lengths"), writes=("scores",), phase="reward_model")
    def score(self, rows: Mapping[int, int]) -> list[Record]:
        """Score samples with the model. Each rank returns sample_id and unweighted score of a part of them,
        possibly [].

        Args:
            rows: sample id -> dataset row, for all samples of the step; {} for none."""

    @method(optional=True, phase="reward_model_early")
    def score_groups(self, rows: Mapping[int, int]) -> list[Record]:
        """Score the samples of the batch shard as `score` does, each mini-batch by itself, before a step asks
        for them."""


class Reference(CheckpointedRole, kind="reference"):
    """The policy frozen at the weights that training starts from, or at those of a step not long ago.
    Checkpoints hold it in the second case."""

    @method(optional=True)
    def take_weights(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder, which the actor has written. Collective over the role's
        ranks."""

    @method(reads=("tokens", "lengths"), writes=("teacher_hidden",), optional=True, phase="ref_log_probs")
    def hidden_states(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_hidden, the last hidden states at the samples' tokens, on this rank.

        Args:
            rows: sample id -> dataset row, for all samples of the step."""

    @method(reads=("tokens", "lengths"), writes=("teacher_top_k",), optional=True, phase="ref_log_probs")
    def top_tokens(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_top_k, the most likely tokens in place of each of the samples' tokens, on
        this rank."""

    @method(optional=True)
    def store_log_probs(self, folder: str) -> None:
        """Score the rows that the actor has received, and write their log-probs into files of the folder,
        unless they are there already. Collective over the role's ranks."""

    @method(optional=True)
    def use_stored_log_probs(self, folder: str) -> None:
        """Read the log-probs of all rows from the folder, from where `log_probs` takes them from now on, and
        free the model."""

    @method(reads=("tokens", "lengths"), writes=("ref_log_probs",), reports=True, phase="ref_log_probs")
    def log_probs(self, rows: Mapping[int, int] | None = None) -> Metrics:
        """Write the column ref_log_probs, the log-probs of the samples under the reference policy, on this
        rank.

        Args:
            rows: with several teachers sample id -> dataset row, which chooses the teacher."""


class Critic(TrainedRole, kind="critic"):
    """A trained model that predicts a value, the expected return, at every response token."""

    @method(reads=("tokens", "lengths", "weights:critic"), writes=("values",), phase="values")
    def values(self) -> None:
        """Write the column values, the critic's prediction at every response token, on this rank."""

    @method(
        reads=("tokens", "values", "returns"),
        writes=("weights:critic",),
        reports=True,
        phase="critic_update",
        commits=True,
    )
    def update(self) -> Metrics:
        """Run all optimizer updates of the step on the column returns, and return this rank's part of the
        metrics."""


class CostCritic(TrainedRole, kind="cost_critic"):
    """A trained model that predicts the expected cost at every response token, as a critic the return."""

    @method(reads=("tokens", "lengths", "weights:cost_critic"), writes=("cost_values",), phase="values")
    def values(self) -> None:
        """Write the column cost_values, the prediction at every response token, on this rank."""

    @method(
        reads=("tokens", "cost_values", "cost_returns"),
        writes=("weights:cost_critic",),
        reports=True,
        phase="critic_update",
        commits=True,
    )
    def update(self) -> Metrics:
        """Run all optimizer updates of the step on the column cost_returns, and return this rank's part of
        the metrics."""


class Actor(TrainedRole, RandomState, RunFolderReader, kind="actor"):
    """The policy that is trained."""

    @method()
    def setup(self, is_trained: bool = True) -> None:
        """Build the model and load its weights, with an optimizer if the model `is_trained`. Collective over
        the role's ranks.

        An evaluation only copies the weights into the engines, and needs no optimizer."""

    @method(
        reads=("tokens", "lengths", "weights:actor"),
        writes=("old_log_probs",),
        reports=True,
        phase="log_probs",
    )
    def log_probs(self, version: int | None = None, canaries: bool = False) -> Metrics:
        """Write the column old_log_probs, and return metrics (mismatch/*) that compare it with the engine's
        log-probs.

        Args:
            version: version of the weights now, with --staleness. Tokens that older weights sampled are
                compared in off_policy/*, which the gate does not judge. None compares all tokens in
                mismatch/*.
            canaries: whether the pass also scores the canaries that were distributed."""

    @method(
        reads=("tokens", "lengths", "weights:actor"), writes=("old_scores",), optional=True, phase="log_probs"
    )
    def scores(self) -> None:
        """Write the column old_scores: the score of each sample by this actor, a reward model in training."""

    @method(optional=True)
    def canary_tokens(self) -> list[dict[str, int | float]]:
        """Return trainer's and engine's log-prob of each response token of the scored canaries, in the form
        of `worst_tokens`. One rank of each data-parallel replica returns those of the replica."""

    @method(
        reads=("rewards", "old_log_probs", "ref_log_probs", "values", "cost_values", "old_scores"),
        writes=(
            *("advantages", "returns", "cost_returns", "correction_weights", "selected_tokens"),
            *("ce_weights", "behavior_weights"),
        ),
        reports=True,
        of_algorithm=True,
    )
    def advantages(
        self,
        sample_ids: list[int],
        group_ids: list[int],
        rewards: list[float | None],
        kl_coef: float,
        digests: dict[int, int] | None = None,
        turn_rewards: list[list[float]] | None = None,
        turn_lengths: list[list[int]] | None = None,
        scores: dict[str, list[float | None]] | None = None,
        score_weights: dict[str, float] | None = None,
        multiplier: float | None = None,
    ) -> Metrics:
        """Write the column advantages and, with a critic, returns, which the algorithm computes from the
        rewards. Returns metrics.

        Args:
            sample_ids, group_ids, rewards: of all samples of the step. A reward of None has failed.
            kl_coef: factor of the KL to the reference.
            digests: bind each reward to its sample's tokens. None skips this check of the rewards.
            turn_rewards, turn_lengths: with --turn-rewards the reward and the sampled tokens of each answer
                of every sample.
            scores, score_weights: for an algorithm that learns from single scores, name -> score of each
                sample, and name -> weight in the reward.
            multiplier: factor of the cost, for an algorithm that holds one below a limit."""

    @method(
        reads=("tokens", "old_log_probs", "ref_log_probs?", "advantages"),
        writes=("weights:actor",),
        reports=True,
        phase="update",
        commits=True,
    )
    def update(
        self,
        kl_coef: float = 0.0,
        sft_visits: Mapping[int, int] | None = None,
        sft_mini_batches: list[MiniBatch] | None = None,
    ) -> Metrics:
        """Run all optimizer updates of the step on the column advantages, and return this rank's part of the
        metrics.

        Args:
            sft_visits, sft_mini_batches: with --sft-data visit -> row, and the rows of each update."""

    @method(optional=True)
    def load_sft_rows(self) -> list[tuple[int, int]] | None:
        """Tokenize the rows of --sft-data. Return (length, response length) of each, from the first rank
        only."""

    @method()
    def send_weights(self, version: int) -> None:
        """Send this rank's weights to the engines during `Rollout.sync`, if the rank has no engine itself."""

    @method()
    def worst_tokens(self, count: int) -> list[dict[str, int | float]]:
        """Return the `count` tokens with the largest difference between the trainer's and the engine's
        log-probs. One rank of each data-parallel replica returns some."""

    @method(optional=True)
    def load_dataset(self) -> list[list[tuple[int, int, float | None]]] | None:
        """Tokenize the training rows of an algorithm that samples nothing, and return, for every row,
        (length, response length, reward or None) of each of its samples, from the mesh's first rank only."""

    @method(optional=True)
    def digest_rows(self) -> str:
        """Return a digest of the samples of all training rows, which `load_dataset` has tokenized."""

    @method(writes=("tokens",), optional=True)
    def receive_rows(self, visits: Mapping[int, int], mini_batches: list[MiniBatch]) -> None:
        """Turn dataset rows into the samples of the step, as the first node of an algorithm that samples
        nothing.

        Args:
            visits: visit -> dataset row. The n samples of visit v have the ids n v, n v + 1, ...
            mini_batches: planned by the driver from the lengths that `load_dataset` returned."""


class Data(RandomState, RunFolderReader, kind="data"):
    """Moves samples and their columns to the ranks that train on them. Is on every rank of a job that
    samples."""

    @method(reports=True)
    def distribute(
        self, key: str, samples: list[Sample], mini_batches: list[MiniBatch], source: str = "train"
    ) -> Metrics:
        """Send samples from the ranks that hold them to all ranks of a mesh, whose next training batch they
        become. Returns metrics of the transfer.

        Args:
            key: shard key of the mesh.
            source: the rollout source of the samples."""

    @method(reports=True)
    def exchange(self, columns: Sequence[str], source: str, destination: str) -> Metrics:
        """Send token columns from the ranks of one mesh to those of another. Returns metrics of the
        transfer."""

    @method()
    def release(self, sample_ids: Sequence[int], source: str = "train") -> None:
        """Free samples that were trained on: the rollouts, and the columns that meshes computed for them."""


class Profiler(Role, kind="profiler"):
    """Records what a rank does. It is on the ranks of --profile-ranks, and only with --profile."""

    @method()
    def start(self) -> list[str]:
        """Start to record, and return notes for the user."""

    @method()
    def stop(self, folder: str, name: str) -> list[str]:
        """Stop recording, write the files of this rank, and return notes for the user: the files, or why
        there are none.

        Args:
            folder: folder of the files.
            name: beginning of the files' names, before the rank."""
