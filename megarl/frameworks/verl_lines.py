"""Make the lines of an args file that several of verl's settings decide together.

Each function is `lines` of rows of the table in verl.py."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.frameworks.rows import (
    KL_ESTIMATORS,
    Line,
    Settings,
    as_list,
    as_number,
    key_of,
    lora,
    model_folder,
    schedule,
    trackers,
    train_iters,
)

ACTOR, ROLLOUT, REF, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
)
OVERRIDE = f"{ACTOR}.optim.override_optimizer_config"
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "opo": "opo",
}
"""algorithm.adv_estimator -> --algorithm."""
LOSSES = {
    "vanilla": "ppo",
    "cispo": "cispo",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "gpg": "reinforce",
    "dppo_tv": "dppo-tv",
    "dppo_kl": "dppo-kl",
    "clip_cov": "clip-cov",
    "clip-cov": "clip-cov",
    "kl_cov": "kl-cov",
    "kl-cov": "kl-cov",
}
"""actor.policy_loss.loss_mode -> --policy-loss."""
SEQUENCE_MEAN = ("gspo", "gmpo", "sapo")
"""Values of --policy-loss whose loss verl averages over the sequences, whatever actor.loss_agg_mode says."""
AGGREGATIONS = {"seq-mean-token-sum-norm": "dr-grpo"}
"""actor.loss_agg_mode -> --loss-aggregation, where the names differ."""
CLIPPED = ("ppo", "cispo", "gspo", "gmpo", "clip-cov")
"""Values of --policy-loss that have --clip-eps-low and --clip-eps-high."""
PARAMETERS = {
    "clip-cov": {
        "cov-share": "policy_loss.clip_cov_ratio",
        "cov-low": "policy_loss.clip_cov_lb",
        "cov-high": "policy_loss.clip_cov_ub",
    },
    "kl-cov": {"cov-share": "policy_loss.kl_cov_ratio", "cov-kl-coef": "policy_loss.ppo_kl_coef"},
    "sapo": {"sapo-tau-pos": "tau_pos", "sapo-tau-neg": "tau_neg"},
}
"""Value of --policy-loss -> our flags that only it reads -> the settings of `actor` that they are."""
STYLE_NAMES = ("lr_scheduler_type", "lr_decay_style", "warmup_style")
"""Names that the schedule of the learning rate has had."""
OFFLOADED = {"param": "parameters", "grad": "gradients", "optimizer": "optimizer"}
"""Part that fsdp_config.*offload names -> its name for --offload."""
SIZES = tuple(
    f"{kind}_parallel_size"
    for kind in (
        "tensor_model",
        "pipeline_model",
        "virtual_pipeline_model",
        "context",
        "expert_model",
        "expert_tensor",
    )
)


def nearest_algorithm(estimator: object) -> str:
    """Return the --algorithm for an estimator of advantages, or grpo for an estimator that megarl lacks."""
    return ESTIMATORS.get(key_of(estimator), "grpo")


def algorithm(settings: Settings) -> Iterator[Line]:
    name = key_of(settings["algorithm.adv_estimator"])
    note = "" if name in ESTIMATORS else f"the nearest; for {name} write an algorithm: docs/algorithms.md"
    yield Line("algorithm", nearest_algorithm(name), note)
    if name == "gae":
        yield Line("gamma", settings["algorithm.gamma"])
        yield Line("gae-lambda", settings["algorithm.lam"])
        yield Line("value-clip-eps", settings["critic.cliprange_value"])
        yield Line("critic-warmup-iters", settings["trainer.critic_warmup"])
    elif nearest_algorithm(name) == "grpo" and not settings.is_on("algorithm.norm_adv_by_std_in_grpo"):
        yield Line("normalize-advantages-by-std", False)


def model(settings: Settings) -> Iterator[Line]:
    yield model_folder(settings[f"{MODEL}.path"])
    yield Line("bf16", note="verl computes in bfloat16 too")
    if key_of(settings["algorithm.adv_estimator"]) == "gae" and settings["critic.model.path"]:
        yield model_folder(settings["critic.model.path"])._replace(flag="critic-model")


def steps(settings: Settings) -> Iterator[Line]:
    steps = settings.number("trainer.total_training_steps")
    if steps is not None and steps > 0:
        yield Line("train-iters", steps)
        return
    prompts = settings["data.train_batch_size"]
    yield train_iters(
        settings.number("trainer.total_epochs") or 1, settings.rows, prompts, "trainer.total_epochs"
    )


def rates(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the learning rates. The schedules of verl and megarl both count steps."""
    has_critic = key_of(settings["algorithm.adv_estimator"]) == "gae"
    for prefix, there in (("", f"{ACTOR}.optim"), ("critic-", "critic.optim"))[: 1 + has_critic]:
        warmup, ratio = (
            settings.number(f"{there}.lr_warmup_steps"),
            settings.number(f"{there}.lr_warmup_steps_ratio"),
        )
        total = settings.ours.get("train-iters")
        if (warmup is None or warmup < 0) and ratio and isinstance(total, int):
            warmup = int(ratio * total)
        style = next(
            (value for name in STYLE_NAMES if (value := settings[f"{there}.{name}"]) is not None),
            "constant",
        )
        yield from schedule(prefix, settings[f"{there}.lr"], style, warmup, settings[f"{there}.min_lr_ratio"])
        if (warmup is None or warmup < 0) and ratio:
            yield Line("", note=f"--{prefix}lr-warmup-iters = {ratio} x --train-iters")


def betas(settings: Settings) -> Iterator[Line]:
    for flag, beta in zip(
        ("adam-beta1", "adam-beta2"), as_list(settings[f"{ACTOR}.optim.betas"]), strict=False
    ):
        yield Line(flag, as_number(beta))


def kl(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the KL penalty: whether it is part of the loss or of the reward, its coefficient and
    its estimator."""
    in_loss, in_reward = settings.is_on(f"{ACTOR}.use_kl_loss"), settings.is_on("algorithm.use_kl_in_reward")
    mode = "loss" if in_loss else "reward"
    factor = settings[f"{ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"]
    estimator = key_of(settings[f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty"])
    if not (in_loss or in_reward) or not as_number(factor):
        old = settings.given.get("algorithm.kl_ctrl.kl_coef")
        why = (
            f"verl without algorithm.use_kl_in_reward always subtracted it: --kl-mode reward --kl-coef {old}"
        )
        asked = in_loss or as_number(old) is None or "algorithm.use_kl_in_reward" in settings.given
        yield Line("kl-mode", "none", "" if asked or not as_number(old) else f"an old {why}")
        return
    yield Line("kl-mode", mode)
    yield Line("kl-coef", factor)
    yield Line("kl-estimator", KL_ESTIMATORS.get(estimator.rstrip("+"), "k3"))
    if estimator.endswith("+"):
        yield Line("kl-straight-through")
    if in_loss and in_reward:
        yield Line("", note="algorithm.use_kl_in_reward: the KL is counted in one place here, the loss")
    if key_of(settings["algorithm.kl_ctrl.type"]) == "adaptive" and not in_loss:
        target = settings["algorithm.kl_ctrl.target_kl"]
        yield Line("kl-controller", "adaptive")
        yield Line(
            "", note=f"--kl-target is per response: algorithm.kl_ctrl.target_kl ({target}) is per token"
        )
        yield Line("kl-horizon", settings["algorithm.kl_ctrl.horizon"])


def clip(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the policy loss and of its clip ranges."""
    mode = key_of(settings[f"{ACTOR}.policy_loss.loss_mode"])
    loss = LOSSES.get(mode, "ppo")
    near = f"the nearest to {mode}; docs/algorithms.md says how to add a loss"
    yield Line("policy-loss", loss, "" if mode in LOSSES else near)
    if loss.startswith("dppo"):
        yield Line("dppo-threshold", settings[f"{ACTOR}.clip_ratio"])
    for side in ("low", "high") if loss in CLIPPED else ():
        value = settings[f"{ACTOR}.clip_ratio_{side}"]
        value = settings[f"{ACTOR}.clip_ratio"] if value is None else value
        if side == "low" and (as_number(value) or 0) > 1:
            yield Line("clip-eps-low", 1.0, f"{value} there: a ratio is never below 0")
        else:
            yield Line(f"clip-eps-{side}", value)
    if loss == "ppo":
        yield Line("clip-ratio-c", settings[f"{ACTOR}.clip_ratio_c"])
    for flag, name in PARAMETERS.get(loss, {}).items():
        yield Line(flag, settings[f"{ACTOR}.{name}"])


def aggregation(settings: Settings) -> Iterator[Line]:
    """Yield how the losses of tokens become one number."""
    mode = key_of(settings[f"{ACTOR}.policy_loss.loss_mode"])
    given, old = settings[f"{ACTOR}.loss_agg_mode"], settings[f"{ACTOR}.use_token_level_loss"]
    if LOSSES.get(mode) in SEQUENCE_MEAN:
        note = f"verl's {mode} takes this mean, whatever loss_agg_mode says"
        yield Line("loss-aggregation", "seq-mean-token-mean", note)
    elif old is not None and f"{ACTOR}.loss_agg_mode" not in settings.given:
        is_token = settings.is_on(f"{ACTOR}.use_token_level_loss")
        yield Line("loss-aggregation", "token-mean" if is_token else "seq-mean-token-mean")
    else:
        yield Line("loss-aggregation", AGGREGATIONS.get(key_of(given), given))


def adapters(settings: Settings) -> Iterator[Line]:
    names = (
        ("lora.rank", "lora_rank"),
        ("lora.alpha", "lora_alpha"),
        ("lora.target_modules", "target_modules"),
    )
    values = [settings.given.get(f"{MODEL}.{new}", settings[f"{MODEL}.{old}"]) for new, old in names]
    yield from lora(*values)


def ranks(settings: Settings) -> Iterator[Line]:
    nodes, gpus = settings.number("trainer.nnodes"), settings.number("trainer.n_gpus_per_node")
    if nodes is None or gpus is None:
        yield Line("", note="--nproc-per-node = trainer.nnodes x trainer.n_gpus_per_node")
        return
    start = f"torchrun --nnodes {nodes} --nproc-per-node {gpus} -m megarl.train @FILE"
    yield Line("nproc-per-node", nodes * gpus, "" if nodes == 1 else f"for megarl check; start with {start}")


def sizes(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the actor's parallel sizes, and of those of other roles where they differ."""
    roles = {"": ACTOR}
    if settings.ours.get("kl-mode", "none") != "none":
        roles["reference-"] = REF
    if key_of(settings["algorithm.adv_estimator"]) == "gae":
        roles["critic-"] = "critic"
    for role, there in roles.items():
        for size in SIZES:
            value, actors = settings[f"{there}.megatron.{size}"], settings[f"{ACTOR}.megatron.{size}"]
            if value is not None and (not role or value != actors):
                yield Line(f"{role}{size.replace('_', '-')}", value)
    is_split = (settings.number(f"{ACTOR}.megatron.tensor_model_parallel_size") or 1) > 1
    if is_split and settings.is_on(f"{ACTOR}.megatron.sequence_parallel"):
        yield Line("sequence-parallel")


def kv_cache(settings: Settings) -> Iterator[Line]:
    """Yield the flag by which the engine keeps its KV cache while roles train, if verl's setting says so.
    Both frameworks release the cache by default."""
    if not settings.is_on(f"{ROLLOUT}.free_cache_engine"):
        yield Line("rollout-release-kv-cache", False)


def offload(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the parts that leave the device while other roles compute."""
    on_cpu = settings.is_on(f"{OVERRIDE}.optimizer_cpu_offload")
    is_saved = (settings.number("trainer.save_freq") or 0) > 0
    parts = [part for part in OFFLOADED if _is_offloaded(settings, ACTOR, part)]
    if on_cpu and not is_saved:  # it is in host memory all the time
        yield Line("optimizer-cpu-offload")
        yield Line("optimizer-offload-fraction", settings[f"{OVERRIDE}.optimizer_offload_fraction"])
        parts = [part for part in parts if part != "optimizer"]
    elif on_cpu:
        parts = list(dict.fromkeys([*parts, "optimizer"]))
    if parts:
        near = "optimizer between updates only: --optimizer-cpu-offload cannot be saved yet"
        names = [OFFLOADED[part] for part in parts]
        yield Line("actor-offload", names, near if on_cpu and is_saved else "")
    if "param" in parts:
        yield Line("reshard-alias", False, "the engine keeps weights of its own")
    if _is_offloaded(settings, REF, "param") and settings.ours.get("kl-mode", "none") != "none":
        yield Line("reference-offload", ["parameters"])


def _is_offloaded(settings: Settings, role: str, part: str) -> bool:
    return any(settings.is_on(f"{role}.{engine}.{part}offload") for engine in ("fsdp_config", "megatron"))


def folder(settings: Settings) -> Iterator[Line]:
    name = settings["trainer.experiment_name"]
    folder = settings["trainer.default_local_dir"] or f"runs/{name}"
    yield Line("save", folder)
    mode = key_of(settings["trainer.resume_mode"])
    if mode == "resume_path":
        yield Line("load", settings["trainer.resume_from_path"], "a megarl run folder or checkpoint")
    elif mode == "auto":
        yield Line("load", folder, "goes on where this run stopped, as verl does; begins if there is none")


def intervals(settings: Settings) -> Iterator[Line]:
    yield Line("save-interval", max(settings.number("trainer.save_freq") or 0, 0))
    interval = max(settings.number("trainer.test_freq") or 0, 0)
    if interval and settings.ours.get("reward-model") and not settings.ours.get("reward-function"):
        yield Line("", note=f"--eval-interval {interval} needs --reward, which then counts in training too")
    elif interval and not settings["data.val_files"]:
        yield Line("", note=f"--eval-interval {interval} needs --eval-data")
    else:
        yield Line("eval-interval", interval)
    if (kept := settings.number("trainer.max_actor_ckpt_to_keep") or 0) > 0:
        yield Line("keep", kept)


def files(settings: Settings) -> Iterator[Line]:
    for flag, name in (("train-data", "data.train_files"), ("eval-data", "data.val_files")):
        files = as_list(settings[name])
        yield Line(flag, files) if files else Line("", note=f"--{flag} FILE ...: {name} is not given")


def rewards(settings: Settings) -> Iterator[Line]:
    if settings.is_on("reward_model.enable") and settings["reward_model.model.path"]:
        yield Line("reward-model", [settings["reward_model.model.path"]])
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        if path := settings[f"{section}.path"]:
            yield Line("reward-function", f"{path}:{settings[f'{section}.name']}")
            return


def loggers(settings: Settings) -> Iterator[Line]:
    yield from trackers(settings["trainer.logger"])
